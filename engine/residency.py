"""Who is resident where in step mode: a worker's groups of requests, their turns, their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from omni_engine.engine.batching import BatchLimits, QueuedRequest, RequestStatus, WorkerSlot
from omni_engine.engine.waiting_queue import GroupId

_MAX_OUTSTANDING = 2  # plans with ticks that a worker has at most: one runs, one is queued
_PLAN_MS = 20.0
_NEW_TICK_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class StepAssignment:
    """Requests that join a resident group of a worker, and ticks for the group to run.

    Args:
        plan_id: counts a scheduler's plans, from 0.
        worker_id: the worker it is for.
        group_id: the group; one that comes back after its last request ended has a new id.
        key: the key all its requests share.
        adapter: the identity all its requests share, None for the base model and for mixed ones.
        new_ids: the requests that join, oldest first.
        ticks: ticks to run; 0 if the requests only join, as ticks are planned already.
    """

    plan_id: int
    worker_id: str
    group_id: int
    key: Hashable
    adapter: Hashable | None
    new_ids: tuple[str, ...]
    ticks: int


class Residency:
    """A group's requests on one worker, those that the worker was not yet sent included.

    Args:
        group_id: its number; a group that comes back after it left has a new one.
        worker: the worker it is resident on.
        key: the key its requests share.
        adapter: the identity its requests share, None for the base model and for mixed ones.
        limits: what it may hold.

    Attributes:
        members: its requests by id, running or unsent.
        unsent: those that wait to go with its next plan.
        outstanding: how many of its plans with ticks are not done.
        last_plan: its last plan with ticks, before the first the last of its worker as it opened:
            newcomers get in line, or a stream of short-lived ones would shut out the others.
        draining: whether it takes nobody in, so that its place becomes free.
        closed: whether it has ended.
    """

    __slots__ = (
        "_limits",
        "_rows",
        "_tick_ms",
        "_weights",
        "_work",
        "adapter",
        "closed",
        "draining",
        "group_id",
        "key",
        "last_plan",
        "members",
        "outstanding",
        "unsent",
        "worker",
    )

    def __init__(
        self,
        group_id: int,
        worker: ResidentWorker,
        key: Hashable,
        adapter: Hashable | None,
        limits: BatchLimits,
    ) -> None:
        self.group_id = group_id
        self.worker = worker
        self.key = key
        self.adapter = adapter
        self._limits = limits
        self.members: dict[str, QueuedRequest] = {}
        self.unsent: dict[str, QueuedRequest] = {}
        self.outstanding = 0
        self.last_plan = worker.last_plan
        self.draining = False
        self.closed = False
        self._rows = 0
        self._work = 0
        self._weights: Counter[str] = Counter()  # how many members need each
        self._tick_ms: float | None = None

    @property
    def key_and_adapter(self) -> GroupId:
        """What its requests share, as the waiting queue names it."""
        return (self.key, self.adapter)

    @property
    def admits(self) -> bool:
        """Whether requests may join when there is room."""
        return self.worker.ready and not self.worker.reserved and not self.draining

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left: neither a request nor a plan."""
        return not self.members and not self.outstanding

    def has_room(self, request: QueuedRequest) -> bool:
        """Whether ``request`` fits beside the others."""
        limits = self._limits
        new_weights = sum([digest not in self._weights for digest in request.weights])
        return (
            len(self.members) < limits.max_num_seqs
            and self._rows + request.rows <= limits.max_rows
            and self._work + request.work <= limits.max_work
            and len(self._weights) + new_weights <= limits.max_adapters
        )

    def put(self, request: QueuedRequest) -> None:
        """Keep a place for ``request``, to be sent with the next plan."""
        self.members[request.request_id] = self.unsent[request.request_id] = request
        self._count(request, 1)

    def drop(self, request: QueuedRequest) -> None:
        """Free the place of ``request``."""
        del self.members[request.request_id]
        self.unsent.pop(request.request_id, None)
        self._count(request, -1)

    def plan(self, plan_id: int, ticks: int) -> StepAssignment:
        """Plan ``ticks`` ticks, 0 for none; the unsent requests join and are running."""
        for request in self.unsent.values():
            request.status, request.worker_id = RequestStatus.RUNNING, self.worker.worker_id
        new_ids = tuple(self.unsent)
        self.unsent.clear()
        return StepAssignment(
            plan_id, self.worker.worker_id, self.group_id, self.key, self.adapter, new_ids, ticks
        )

    def note_ticks(self, ticks: int, tick_ms: float) -> None:
        """Learn from a report that ``ticks`` ticks took ``tick_ms`` milliseconds together."""
        if ticks > 0:
            one, mean = tick_ms / ticks, self._tick_ms
            self._tick_ms = one if mean is None else mean + _NEW_TICK_WEIGHT * (one - mean)

    def ticks_per_plan(self, most: int) -> int:
        """Return how many ticks, 1 to ``most``, make a plan of about 20 ms; 1 while unknown."""
        if self._tick_ms is None:
            return 1
        if self._tick_ms * most <= _PLAN_MS:
            return most
        return max(1, int(_PLAN_MS / self._tick_ms))

    def _count(self, request: QueuedRequest, sign: int) -> None:
        self._rows += sign * request.rows
        self._work += sign * request.work
        self.worker.rows += sign * request.rows
        self.worker.work += sign * request.work
        for digest in request.weights:
            self._weights[digest] += sign
            if not self._weights[digest]:
                del self._weights[digest]


class ResidentWorker:
    """A worker's resident groups, which take turns, and its plans that are not done.

    Attributes:
        slot: the worker as its pool saw it last.
        ready: whether it was among the ready workers last time.
        reserved: whether it takes nobody in but one suspect, once it has nobody else.
        groups: its resident groups.
        outstanding: the groups of its plans with ticks that are not done, by plan id.
        last_plan: its last plan with ticks, -1 before the first.
        rows: rows of all its requests together.
        work: work units of all its requests together.
    """

    __slots__ = (
        "_turn",
        "_turn_ticks",
        "groups",
        "last_plan",
        "outstanding",
        "ready",
        "reserved",
        "rows",
        "slot",
        "work",
        "worker_id",
    )

    def __init__(self, slot: WorkerSlot) -> None:
        self.worker_id = slot.worker_id
        self.slot = slot
        self.ready = self.reserved = False
        self.groups: dict[GroupId, Residency] = {}
        self.outstanding: dict[int, Residency] = {}
        self.last_plan = -1
        self.rows = 0
        self.work = 0
        self._turn: Residency | None = None
        self._turn_ticks = 0

    def next_plans(self, quantum: int, plan_ids: Iterator[int]) -> Iterator[StepAssignment]:
        """Plan as many ticks as may be planned now, and joins of groups that have some planned.

        Args:
            quantum: ticks a group runs before another goes.
            plan_ids: where the plans' ids come from.
        """
        while len(self.outstanding) < _MAX_OUTSTANDING and (turn := self._take_turn(quantum)):
            home, ticks = turn
            plan = home.plan(next(plan_ids), ticks)
            self.outstanding[plan.plan_id] = home
            home.outstanding += 1
            home.last_plan = self.last_plan = plan.plan_id
            yield plan
        for home in self.groups.values():
            if home.unsent and home.outstanding:
                yield home.plan(next(plan_ids), 0)

    def end_plan(self, plan_id: int) -> None:
        """Take note that a plan with ticks is done."""
        self.outstanding.pop(plan_id).outstanding -= 1

    def remove(self, home: Residency) -> None:
        """Let a group leave."""
        home.closed = True
        del self.groups[home.key_and_adapter]
        if self._turn is home:
            self._turn = None

    def _take_turn(self, quantum: int) -> tuple[Residency, int] | None:
        """Choose whose turn it is.

        A group that shares the worker goes on for ``quantum`` ticks, then the one that was served
        least recently goes. What a group ran alone counts, so that it makes way for a newcomer.

        Returns:
            The group and how many ticks to plan; None if no group has a request.
        """
        candidates = [home for home in self.groups.values() if home.members]
        if not candidates:
            return None
        alone = len(candidates) == 1
        turn = self._turn
        if turn is None or not turn.members or (not alone and self._turn_ticks >= quantum):
            others = (home for home in candidates if home is not turn)
            turn = self._turn = min(others, key=lambda home: (home.last_plan, home.group_id))
            self._turn_ticks = 0
        ticks = turn.ticks_per_plan(quantum if alone else quantum - self._turn_ticks)
        self._turn_ticks += ticks
        return turn, ticks
