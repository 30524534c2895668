"""The request scheduler against a naive model of its rules, and in simulated service."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler import assert_nothing_kept

from omni_engine.engine.scheduler import (
    Assignment,
    RequestScheduler,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)

DONE = RequestStatus.FINISHED_COMPLETED
ABORTED = RequestStatus.FINISHED_ABORTED
ERROR = RequestStatus.FINISHED_ERROR

steady = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

configs = st.builds(
    SchedulerConfig,
    max_num_seqs=st.integers(1, 5),
    max_batch_rows=st.none() | st.integers(3, 8),
    max_batch_work=st.none() | st.integers(3, 12),
    request_batch_max_wait_ms=st.sampled_from([0, 0, 40, 500, 3000]),
    policy=st.sampled_from(["grouped", "grouped", "fifo"]),
    max_skip_ms=st.sampled_from([0, 100, 1000]),
)
adapters = st.sampled_from([None, "A", "B"])
slots = st.builds(
    WorkerSlot, st.just(""), adapters, st.frozensets(st.sampled_from(["A", "B"]), max_size=2)
)
worker_sets = st.lists(slots, max_size=3).map(
    lambda drawn: [
        WorkerSlot(f"w{n}", one.active_adapter, one.held_adapters) for n, one in enumerate(drawn)
    ]
)


# The rules once more, with lists: every question is answered by looking at everything


@dataclass
class Item:
    request_id: str
    group: tuple
    rows: int
    work: int
    arrival: float
    seq: int
    aborted: bool = False


@dataclass
class Naive:
    config: SchedulerConfig
    waiting: list[Item] = field(default_factory=list)
    running: dict[str, Item] = field(default_factory=dict)
    seen: float = float("-inf")

    def first_batch(self, items: list[Item]) -> tuple[list[Item], bool]:
        """The longest prefix that fits, and whether it is full."""
        max_rows = self.config.max_batch_rows or 10**9
        max_work = self.config.max_batch_work or 10**9
        for size in range(len(items), 0, -1):
            rows = sum(item.rows for item in items[:size])
            work = sum(item.work for item in items[:size])
            if size <= self.config.max_num_seqs and rows <= max_rows and work <= max_work:
                break
        used_up = size == self.config.max_num_seqs or rows == max_rows or work == max_work
        return items[:size], used_up or size < len(items)

    def groups(self) -> list[list[Item]]:
        """The groups, that of the oldest request first."""
        found: dict[tuple, list[Item]] = {}
        for item in self.waiting:
            found.setdefault(item.group, []).append(item)
        return list(found.values())

    def candidates(self) -> list[list[Item]]:
        if self.config.policy == "grouped" or not self.waiting:
            return self.groups()
        first = self.waiting[0].group
        return [list(itertools.takewhile(lambda item: item.group == first, self.waiting))]

    def wait_end(self, items: list[Item]) -> float:
        return items[0].arrival + self.config.request_batch_max_wait_ms / 1000

    def pick(self, unclaimed: list[WorkerSlot], now: float) -> list[Item] | None:
        batches = [(self.first_batch(items), self.wait_end(items)) for items in self.candidates()]
        ready = [(batch, full) for (batch, full), end in batches if full or end <= now]
        if not ready:
            return None
        if self.config.policy == "fifo":
            return ready[0][0]
        (oldest, _), _ = batches[0]
        if oldest[0].arrival + self.config.max_skip_ms / 1000 <= now:
            return oldest

        def rank(candidate):
            batch, full = candidate
            adapter = batch[0].group[1]
            if any(slot.active_adapter == adapter for slot in unclaimed):
                switch = 0
            else:
                switch = 2 - any(adapter in slot.held_adapters for slot in unclaimed)
            size = self.config.max_num_seqs if full else len(batch)
            return -size, switch, batch[0].seq

        return min(ready, key=rank)[0]

    def schedule(self, idle: list[WorkerSlot], now: float) -> list[list[Item]]:
        self.seen = now
        unclaimed, batches = list(idle), []
        while len(batches) < len(idle) and (batch := self.pick(unclaimed, now)):
            batches.append(batch)
            for item in batch:
                self.waiting.remove(item)
                self.running[item.request_id] = item
            suited = [slot for slot in unclaimed if slot.active_adapter == batch[0].group[1]]
            if suited:
                unclaimed.remove(suited[0])
        return batches

    def next_deadline(self, now: float) -> float | None:
        ends = [
            self.wait_end(items) for items in self.candidates() if not self.first_batch(items)[1]
        ]
        later = [end for end in ends if end > self.seen]
        if not later or not self.config.request_batch_max_wait_ms:
            return None
        return max(now, min(later))

    def abort(self, request_id: str) -> RequestStatus | None:
        if request_id in self.running:
            self.running[request_id].aborted = True
            return RequestStatus.RUNNING
        kept = [item for item in self.waiting if item.request_id != request_id]
        found = len(kept) < len(self.waiting)
        self.waiting = kept
        return ABORTED if found else None

    def finish(self, request_id: str, status: RequestStatus) -> RequestStatus | None:
        item = self.running.pop(request_id, None)
        if item is None:
            return None
        return ABORTED if item.aborted else status

    def requeue(self, request_ids: list[str]) -> list[str]:
        lost = [self.running.pop(i) for i in request_ids if i in self.running]
        lost.sort(key=lambda item: item.seq)
        self.waiting += [item for item in lost if not item.aborted]
        self.waiting.sort(key=lambda item: item.seq)
        return [item.request_id for item in lost if item.aborted]


def check_placement(got: list[Assignment], idle: list[WorkerSlot]) -> None:
    """Workers are distinct, and as few of them as possible must switch their adapter."""
    by_id = {slot.worker_id: slot for slot in idle}
    used = [by_id[assignment.worker_id] for assignment in got]
    assert len({slot.worker_id for slot in used}) == len(used)
    kept = sum(
        slot.active_adapter == assignment.adapter
        for slot, assignment in zip(used, got, strict=True)
    )
    wanted = Counter(assignment.adapter for assignment in got)
    offered = Counter(slot.active_adapter for slot in idle)
    assert kept == (wanted & offered).total()


operations = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), adapters, st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("add"), st.just(0), st.none(), st.just(1), st.just(1)),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.001, 0.04, 0.3, 1.0])),
    st.tuples(st.just("wait for the deadline")),
    st.tuples(st.just("schedule"), worker_sets),
    st.tuples(st.just("abort"), st.integers(0, 60)),
    st.tuples(st.just("finish"), st.integers(0, 60), st.sampled_from([DONE, ERROR, ABORTED])),
    st.tuples(st.just("requeue"), st.lists(st.integers(0, 60), max_size=6)),
)


class Pair:
    """The scheduler and the model, given the same calls and compared after each."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = RequestScheduler(config)
        self.model = Naive(config)
        self.now = 100.0
        self.count = 0

    def some_id(self, number: int) -> str:
        return f"r{number % (self.count + 1)}"

    def apply(self, operation: str, *args) -> None:
        getattr(self, "do_" + operation.split()[0])(*args)
        assert self.scheduler.waiting_ids() == [item.request_id for item in self.model.waiting]
        assert self.scheduler.num_running == len(self.model.running)
        assert self.scheduler.next_deadline(self.now) == self.model.next_deadline(self.now)

    def do_add(self, key, adapter, rows, work) -> None:
        name = f"r{self.count}"
        self.scheduler.add(name, key=key, adapter=adapter, rows=rows, work=work, now=self.now)
        self.model.waiting.append(Item(name, (key, adapter), rows, work, self.now, self.count))
        self.count += 1

    def do_wait(self, seconds: float | None = None) -> None:
        if seconds is None:
            self.now = self.scheduler.next_deadline(self.now) or self.now
        else:
            self.now += seconds

    def do_schedule(self, idle) -> None:
        got = self.scheduler.schedule(idle, self.now)
        want = self.model.schedule(idle, self.now)
        assert [list(assignment.request_ids) for assignment in got] == [
            [item.request_id for item in batch] for batch in want
        ]
        for assignment, batch in zip(got, want, strict=True):
            assert {(assignment.key, assignment.adapter)} == {item.group for item in batch}
            assert assignment.rows == sum(item.rows for item in batch)
        check_placement(got, idle)

    def do_abort(self, number) -> None:
        name = self.some_id(number)
        assert self.scheduler.abort(name, self.now) == self.model.abort(name)

    def do_finish(self, number, status) -> None:
        name = self.some_id(number)
        assert self.scheduler.finish(name, status, self.now) == self.model.finish(name, status)

    def do_requeue(self, numbers) -> None:
        names = [self.some_id(number) for number in numbers]
        assert self.scheduler.requeue(names, self.now) == self.model.requeue(names)

    def drain(self) -> None:
        slots = [WorkerSlot("w0", "A"), WorkerSlot("w1", None)]
        while self.model.waiting or self.model.running:
            for name in list(self.model.running):
                self.apply("finish", int(name[1:]), DONE)
            self.apply("wait for the deadline")
            self.apply("schedule", slots)


@settings(steady, max_examples=300)
@given(configs, st.lists(operations, min_size=20, max_size=100))
def test_every_decision_is_that_of_the_naive_model(config, steps):
    pair = Pair(config)
    for step in steps:
        pair.apply(*step)
    pair.drain()
    assert_nothing_kept(pair.scheduler)


# Simulated service: events in time order, the scheduler woken by them and by its own deadlines


@dataclass(frozen=True)
class Arrival:
    time: float
    key: int
    adapter: str | None
    rows: int = 1
    abort_after: float | None = None


@dataclass
class Service:
    """Workers that serve arrivals, and a log of what happened to each request."""

    config: SchedulerConfig
    arrivals: list[Arrival]
    workers: int
    duration: float
    loss_at: float | None = None
    arrived: dict[str, Arrival] = field(default_factory=dict)
    started: dict[str, list[float]] = field(default_factory=dict)
    ended: dict[str, RequestStatus] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    batches: list[tuple[float, Assignment]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = RequestScheduler(self.config)
        self.idle = {f"w{n}": WorkerSlot(f"w{n}", None) for n in range(self.workers)}
        self.busy: dict[str, Assignment] = {}
        self.tie = itertools.count()
        self.events: list[tuple] = []
        for number, arrival in enumerate(self.arrivals):
            self.at(arrival.time, self.arrive, f"r{number}", arrival)
        if self.loss_at is not None:
            self.at(self.loss_at, self.lose)

    def at(self, time: float, action, *args) -> None:
        heapq.heappush(self.events, (time, next(self.tie), action, args))

    def run(self) -> Service:
        now = 0.0
        while True:
            deadline = self.scheduler.next_deadline(now)
            due = [time for time in (deadline, self.events and self.events[0][0]) if time]
            if not due:
                return self
            now = min(due)
            while self.events and self.events[0][0] <= now:
                _, _, action, args = heapq.heappop(self.events)
                action(now, *args)
            self.dispatch(now)

    def arrive(self, now: float, name: str, arrival: Arrival) -> None:
        self.arrived[name] = arrival
        self.scheduler.add(
            name, key=arrival.key, adapter=arrival.adapter, rows=arrival.rows, now=now
        )
        if arrival.abort_after is not None:
            self.at(now + arrival.abort_after, self.abort, name)

    def abort(self, now: float, name: str) -> None:
        if self.scheduler.abort(name, now) is ABORTED:
            self.end(name, ABORTED)

    def dispatch(self, now: float) -> None:
        waiting = self.scheduler.waiting_ids()
        for batch in self.scheduler.schedule(list(self.idle.values()), now):
            self.check(now, batch, waiting)
            waiting = [name for name in waiting if name not in batch.request_ids]
            del self.idle[batch.worker_id]
            self.busy[batch.worker_id] = batch
            self.batches.append((now, batch))
            for name in batch.request_ids:
                self.started.setdefault(name, []).append(now)
            self.at(now + self.duration, self.complete, batch)
        assert self.scheduler.num_running == sum(len(b.request_ids) for b in self.busy.values())

    def check(self, now: float, batch: Assignment, waiting: list[str]) -> None:
        """What holds for every batch; ``waiting`` is what waited just before it was picked."""
        members = [self.arrived[name] for name in batch.request_ids]
        assert {(one.key, one.adapter) for one in members} == {(batch.key, batch.adapter)}
        assert 1 <= len(members) <= self.config.max_num_seqs
        assert sum(one.rows for one in members) <= (self.config.max_batch_rows or 10**9)
        same = [
            name
            for name in waiting
            if (self.arrived[name].key, self.arrived[name].adapter) == (batch.key, batch.adapter)
        ]
        assert list(batch.request_ids) == same[: len(members)]
        if self.config.policy == "fifo":
            assert list(batch.request_ids) == waiting[: len(members)]
            return
        max_skip = self.config.max_skip_ms / 1000
        passed_over = waiting[: waiting.index(batch.request_ids[0])]
        assert not [i for i in passed_over if self.arrived[i].time + max_skip <= now]

    def complete(self, now: float, batch: Assignment) -> None:
        if self.busy.get(batch.worker_id) is not batch:
            return
        self.free(batch)
        for name in batch.request_ids:
            self.end(name, self.scheduler.finish(name, DONE, now))

    def lose(self, now: float) -> None:
        """The first busy worker dies and comes back at once, with nothing loaded."""
        for batch in list(self.busy.values())[:1]:
            self.free(batch, adapter=None)
            aborted = self.scheduler.requeue(batch.request_ids, now)
            self.lost.update(batch.request_ids)
            for name in aborted:
                self.end(name, ABORTED)

    def free(self, batch: Assignment, **slot) -> None:
        del self.busy[batch.worker_id]
        adapter = slot.get("adapter", batch.adapter)
        self.idle[batch.worker_id] = WorkerSlot(batch.worker_id, adapter)

    def end(self, name: str, status: RequestStatus | None) -> None:
        assert status is not None
        assert name not in self.ended
        self.ended[name] = status

    def waits(self) -> Iterator[tuple[str, float]]:
        for name, times in self.started.items():
            yield name, times[0] - self.arrived[name].time


def draw_arrivals(gaps) -> st.SearchStrategy[list[Arrival]]:
    one = st.tuples(
        gaps,
        st.integers(0, 2),
        adapters,
        st.integers(1, 3),
        st.none() | st.none() | st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    )

    def build(rows):
        times = itertools.accumulate(row[0] for row in rows)
        return [Arrival(1.0 + time, *row[1:]) for time, row in zip(times, rows, strict=True)]

    return st.lists(one, min_size=10, max_size=60).map(build)


@settings(steady, max_examples=300)
@given(
    config=configs,
    arrivals=draw_arrivals(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 2.0])),
    workers=st.integers(1, 3),
    duration=st.sampled_from([0.05, 0.4, 1.0]),
    loss_at=st.none() | st.sampled_from([1.2, 2.0, 3.3]),
)
def test_in_service_nothing_is_lost_nothing_runs_twice_and_nothing_is_kept(
    config, arrivals, workers, duration, loss_at
):
    service = Service(config, arrivals, workers, duration, loss_at).run()
    assert len(service.ended) == len(arrivals)
    for name, arrival in service.arrived.items():
        runs = len(service.started.get(name, []))
        if service.ended[name] is DONE:
            assert runs == 1 + (name in service.lost)
        else:
            assert service.ended[name] is ABORTED
            assert arrival.abort_after is not None
            assert runs <= 1 + (name in service.lost)
    assert_nothing_kept(service.scheduler)


@settings(steady, max_examples=150)
@given(
    config=configs,
    arrivals=draw_arrivals(st.sampled_from([0.0, 0.1, 0.5])),
    workers=st.integers(1, 3),
)
def test_order_of_starts(config, arrivals, workers):
    service = Service(config, arrivals, workers, 0.4).run()
    order = [int(name[1:]) for _, batch in service.batches for name in batch.request_ids]
    if config.policy == "fifo":
        assert order == sorted(order)
    for group in {(arrival.key, arrival.adapter) for arrival in arrivals}:
        own = [n for n in order if (arrivals[n].key, arrivals[n].adapter) == group]
        assert own == sorted(own)


def hot_and_cold(duration: float, cold_gap: float, colds: int) -> list[Arrival]:
    """Two hot requests per batch duration without a break, and now and then one of a cold key."""
    span = colds * cold_gap
    hot = [Arrival(1.0 + n * duration / 2, 0, None) for n in range(int(2 * span / duration))]
    cold = [Arrival(1.0 + n * cold_gap, 1 + n % 3, "B") for n in range(colds)]
    return sorted(hot + cold, key=lambda arrival: arrival.time)


@settings(steady, max_examples=60)
@given(
    duration=st.sampled_from([0.1, 0.3, 0.5]),
    max_skip=st.sampled_from([0.5, 1.0, 2.0]),
    wait=st.sampled_from([0.0, 0.05, 0.4]),
    workers=st.integers(1, 2),
    colds=st.integers(1, 8),
    spare=st.floats(0.01, 1.0),
)
def test_without_overload_nobody_waits_longer_than_max_skip_and_a_batch(
    duration, max_skip, wait, workers, colds, spare
):
    config = SchedulerConfig(
        max_num_seqs=4, request_batch_max_wait_ms=wait * 1000, max_skip_ms=max_skip * 1000
    )
    arrivals = hot_and_cold(duration, max_skip + wait + 2 * duration + spare, colds)
    service = Service(config, arrivals, workers, duration).run()
    bound = max_skip + duration + wait
    assert max(waited for _, waited in service.waits()) <= bound + 1e-9


def test_it_is_max_skip_that_keeps_the_cold_from_starving():
    def longest_cold_wait(max_skip_ms):
        config = SchedulerConfig(max_num_seqs=4, max_skip_ms=max_skip_ms)
        service = Service(config, hot_and_cold(0.5, 10.0, 2), 1, 0.5).run()
        return max(w for name, w in service.waits() if service.arrived[name].key != 0)

    assert longest_cold_wait(1000) <= 1.5
    assert longest_cold_wait(1e6) > 5


def test_under_overload_every_group_still_moves_in_order_of_age():
    """Three times what the worker can do: waits grow, but no group falls behind the others."""
    config = SchedulerConfig(max_num_seqs=2, max_skip_ms=500)
    keys = itertools.cycle([0, 0, 0, 0, 1, 0, 0, 0, 0, 2])
    arrivals = [Arrival(1.0 + n / 12, next(keys), None) for n in range(300)]
    service = Service(config, arrivals, 1, 0.5).run()
    for time, batch in service.batches:
        head = service.arrived[batch.request_ids[0]]
        waiting = [
            arrival
            for name, arrival in service.arrived.items()
            if arrival.time <= time and service.started[name][0] > time
        ]
        assert all(arrival.time > head.time for arrival in waiting if time - arrival.time >= 0.5)
