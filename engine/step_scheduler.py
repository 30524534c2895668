"""The step-mode scheduler: who joins which resident group, on which worker, and whose turn it is.

One scheduler serves one stage and all its workers; a tick is one denoiser forward. A worker keeps
several groups of running requests, each with a key and an adapter of its own, that take turns;
waiting requests join a group between its ticks. It is pure, as the request-mode scheduler is: no
I/O, no threads, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from omni_engine.engine.batching import QueuedRequest, SchedulerConfig, WorkerSlot
from omni_engine.engine.policies import Pick
from omni_engine.engine.request_group import RequestGroup
from omni_engine.engine.residency import Residency, ResidentWorker, StepAssignment
from omni_engine.engine.residency_table import ResidencyTable
from omni_engine.engine.scheduler_base import SchedulerBase, batch_weights
from omni_engine.engine.suspects import HeldSuspects
from omni_engine.engine.waiting_queue import GroupId

__all__ = ["StepAssignment", "StepScheduler"]


@dataclass(frozen=True, slots=True)
class _Drain:
    """A group that takes nobody in until an overdue group has found a place."""

    home: Residency
    overdue: GroupId


class StepScheduler(SchedulerBase):
    """Keeps a stage's waiting and running requests and finds the waiting ones a resident group.

    A request is WAITING until a plan takes it to its worker, even if it has a place in a group
    already that has to wait for its turn.

    Args:
        config: what one group may hold, and the policy; its admission wait has no effect.
        step_quantum: ticks a group runs before another resident group goes, at least 1.
        max_resident_groups: groups a worker keeps at most, at least 1.
    """

    def __init__(
        self, config: SchedulerConfig, *, step_quantum: int = 4, max_resident_groups: int = 4
    ) -> None:
        super().__init__(config, max_wait_ms=0.0)
        self._quantum = step_quantum
        self._table = ResidencyTable(config.limits, max_resident_groups)
        self._home_of: dict[str, Residency] = {}
        self._unsent: dict[str, QueuedRequest] = {}
        # Waiting groups that can't join: none of their kind is resident, or takes anybody in.
        self._homeless: set[GroupId] = set()
        self._drain: _Drain | None = None
        self._suspects = HeldSuspects(self._table, self._take_in, self._refile)
        self._plan_ids = count()

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue) + len(self._unsent) + len(self._suspects)

    def held(self) -> dict[str, int]:
        """Return how much is kept of what requests bring with them; all 0 when none is live."""
        workers = self._table.workers.values()
        return super().held() | {
            "placed": len(self._home_of),
            "unsent": len(self._unsent),
            "suspects": len(self._suspects),
            "homeless_groups": len(self._homeless),
            "resident_groups": sum(len(worker.groups) for worker in workers),
            "plans": sum(len(worker.outstanding) for worker in workers),
        }

    def waiting_ids(self) -> list[str]:
        """Return the waiting requests' ids in arrival order; costs a sort of all of them."""
        waiting = [*self._queue, *self._unsent.values(), *self._suspects]
        return [one.request_id for one in sorted(waiting, key=lambda request: request.seq)]

    def waiting_by_key(self) -> dict[GroupId, int]:
        """Return how many requests wait, per (key, adapter) that has any."""
        others = [*self._unsent.values(), *self._suspects]
        return dict(
            Counter(super().waiting_by_key()) + Counter((one.key, one.adapter) for one in others)
        )

    def upcoming(self, count: int) -> list[tuple[str, ...]]:
        """Return what to load: of requests that have a place, then of those that get one next."""
        placed = [*self._unsent.values(), *self._suspects]
        placed.sort(key=lambda request: request.seq)
        found = dict.fromkeys([one.weights for one in placed if one.weights])
        found |= dict.fromkeys(super().upcoming(count))
        for group_id in self._table.resident():
            if len(found) >= count:
                break
            if group := self._queue.group(group_id):
                found |= dict.fromkeys(batch_weights(group))
        return list(islice(found, count))

    def worker_of(self, request_id: str) -> str | None:
        """Return the worker that runs the request; None if it isn't running on any."""
        home = self._home_of.get(request_id)
        return None if home is None or request_id in home.unsent else home.worker.worker_id

    def residents(self, worker_id: str) -> dict[int, tuple[str, ...]]:
        """Return the ids of the running requests of each of a worker's groups, by group id."""
        worker = self._table.workers.get(worker_id)
        return {
            home.group_id: tuple(one for one in home.members if one not in home.unsent)
            for home in (worker.groups.values() if worker else ())
        }

    def schedule(
        self, slots: Sequence[WorkerSlot], now: float, *, awaited: bool = False
    ) -> list[StepAssignment]:
        """Find waiting requests their places and keep each worker in plans.

        Args:
            slots: all workers that are ready, each once.
            now: the time, in seconds.
            awaited: whether another worker will soon be ready, on which suspects can run.

        Returns:
            The plans to send, each worker's in order; their new requests are RUNNING from here on.
        """
        self._policy.advance(now)
        self._see_workers(slots)
        self._suspects.settle(awaited=awaited)
        self._settle_homeless()
        self._update_drain()
        if not self._policy.in_order:
            self._join()
        plans = [
            plan
            for worker in self._table.ready
            for plan in worker.next_plans(self._quantum, self._plan_ids)
        ]
        for plan in plans:
            for request_id in plan.new_ids:
                del self._unsent[request_id]
        return plans

    def on_tick(
        self,
        worker_id: str,
        plan_id: int,
        ticks: int,
        tick_ms: float,
        plan_done: bool,
        now: float,
    ) -> None:
        """Take note of a worker's report; one about a plan that no longer counts is passed over.

        Args:
            worker_id: the worker.
            plan_id: the plan that it runs.
            ticks: ticks run since its last report.
            tick_ms: milliseconds they took.
            plan_done: whether the plan's ticks are over.
            now: the time, in seconds.
        """
        worker = self._table.workers.get(worker_id)
        home = None if worker is None else worker.outstanding.get(plan_id)
        if worker is None or home is None:
            return
        home.note_ticks(ticks, tick_ms)
        if plan_done:
            worker.end_plan(plan_id)
            self._leave_if_over(home)

    def forget_worker(self, worker_id: str) -> list[str]:
        """Drop the residency of a worker that is lost; its requests without a run wait on.

        Returns:
            The ids of the requests it ran, in arrival order, for ``requeue`` or ``finish``.
        """
        worker = self._table.workers.get(worker_id)
        if worker is None:
            return []
        self._recall_unsent(worker)
        homes = list(worker.groups.values())
        self._table.remove_worker(worker)
        for home in homes:
            self._refile(home.key_and_adapter)
        running = [request for home in homes for request in home.members.values()]
        for request in running:
            del self._home_of[request.request_id]
        return [one.request_id for one in sorted(running, key=lambda request: request.seq)]

    def drain_waiting(self) -> list[str]:
        """Forget all waiting requests and return their ids in arrival order."""
        for worker in self._table.workers.values():
            self._recall_unsent(worker)
        self._queue.put_back(self._suspects.drain())
        return super().drain_waiting()

    def _put_back(self, requests: list[QueuedRequest]) -> None:
        self._suspects.hold([one for one in requests if one.is_suspect])
        self._queue.put_back([one for one in requests if not one.is_suspect])

    # Admission

    def _see_workers(self, slots: Sequence[WorkerSlot]) -> None:
        for worker in self._table.see(slots):
            if not worker.ready:
                self._recall_unsent(worker)
            for key_and_adapter in worker.groups:
                self._refile(key_and_adapter)

    def _settle_homeless(self) -> None:
        """Give free places to groups that have none; under ``fifo`` go on to joins, in order."""
        in_order = self._policy.in_order
        while in_order or self._table.free_places:
            pick = self._overdue_pick() or self._policy.pick(
                self._queue, self._table.slots_with_place()
            )
            if pick is None:
                return
            group, size, _ = pick
            # As many as find room: a group that got a place isn't picked again, it joins.
            if not self._enter(group, size if in_order else group.size):
                return

    def _overdue_pick(self) -> Pick | None:
        """Return the group for which another was drained."""
        if self._drain is None or self._drain.overdue not in self._homeless:
            return None
        group = self._queue.group(self._drain.overdue)
        return None if group is None else Pick(group, group.size, group.fill.weights)

    def _update_drain(self) -> None:
        """Drain the group that is resident longest while an overdue group finds no place."""
        drain = self._drain
        if drain is not None:
            if (
                drain.home.worker.ready
                and not drain.home.closed
                and drain.overdue in self._homeless
            ):
                return
            self._drain = None
            drain.home.draining = False
            self._refile(drain.home.key_and_adapter)
        if self._table.free_places:
            return
        overdue = self._policy.overdue(self._queue)
        home = None if overdue is None else self._table.longest_admitting()
        if overdue is not None and home is not None:
            home.draining = True
            self._drain = _Drain(home, (overdue.key, overdue.adapter))
            self._refile(home.key_and_adapter)

    def _join(self) -> None:
        """Let waiting requests of resident groups join them, or open another where it's spare."""
        joining = [
            group
            for key_and_adapter in self._table.resident()
            if key_and_adapter not in self._homeless
            and (group := self._queue.group(key_and_adapter))
        ]
        for group in sorted(joining, key=_head_seq):
            self._enter(group, group.size)

    def _enter(self, group: RequestGroup, most: int) -> int:
        """Give the oldest ``most`` of a group's requests places until one finds none."""
        key_and_adapter = (group.key, group.adapter)
        entered: list[tuple[QueuedRequest, Residency]] = []
        for request in islice(group, most):
            home = self._find_home(key_and_adapter, request)
            if home is None:
                break
            home.put(request)
            entered.append((request, home))
        if entered:
            self._queue.take(group, len(entered))
        for request, home in entered:
            self._home_of[request.request_id] = home
            self._unsent[request.request_id] = request
        return len(entered)

    def _take_in(self, suspect: QueuedRequest, home: Residency) -> None:
        home.put(suspect)
        self._home_of[suspect.request_id] = home
        self._unsent[suspect.request_id] = suspect

    def _find_home(self, key_and_adapter: GroupId, request: QueuedRequest) -> Residency | None:
        """Return where ``request`` fits on the least loaded worker, opening a group if need be."""
        may_open = self._policy.in_order or key_and_adapter in self._homeless
        # A group spreads over several workers on places that no group without one waits for.
        may_open = may_open or self._table.free_places > len(self._homeless)
        found = self._table.find(key_and_adapter, request, may_open)
        if found is None:
            return None
        worker, home = found
        if home is None:
            home = self._table.open(worker, request)
            self._refile(key_and_adapter)
        return home

    # Leaving

    def _on_change(self, group: RequestGroup) -> None:
        key_and_adapter = (group.key, group.adapter)
        if group.size and not self._table.admits(key_and_adapter):
            self._homeless.add(key_and_adapter)
            self._policy.on_change(group)
        else:
            self._homeless.discard(key_and_adapter)
            self._policy.set_aside(group)

    def _refile(self, key_and_adapter: GroupId) -> None:
        """Take note that a group may have gained or lost a residency that admits."""
        if group := self._queue.group(key_and_adapter):
            self._on_change(group)

    def _withdraw(self, request: QueuedRequest) -> None:
        if self._suspects.discard(request):
            return
        if self._unsent.pop(request.request_id, None) is None:
            super()._withdraw(request)
        else:
            self._release(request)

    def _release(self, request: QueuedRequest) -> None:
        home = self._home_of.pop(request.request_id, None)
        if home is not None:  # None if its worker is lost
            home.drop(request)
            self._leave_if_over(home)

    def _recall_unsent(self, worker: ResidentWorker) -> None:
        """Put a worker's unsent requests back to wait for any place."""
        unsent = [one for home in worker.groups.values() for one in home.unsent.values()]
        for request in unsent:
            del self._unsent[request.request_id]
            self._release(request)
        self._put_back(unsent)

    def _leave_if_over(self, home: Residency) -> None:
        if home.is_over:
            self._table.close(home)
            self._refile(home.key_and_adapter)


def _head_seq(group: RequestGroup) -> int:
    assert group.head is not None  # the queue keeps no empty group
    return group.head.seq
