"""Simulated workers that serve arrivals, for the tests of the request scheduler."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from omni_engine.engine.scheduler import (
    Assignment,
    RequestScheduler,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)

DONE = RequestStatus.FINISHED_COMPLETED
ABORTED = RequestStatus.FINISHED_ABORTED


@dataclass(frozen=True)
class Arrival:
    time: float
    key: int
    adapter: str | None
    rows: int = 1
    abort_after: float | None = None
    weights: tuple[str, ...] = ()


class Device:
    """A worker's adapters, the least recently used first; those of its batch are never dropped."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.held: dict[str, None] = {}
        self.needed: frozenset[str] = frozenset()
        self.loads = 0

    def use(self, weights: frozenset[str]) -> int:
        """Hold what a batch needs; return how many had to be loaded."""
        self.needed = weights
        before = self.loads
        for digest in sorted(weights):
            self.load(digest)
        return self.loads - before

    def load(self, digest: str) -> None:
        self.loads += digest not in self.held
        self.held.pop(digest, None)
        spare = [one for one in self.held if one not in self.needed]
        for _ in range(len(self.held) + 1 - self.max_loras):
            if spare:
                del self.held[spare.pop(0)]
        if len(self.held) < self.max_loras:
            self.held[digest] = None


@dataclass
class Service:
    """Events in time order; the scheduler is woken by them and by its own deadlines.

    Args:
        duration: seconds that a batch takes.
        loss_at: when a worker dies.
        max_loras: adapters that a worker's device keeps.
        load_s: seconds to load one, before a batch starts or meanwhile.
        prefetch: how many of the upcoming are fetched while batches run.
    """

    config: SchedulerConfig
    arrivals: list[Arrival]
    workers: int
    duration: float
    loss_at: float | None = None
    max_loras: int = 8
    load_s: float = 0.0
    prefetch: int = 0
    arrived: dict[str, Arrival] = field(default_factory=dict)
    started: dict[str, list[float]] = field(default_factory=dict)
    ended: dict[str, RequestStatus] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    batches: list[tuple[float, Assignment]] = field(default_factory=list)
    cold: list[bool] = field(default_factory=list)
    on_end: Callable[[Service, float, str], None] | None = None

    def __post_init__(self) -> None:
        self.scheduler = RequestScheduler(self.config)
        self.active: dict[str, str | None] = {f"w{n}": None for n in range(self.workers)}
        self.devices = {one: Device(self.max_loras) for one in self.active}
        self.busy: dict[str, Assignment] = {}
        self.fetching: set[str] = set()
        self.waiting: dict[str, Arrival] = {}
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
        self.arrived[name] = self.waiting[name] = arrival
        self.scheduler.add(
            name,
            key=arrival.key,
            adapter=arrival.adapter,
            weights=arrival.weights,
            rows=arrival.rows,
            now=now,
        )
        if arrival.abort_after is not None:
            self.at(now + arrival.abort_after, self.abort, name)

    def abort(self, now: float, name: str) -> None:
        if self.scheduler.abort(name, now) is ABORTED:
            del self.waiting[name]
            self.end(now, name, ABORTED)

    def slots(self) -> list[WorkerSlot]:
        return [
            WorkerSlot(one, active, frozenset(self.devices[one].held))
            for one, active in self.active.items()
            if one not in self.busy
        ]

    def dispatch(self, now: float) -> None:
        slots = self.slots()
        for batch in self.scheduler.schedule(slots, now):
            self.check(now, batch, slots)
            self.start(now, batch)
        assert self.scheduler.num_running == sum(len(b.request_ids) for b in self.busy.values())
        assert self.scheduler.num_waiting == len(self.waiting)
        if not self.config.request_batch_max_wait_ms:
            assert not (self.waiting and len(self.busy) < self.workers)
        for weights in self.scheduler.upcoming(self.prefetch) if self.prefetch else ():
            for digest in weights:
                self.fetch(now, digest)

    def start(self, now: float, batch: Assignment) -> None:
        for name in batch.request_ids:
            del self.waiting[name]
            self.started.setdefault(name, []).append(now)
        self.busy[batch.worker_id] = batch
        self.batches.append((now, batch))
        loads = self.devices[batch.worker_id].use(self.needed(batch.request_ids))
        self.cold.append(loads > 0)
        self.at(now + self.duration + loads * self.load_s, self.complete, batch)

    def needed(self, names) -> frozenset[str]:
        return frozenset(digest for name in names for digest in self.arrived[name].weights)

    def fetch(self, now: float, digest: str) -> None:
        held = any(digest in device.held for device in self.devices.values())
        if not held and digest not in self.fetching:
            self.fetching.add(digest)
            device = min(self.devices.values(), key=lambda one: len(one.needed))
            self.at(now + self.load_s, self.fetched, device, digest)

    def fetched(self, now: float, device: Device, digest: str) -> None:
        self.fetching.discard(digest)
        device.load(digest)

    def check(self, now: float, batch: Assignment, slots: list[WorkerSlot]) -> None:
        """What holds for every batch; ``waiting`` is what waited just before it was picked."""
        members = [self.arrived[name] for name in batch.request_ids]
        assert {(one.key, one.adapter) for one in members} == {(batch.key, batch.adapter)}
        assert 1 <= len(members) <= self.config.max_num_seqs
        assert sum(one.rows for one in members) <= (self.config.max_batch_rows or 10**9)
        needed = self.needed(batch.request_ids)
        assert len(needed) <= (self.config.max_mixed_adapters or 10**9)
        waiting = list(self.waiting)
        if self.lost:  # they are back at their old places
            waiting.sort(key=lambda name: int(name[1:]))
        first = batch.request_ids[0]
        same = [
            name
            for name in waiting
            if (self.waiting[name].key, self.waiting[name].adapter) == (batch.key, batch.adapter)
        ]
        assert list(batch.request_ids) == same[: len(members)]
        if self.config.policy == "fifo":
            assert list(batch.request_ids) == waiting[: len(members)]
            return
        max_skip = self.config.max_skip_ms / 1000
        passed_over = waiting[: waiting.index(first)]
        assert not [i for i in passed_over if self.arrived[i].time + max_skip <= now]
        if len(slots) == 1 and not self.config.request_batch_max_wait_ms:
            overdue = self.arrived[waiting[0]].time + max_skip <= now
            if not overdue and not needed <= slots[0].held_adapters:
                self.check_nothing_is_warm(waiting, slots[0])

    def check_nothing_is_warm(self, waiting: list[str], slot: WorkerSlot) -> None:
        """A single request is the least that a group's next batch needs."""
        heads: dict[tuple, frozenset[str]] = {}
        for name in waiting:
            one = self.waiting[name]
            heads.setdefault((one.key, one.adapter), frozenset(one.weights))
        if self.config.max_mixed_adapters is None:
            assert not [need for need in heads.values() if need <= slot.held_adapters]

    def complete(self, now: float, batch: Assignment) -> None:
        if self.busy.get(batch.worker_id) is not batch:
            return
        self.free(batch)
        for name in batch.request_ids:
            self.end(now, name, self.scheduler.finish(name, DONE, now))

    def lose(self, now: float) -> None:
        """The first busy worker dies and comes back at once, with nothing loaded."""
        for batch in list(self.busy.values())[:1]:
            self.free(batch)
            self.active[batch.worker_id] = None
            self.devices[batch.worker_id] = Device(self.max_loras)
            aborted = self.scheduler.requeue(batch.request_ids, now)
            self.lost.update(batch.request_ids)
            for name in batch.request_ids:
                if name not in aborted:
                    self.waiting[name] = self.arrived[name]
            for name in aborted:
                self.end(now, name, ABORTED)

    def free(self, batch: Assignment) -> None:
        del self.busy[batch.worker_id]
        self.active[batch.worker_id] = batch.adapter
        self.devices[batch.worker_id].needed = frozenset()

    def end(self, now: float, name: str, status: RequestStatus | None) -> None:
        assert status is not None
        assert name not in self.ended
        self.ended[name] = status
        if self.on_end is not None:
            self.on_end(self, now, name)

    def waits(self) -> Iterator[tuple[str, float]]:
        for name, times in self.started.items():
            yield name, times[0] - self.arrived[name].time


def assert_nothing_kept(scheduler: RequestScheduler) -> None:
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.waiting_ids() == []
    assert scheduler.waiting_by_key() == {}
    assert scheduler.next_deadline(1e9) is None
    assert scheduler.upcoming(10) == []
    assert not scheduler._live
    assert not scheduler._queue._groups
    assert len(scheduler._queue._heads) == 0
    assert scheduler._queue.num_with_weights == 0
    assert_policy_keeps_nothing(scheduler)


def assert_policy_keeps_nothing(scheduler) -> None:
    """Of either scheduler."""
    if index := getattr(scheduler._policy, "_index", None):
        assert not index._places
        assert not index._levels
        assert not index._by_adapter
        assert not index._by_weights
        assert not scheduler._policy._passed_over
        assert not index._warmth._users
        assert not index._warmth._needing
        for device in index._warmth._devices.values():
            assert not device.warm
