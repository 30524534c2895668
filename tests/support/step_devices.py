"""Devices that run step plans as workers do, for the tests of the step scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler_service import assert_policy_keeps_nothing

from omni_engine.engine.batching import RequestStatus, SchedulerConfig, WorkerSlot
from omni_engine.engine.step_scheduler import StepAssignment, StepScheduler

DONE = RequestStatus.FINISHED_COMPLETED
ABORTED = RequestStatus.FINISHED_ABORTED


@dataclass(frozen=True)
class Report:
    """What one tick came to; ``advanced`` are the requests that it moved."""

    worker_id: str
    plan_id: int
    group_id: int
    ticks: int
    plan_done: bool
    ended: tuple[str, ...] = ()
    advanced: tuple[str, ...] = ()


@dataclass
class Device:
    """One worker: plans in order, newcomers of queued plans join while their group runs.

    Adapters of newcomers are there at once, and leave for others when no member needs them.
    """

    worker_id: str
    steps: dict[str, int]
    weights: dict[str, tuple[str, ...]]
    max_loras: int = 4
    held: dict[str, None] = field(default_factory=dict)
    plans: deque[StepAssignment] = field(default_factory=deque)
    groups: dict[int, dict[str, int]] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    active: object = None
    ticks_of_plan: int = 0
    joined: set[int] = field(default_factory=set)

    def send(self, plan: StepAssignment) -> None:
        self.plans.append(plan)
        assert sum(plan.ticks > 0 for plan in self.plans) <= 2
        assert plan.ticks or plan.new_ids

    def tick(self) -> Report | None:
        """Run one tick; None if no ticks are planned."""
        while self.plans and not self.plans[0].ticks:
            self._join(self.plans.popleft())
        if not self.plans:
            return None
        plan = self.plans[0]
        for other in self.plans:
            if other.group_id == plan.group_id:
                self._join(other)
        members = self.groups.get(plan.group_id, {})
        self.active = plan.adapter
        for request_id in members:
            members[request_id] -= 1
        advanced = tuple(members)
        ended = tuple(one for one, left in members.items() if left <= 0 or one in self.aborted)
        for request_id in ended:
            del members[request_id]
        self.ticks_of_plan += bool(advanced)
        done = not members or self.ticks_of_plan == plan.ticks
        if done:
            self.plans.popleft()
            self.ticks_of_plan = 0
        if not members:
            self.groups.pop(plan.group_id, None)
        return Report(
            self.worker_id,
            plan.plan_id,
            plan.group_id,
            int(bool(advanced)),
            done,
            ended,
            advanced,
        )

    def _join(self, plan: StepAssignment) -> None:
        if plan.plan_id not in self.joined:
            self.joined.add(plan.plan_id)
            for request_id in plan.new_ids:
                self.groups.setdefault(plan.group_id, {})[request_id] = self.steps[request_id]
                for digest in self.weights[request_id]:
                    self.load(digest)

    def load(self, digest: str) -> None:
        self.held.pop(digest, None)
        self.held[digest] = None
        members = [one for group in self.groups.values() for one in group]
        needed = {one for member in members for one in self.weights[member]}
        spare = [one for one in self.held if one not in needed]
        for one in spare[: max(0, len(self.held) - self.max_loras)]:
            del self.held[one]


class Stage:
    """A step scheduler with its devices; ``log`` has every plan, ``reports`` every tick.

    Requests that a device was sent are checked against the limits of a group at each send.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        tick_ms: float = 20.0,
        quantum: int = 4,
        groups: int = 4,
        max_loras: int = 4,
        **config,
    ) -> None:
        self.config = SchedulerConfig(**config)
        self.max_groups = groups
        self.scheduler = StepScheduler(
            self.config, step_quantum=quantum, max_resident_groups=groups
        )
        self.steps: dict[str, int] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.groups_of: dict[str, tuple] = {}
        self.weights: dict[str, tuple[str, ...]] = {}
        self.max_loras = max_loras
        self.devices = {f"w{n}": self.new_device(f"w{n}") for n in range(workers)}
        self.tick_ms = tick_ms
        self.now = 0.0
        self.log: list[StepAssignment] = []
        self.reports: list[Report] = []
        self.started_at: dict[str, list[float]] = {}
        self.arrived_at: dict[str, float] = {}
        self.ended: dict[str, RequestStatus | None] = {}
        self.held: dict[tuple[str, int], set[str]] = {}
        self.most_mixed = 0

    def new_device(self, worker_id: str) -> Device:
        return Device(worker_id, self.steps, self.weights, self.max_loras)

    def add(self, ids: str, *, steps=3, key="k", adapter=None, weights=(), rows=1, work=1) -> None:
        for request_id in ids.split():
            self.steps[request_id] = steps
            self.sizes[request_id] = (rows, work)
            self.weights[request_id] = weights
            self.groups_of[request_id] = (key, adapter)
            self.arrived_at[request_id] = self.now
            self.scheduler.add(
                request_id,
                key=key,
                adapter=adapter,
                weights=weights,
                rows=rows,
                work=work,
                now=self.now,
            )

    def slots(self) -> list[WorkerSlot]:
        return [
            WorkerSlot(one.worker_id, one.active, frozenset(one.held))
            for one in self.devices.values()
        ]

    def schedule(self, slots: list[WorkerSlot] | None = None) -> list[StepAssignment]:
        plans = self.scheduler.schedule(self.slots() if slots is None else slots, self.now)
        for plan in plans:
            assert plan.plan_id == len(self.log)
            self.log.append(plan)
            self._check(plan)
            self.devices[plan.worker_id].send(plan)
        return plans

    def _check(self, plan: StepAssignment) -> None:
        held = self.held.get((plan.worker_id, plan.group_id), set())
        if plan.new_ids:
            self.held[plan.worker_id, plan.group_id] = held
        for request_id in plan.new_ids:
            assert self.groups_of[request_id] == (plan.key, plan.adapter)
            assert self.scheduler.status_of(request_id) is RequestStatus.RUNNING
            assert self.scheduler.worker_of(request_id) == plan.worker_id
            assert request_id not in self.ended
            assert not any(request_id in others for others in self.held.values())
            self.started_at.setdefault(request_id, []).append(self.now)
            held.add(request_id)
        assert len(held) <= self.config.max_num_seqs
        assert sum(self.sizes[one][0] for one in held) <= (self.config.max_batch_rows or 10**9)
        assert sum(self.sizes[one][1] for one in held) <= (self.config.max_batch_work or 10**9)
        assert len(self.needed(held)) <= (self.config.max_mixed_adapters or 10**9)
        self.most_mixed = max(self.most_mixed, len(self.needed(held)))
        resident = [group for _, group in self.held]
        assert len(set(resident)) == len(resident)
        assert sum(worker == plan.worker_id for worker, _ in self.held) <= self.max_groups

    def needed(self, ids) -> set[str]:
        return {digest for one in ids for digest in self.weights[one]}

    def deliver(self, report: Report, *, finish_first: bool = True) -> None:
        """Tell the scheduler of a report, its outputs before or after its ticks."""
        self.reports.append(report)
        if finish_first:
            self._finish(report)
        self.scheduler.on_tick(
            report.worker_id,
            report.plan_id,
            report.ticks,
            self.tick_ms * report.ticks,
            report.plan_done,
            self.now,
        )
        if not finish_first:
            self._finish(report)

    def _finish(self, report: Report) -> None:
        for request_id in report.ended:
            self.end(request_id, self.scheduler.finish(request_id, DONE, self.now))
            held = self.held[report.worker_id, report.group_id]
            held.remove(request_id)
            if not held:
                del self.held[report.worker_id, report.group_id]

    def end(self, request_id: str, status: RequestStatus | None) -> None:
        assert status is not None
        assert request_id not in self.ended
        self.ended[request_id] = status

    def round(self) -> list[Report]:
        """Schedule, then run one tick on every device."""
        self.schedule()
        self.now += self.tick_ms / 1000
        reports = [report for one in self.devices.values() if (report := one.tick())]
        for report in reports:
            self.deliver(report)
        return reports

    def run(self, rounds: int = 10_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(rounds):
            if not self.round():
                return
        raise AssertionError(f"work is left after {rounds} rounds")

    def abort(self, request_id: str) -> RequestStatus | None:
        status = self.scheduler.abort(request_id, self.now)
        if status is RequestStatus.RUNNING:
            for device in self.devices.values():
                device.aborted.add(request_id)
        elif status is not None:
            self.end(request_id, status)
        return status

    def lose(self, worker_id: str) -> list[str]:
        """A worker dies with its plans; what it ran waits again; another takes its name."""
        running = self.scheduler.forget_worker(worker_id)
        held = [one for (worker, _), ids in self.held.items() if worker == worker_id for one in ids]
        assert sorted(running) == sorted(held)
        self.held = {at: ids for at, ids in self.held.items() if at[0] != worker_id}
        for request_id in self.scheduler.requeue(running, self.now):
            self.end(request_id, ABORTED)
        self.devices[worker_id] = self.new_device(worker_id)
        return running


def assert_nothing_kept(scheduler: StepScheduler) -> None:
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.waiting_ids() == []
    assert scheduler.waiting_by_key() == {}
    assert scheduler.next_deadline(1e9) is None
    assert scheduler.upcoming(10) == []
    assert not scheduler._live
    assert not scheduler._home_of
    assert not scheduler._unsent
    assert not scheduler._homeless
    assert not scheduler._table._homes
    for worker in scheduler._table.workers.values():
        assert not worker.groups
        assert not worker.outstanding
        assert (worker.rows, worker.work) == (0, 0)
        assert worker._turn is None
    assert not scheduler._queue._groups
    assert len(scheduler._queue._heads) == 0
    assert scheduler._queue.num_with_weights == 0
    assert_policy_keeps_nothing(scheduler)
