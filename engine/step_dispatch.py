"""Step mode: workers keep groups of running requests and run them tick by tick, as planned here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from omni_engine.engine.dispatch import Floor
from omni_engine.engine.scheduler import SchedulerConfig, WorkerSlot
from omni_engine.engine.step_scheduler import StepAssignment, StepScheduler
from omni_engine.engine.worker_handle import WorkerHandle
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepPlan, StepReport


@dataclass(slots=True)
class _Steps:
    """A worker's plans and what its ticks came to.

    Attributes:
        groups: the group of each plan that still has ticks to run, by plan id.
        tick_ms: milliseconds that ticks took together.
        members: requests in them, summed over the ticks.
    """

    groups: dict[int, int] = dataclasses.field(default_factory=dict)
    tick_ms: float = 0.0
    members: int = 0


class StepDispatch:
    """Gives workers ticks of their resident groups, and newcomers to them.

    Args:
        floor: the stage's requests and workers.
        config: the limits of a group and the policy.
        step_quantum: ticks until another group has its turn.
        max_resident_groups: groups that take turns on a worker.
    """

    def __init__(
        self, floor: Floor, config: SchedulerConfig, step_quantum: int, max_resident_groups: int
    ) -> None:
        self.scheduler = StepScheduler(
            config, step_quantum=step_quantum, max_resident_groups=max_resident_groups
        )
        self._floor = floor
        self._steps: defaultdict[str, _Steps] = defaultdict(_Steps)

    def dispatch(self, now: float) -> None:
        """Give workers what the scheduler decides."""
        ready = self._ready()
        if not ready or not self.scheduler.num_waiting + self.scheduler.num_running:
            return
        awaited = any(worker.is_expected(now) for worker in self._floor.workers.values())
        for assignment in self.scheduler.schedule(ready, now, awaited=awaited):
            self._start(assignment, now)

    def next_deadline(self, now: float) -> float | None:
        """When ``dispatch`` may decide differently through time alone."""
        return self.scheduler.next_deadline(now) if self._ready() else None

    def worker_of(self, request_id: str) -> str:
        """Return the worker that runs a running request.

        Raises:
            KeyError: if the request does not run.
        """
        if (worker_id := self.scheduler.worker_of(request_id)) is None:
            raise KeyError(request_id)
        return worker_id

    def running_on(self, worker_id: str) -> Iterator[str]:
        """Return the requests that a worker runs."""
        return chain.from_iterable(self.scheduler.residents(worker_id).values())

    def on_outputs(self, worker: WorkerHandle, outputs: list[DiffusionOutput], now: float) -> None:
        """Refuse the end of a batch: no batch was sent.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"worker {worker.worker_id} ended a batch in step mode")

    def on_report(self, worker: WorkerHandle, report: StepReport, now: float) -> None:
        """Act on a tick: progress, the outputs of requests that ended, the plan's end.

        Raises:
            ValueError: if it tells of a plan or a request that the worker was not given; nothing
                has changed then.
        """
        steps, plan_id = self._steps[worker.worker_id], report.plan_id
        running = set(self.running_on(worker.worker_id))
        ended = [output.request_id for output in report.outputs]
        stray_plan = (report.ticks or report.plan_done) and plan_id not in steps.groups
        if stray_plan or len(running & set(ended)) != len(ended):
            raise ValueError(f"worker {worker.worker_id} reports what it was not given")
        if report.ticks:
            self._note_ticks(worker, report, now)
        self._floor.note_progress(report, now)
        self._floor.finish_all(report.outputs, now, stepped=True)
        if report.plan_done:
            del steps.groups[plan_id]
        if report.ticks or report.plan_done:
            self.scheduler.on_tick(
                worker.worker_id, plan_id, report.ticks, report.tick_ms, report.plan_done, now
            )
        residents = self.scheduler.residents(worker.worker_id).values()
        worker.set_busy(bool(steps.groups) or any(residents), now)

    def lose(self, worker: WorkerHandle, now: float) -> list[str]:
        """Forget a dead worker; return the requests it ran, the oldest first."""
        self._steps[worker.worker_id].groups.clear()
        return self.scheduler.forget_worker(worker.worker_id)

    def run_again(self, request_ids: list[str], now: float) -> None:
        """Let requests of a dead worker wait at their old places, to run alone."""
        self.scheduler.requeue(request_ids, now, alone=True)

    def describe_worker(self, worker: WorkerHandle) -> dict[str, Any]:
        """Return a worker's resident groups and what its ticks came to, for status."""
        steps, residents = self._steps[worker.worker_id], self.scheduler.residents(worker.worker_id)
        ticks = worker.figures.ticks
        return {
            "ticks": ticks,
            "mean_tick_ms": steps.tick_ms / ticks if ticks else None,
            "mean_requests_per_tick": steps.members / ticks if ticks else None,
            "groups": [self._describe_group(i, ids) for i, ids in residents.items() if ids],
        }

    def _ready(self) -> list[WorkerSlot]:
        """Return the workers that take plans."""
        return [worker.slot for worker in self._floor.workers.values() if worker.is_ready]

    def _note_ticks(self, worker: WorkerHandle, report: StepReport, now: float) -> None:
        steps, floor = self._steps[worker.worker_id], self._floor
        group_id = steps.groups[report.plan_id]
        members = self.scheduler.residents(worker.worker_id).get(group_id, ())
        worker.figures.ticks += report.ticks
        steps.tick_ms += report.tick_ms
        steps.members += report.ticks * len(members)
        floor.figures.batch_sizes[len(members)] += report.ticks
        floor.timeline.add_tick(
            worker.worker_id, members, lambda: floor.activations(members), report.tick_ms, now
        )

    def _describe_group(self, group_id: int, request_ids: tuple[str, ...]) -> dict[str, Any]:
        members = [self._floor.live[request_id] for request_id in request_ids]
        activations = [live.admitted.activation for live in members if live.admitted is not None]
        first = members[0].request if members[0].admitted is None else members[0].admitted.request
        return {
            "group_id": group_id,
            "height": first.sampling_params.height,
            "width": first.sampling_params.width,
            "num_frames": first.sampling_params.num_frames,
            "adapters": [
                {"name": adapter.name, "scale": scale}
                for activation in dict.fromkeys(activations)
                if activation is not None
                for adapter, scale in zip(activation.adapters, activation.scales, strict=True)
            ],
            "requests": [live.describe() for live in members],
        }

    def _start(self, assignment: StepAssignment, now: float) -> None:
        floor, worker = self._floor, self._floor.workers[assignment.worker_id]
        newcomers = [floor.live[request_id] for request_id in assignment.new_ids]
        admitted = [live.admitted for live in newcomers if live.admitted is not None]
        plan = StepPlan(
            plan_id=assignment.plan_id,
            group_id=assignment.group_id,
            requests=tuple([one.request for one in admitted]),
            activations=tuple([one.activation for one in admitted]),
            ticks=assignment.ticks,
        )
        if assignment.ticks:
            self._steps[worker.worker_id].groups[assignment.plan_id] = assignment.group_id
        worker.set_busy(True, now)
        worker.note_sent(assignment.adapter, plan.activations)
        floor.send(worker.worker_id, plan.to_wire())
        floor.note_running(newcomers, worker.worker_id, now)
