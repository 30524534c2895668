"""The request scheduler against a naive model of its rules, and in simulated service."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_service import ABORTED, DONE, Arrival, Service, assert_nothing_kept

from omni_engine.engine.scheduler import (
    Assignment,
    RequestScheduler,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)

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
    max_mixed_adapters=st.sampled_from([None, None, 2, 3]),
    request_batch_max_wait_ms=st.sampled_from([0, 0, 40, 500, 3000]),
    policy=st.sampled_from(["grouped", "grouped", "fifo"]),
    max_skip_ms=st.sampled_from([0, 100, 1000]),
)
WEIGHTS = {None: (), "A": ("a",), "A twice": ("a",), "B": ("b",), "A and B": ("a", "b")}
"""What each identity needs loaded: scales tell identities apart, not weights."""

adapters = st.sampled_from(list(WEIGHTS))
slots = st.builds(
    WorkerSlot, st.just(""), adapters, st.frozensets(st.sampled_from(["a", "b"]), max_size=2)
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
    weights: tuple[str, ...] = ()
    aborted: bool = False


@dataclass
class Naive:
    """A batch is a list of items, a claimed slot has lost its active adapter or is left out."""

    config: SchedulerConfig
    waiting: list[Item] = field(default_factory=list)
    running: dict[str, Item] = field(default_factory=dict)
    passed_over: list[tuple] = field(default_factory=list)
    seen: float = float("-inf")

    def first_batch(self, items: list[Item]) -> tuple[list[Item], bool]:
        """The longest prefix that fits, and whether it is full."""
        max_rows = self.config.max_batch_rows or 10**9
        max_work = self.config.max_batch_work or 10**9
        max_mixed = self.config.max_mixed_adapters or 10**9
        for size in range(len(items), 0, -1):
            rows = sum(item.rows for item in items[:size])
            work = sum(item.work for item in items[:size])
            fits = size <= self.config.max_num_seqs and rows <= max_rows and work <= max_work
            if fits and len(needed(items[:size])) <= max_mixed:
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

        def size(batch, full):
            return self.config.max_num_seqs if full else len(batch)

        held = [slot.held_adapters for slot in unclaimed]
        warm = [one for one in ready if any(needed(one[0]) <= of_one for of_one in held)]
        would_go = min(ready, key=lambda one: (-size(*one), one[0][0].seq))[0]
        if not warm:
            return would_go
        if would_go not in [batch for batch, _ in warm]:
            self.passed_over.append(would_go[0].group)
        active = [slot.active_adapter for slot in unclaimed]
        return min(
            warm,
            key=lambda one: (
                -size(*one),
                self.mixed or one[0][0].group[1] not in active,
                one[0][0].seq,
            ),
        )[0]

    @property
    def mixed(self) -> bool:
        return self.config.max_mixed_adapters is not None

    def schedule(self, idle: list[WorkerSlot], now: float) -> list[list[Item]]:
        self.seen = now
        unclaimed, batches = list(idle), []
        while len(batches) < len(idle) and (batch := self.pick(unclaimed, now)):
            batches.append(batch)
            for item in batch:
                self.waiting.remove(item)
                self.running[item.request_id] = item
            self.passed_over = [one for one in self.passed_over if one != batch[0].group]
            self.claim(unclaimed, batch)
        return batches

    def claim(self, unclaimed: list[WorkerSlot], batch: list[Item]) -> None:
        adapter, weights = batch[0].group[1], needed(batch)
        if not weights:
            at = [n for n, slot in enumerate(unclaimed) if slot.active_adapter is None]
            for n in at[:1]:
                slot = unclaimed[n]
                unclaimed[n] = WorkerSlot(slot.worker_id, "claimed", slot.held_adapters)
            return
        suited = [slot for slot in unclaimed if adapter and slot.active_adapter == adapter]
        suited += [slot for slot in unclaimed if weights <= slot.held_adapters]
        if suited:
            unclaimed.remove(suited[0])

    def upcoming(self) -> set[tuple[str, ...]]:
        """What the next batches of all groups need."""
        groups = self.groups()
        next_items = [item for items in groups for item in self.first_batch(items)[0]]
        return {item.weights for item in next_items} - {()}

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


def needed(batch: list[Item]) -> frozenset[str]:
    return frozenset(digest for item in batch for digest in item.weights)


def check_placement(
    got: list[Assignment], needs: list[frozenset[str]], idle: list[WorkerSlot]
) -> None:
    """Workers are distinct; none serves a batch that could be served elsewhere as well."""
    by_id = {slot.worker_id: slot for slot in idle}
    used = [by_id[assignment.worker_id] for assignment in got]
    assert len({slot.worker_id for slot in used}) == len(used)
    batches = [(one.adapter, need, slot) for one, need, slot in zip(got, needs, used, strict=True)]
    adapted = [(adapter, slot) for adapter, _, slot in batches if adapter is not None]
    kept = sum(slot.active_adapter == adapter for adapter, slot in adapted)
    wanted = Counter(adapter for adapter, _ in adapted)
    assert kept == (wanted & Counter(slot.active_adapter for slot in idle)).total()
    for adapter, need, slot in batches:
        if not need or need <= slot.held_adapters or slot.active_adapter == adapter is not None:
            continue
        for holder in idle:
            if need <= holder.held_adapters:
                [(by, its)] = [(a, n) for a, n, user in batches if user is holder]
                assert its
                assert its <= holder.held_adapters or by == holder.active_adapter is not None


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
        self.check_upcoming()

    def check_upcoming(self) -> None:
        upcoming = self.scheduler.upcoming(100)
        assert len(set(upcoming)) == len(upcoming)
        if self.model.config.policy == "fifo":
            assert set(upcoming) <= self.model.upcoming()
            return
        assert set(upcoming) == self.model.upcoming()
        assert self.scheduler.upcoming(1) == upcoming[:1]
        waiting = {items[0].group: items for items in self.model.groups()}
        self.model.passed_over = [one for one in self.model.passed_over if one in waiting]
        if not self.model.mixed:
            passed = [waiting[group][0] for group in dict.fromkeys(self.model.passed_over)]
            passed.sort(key=lambda item: item.seq)
            first = list(dict.fromkeys(item.weights for item in passed))
            assert upcoming[: len(first)] == first

    def do_add(self, key, adapter, rows, work) -> None:
        name = f"r{self.count}"
        weights = WEIGHTS[adapter]
        if self.model.mixed:
            adapter = None
        self.scheduler.add(
            name, key=key, adapter=adapter, weights=weights, rows=rows, work=work, now=self.now
        )
        self.model.waiting.append(
            Item(name, (key, adapter), rows, work, self.now, self.count, weights)
        )
        self.count += 1

    def do_wait(self, seconds: float | None = None) -> None:
        if seconds is None:
            self.now = self.scheduler.next_deadline(self.now) or self.now
        else:
            self.now += seconds

    def do_schedule(self, idle) -> None:
        if self.model.mixed:
            idle = [WorkerSlot(slot.worker_id, None, slot.held_adapters) for slot in idle]
        got = self.scheduler.schedule(idle, self.now)
        want = self.model.schedule(idle, self.now)
        assert [list(assignment.request_ids) for assignment in got] == [
            [item.request_id for item in batch] for batch in want
        ]
        for assignment, batch in zip(got, want, strict=True):
            assert {(assignment.key, assignment.adapter)} == {item.group for item in batch}
            assert assignment.rows == sum(item.rows for item in batch)
        check_placement(got, [needed(batch) for batch in want], idle)

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
        return [
            Arrival(1.0 + time, *row[1:], weights=WEIGHTS[row[2]])
            for time, row in zip(times, rows, strict=True)
        ]

    return st.lists(one, min_size=10, max_size=60).map(build)


def unless_mixed(config: SchedulerConfig, arrivals: list[Arrival]) -> list[Arrival]:
    """Arrivals have no identity where adapters are mixed."""
    if config.max_mixed_adapters is None:
        return arrivals
    return [replace(arrival, adapter=None) for arrival in arrivals]


@settings(steady, max_examples=300)
@given(
    config=configs,
    arrivals=draw_arrivals(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 2.0])),
    workers=st.integers(1, 3),
    duration=st.sampled_from([0.05, 0.4, 1.0]),
    loss_at=st.none() | st.sampled_from([1.2, 2.0, 3.3]),
    load_s=st.sampled_from([0.0, 0.2]),
    prefetch=st.integers(0, 3),
)
def test_in_service_nothing_is_lost_nothing_runs_twice_and_nothing_is_kept(
    config, arrivals, workers, duration, loss_at, load_s, prefetch
):
    arrivals = unless_mixed(config, arrivals)
    service = Service(
        config, arrivals, workers, duration, loss_at, max_loras=3, load_s=load_s, prefetch=prefetch
    ).run()
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
    arrivals = unless_mixed(config, arrivals)
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
