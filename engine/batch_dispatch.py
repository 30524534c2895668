"""Request mode: a worker runs one batch at a time, from its start to its end."""

from __future__ import annotations

from typing import Any

from omni_engine.engine.dispatch import Floor
from omni_engine.engine.scheduler import Assignment, RequestScheduler, SchedulerConfig
from omni_engine.engine.worker_handle import WorkerHandle, WorkerState
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import BatchPlan, StepReport


class BatchDispatch:
    """Gives idle workers batches.

    Args:
        floor: the stage's requests and workers.
        config: the limits of a batch and the policy.
    """

    def __init__(self, floor: Floor, config: SchedulerConfig) -> None:
        self.scheduler = RequestScheduler(config)
        self._floor = floor
        self._running: dict[str, Assignment] = {}

    def dispatch(self, now: float) -> None:
        """Give idle workers what the scheduler decides."""
        idle = self._idle()
        if not idle or not self.scheduler.num_waiting:
            return
        idle.sort(key=lambda worker: worker.busy_s(now))
        for assignment in self.scheduler.schedule([worker.slot for worker in idle], now):
            self._start(assignment, now)

    def next_deadline(self, now: float) -> float | None:
        """When ``dispatch`` may decide differently through time alone."""
        return self.scheduler.next_deadline(now) if self._idle() else None

    def worker_of(self, request_id: str) -> str:
        """Return the worker that runs a running request."""
        return next(w for w, batch in self._running.items() if request_id in batch.request_ids)

    def running_on(self, worker_id: str) -> tuple[str, ...]:
        """Return the requests that a worker runs."""
        batch = self._running.get(worker_id)
        return () if batch is None else batch.request_ids

    def on_outputs(self, worker: WorkerHandle, outputs: list[DiffusionOutput], now: float) -> None:
        """Act on the end of a batch.

        Raises:
            ValueError: if the outputs aren't those of the batch; nothing has changed then.
        """
        ids = tuple([output.request_id for output in outputs])
        if ids != self.running_on(worker.worker_id):
            raise ValueError(f"worker {worker.worker_id} ended another batch than it was given")
        del self._running[worker.worker_id]
        worker.set_busy(False, now)
        self._floor.timeline.end_batch(worker.worker_id, now)
        self._floor.finish_all(outputs, now)

    def on_report(self, worker: WorkerHandle, report: StepReport, now: float) -> None:
        """Act on progress of a batch."""
        self._floor.note_progress(report, now)

    def lose(self, worker: WorkerHandle, now: float) -> list[str]:
        """Forget a dead worker; return the requests it ran, the oldest first."""
        batch = self._running.pop(worker.worker_id, None)
        self._floor.timeline.end_batch(worker.worker_id, now)
        return [] if batch is None else list(batch.request_ids)

    def run_again(self, request_ids: list[str], now: float) -> None:
        """Let requests of a dead worker wait at their old places, to run alone."""
        self.scheduler.requeue(request_ids, now, alone=True)

    def describe_worker(self, worker: WorkerHandle) -> dict[str, Any]:
        """Return what status shows of a worker in this mode alone: nothing."""
        return {}

    def _idle(self) -> list[WorkerHandle]:
        """Return the workers that take a batch."""
        workers = self._floor.workers.values()
        return [w for w in workers if w.is_ready and w.state is WorkerState.IDLE]

    def _start(self, assignment: Assignment, now: float) -> None:
        floor, worker = self._floor, self._floor.workers[assignment.worker_id]
        members = [floor.live[request_id] for request_id in assignment.request_ids]
        admitted = [live.admitted for live in members if live.admitted is not None]
        plan = BatchPlan(
            plan_id=assignment.batch_id,
            requests=tuple([one.request for one in admitted]),
            activations=tuple([one.activation for one in admitted]),
        )
        self._running[worker.worker_id] = assignment
        worker.set_busy(True, now)
        worker.note_sent(admitted[0].key.adapter, plan.activations)
        worker.batches += 1
        floor.figures.batch_sizes[len(members)] += 1
        floor.timeline.begin_batch(worker.worker_id, assignment.request_ids, plan.activations, now)
        floor.send(worker.worker_id, plan.to_wire())
        floor.note_running(members, worker.worker_id, now)
