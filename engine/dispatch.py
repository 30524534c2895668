"""What a stage's two ways of running requests have in common: what they need, what they offer.

``BatchDispatch`` runs whole batches, ``StepDispatch`` single ticks of resident groups.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from omni_engine.engine.adapter_prefetch import WorkerLoad
from omni_engine.engine.figures import StageFigures
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.request_log import RequestLog
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.timeline import StageTimeline
from omni_engine.engine.worker_handle import WorkerHandle
from omni_engine.protocol.adapters import AdapterActivation
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepReport


@dataclass(frozen=True, slots=True)
class Floor:
    """What a dispatch works on; the stage's runtime owns it.

    Attributes:
        live: the stage's requests by id.
        workers: the stage's workers by id.
        send: sends a message to a worker by its id.
        finish: takes a request's output, with the time; the request is over then.
        log: told of requests that start.
        figures: told of requests that start, of their steps and of the sizes of batches and ticks.
        timeline: told of batches and ticks.
    """

    live: Mapping[str, LiveRequest]
    workers: Mapping[str, WorkerHandle]
    send: Callable[[str, dict[str, Any]], None]
    finish: Callable[[DiffusionOutput, float], None]
    log: RequestLog
    figures: StageFigures
    timeline: StageTimeline

    def loads(self, running_on: Callable[[str], Iterable[str]]) -> list[WorkerLoad]:
        """Return the workers that are ready, with what they run.

        Args:
            running_on: returns the requests that a worker runs.
        """
        loads = []
        for worker in self.workers.values():
            if worker.is_ready:
                members = [self.live[i] for i in running_on(worker.worker_id) if i in self.live]
                needed = {d for m in members if m.admitted for d in m.admitted.weights}
                loads.append(WorkerLoad(worker.worker_id, len(members), frozenset(needed)))
        return loads

    def activations(self, request_ids: Iterable[str]) -> list[AdapterActivation | None]:
        """Return what running requests run under."""
        admitted = (self.live[request_id].admitted for request_id in request_ids)
        return [one.activation for one in admitted if one is not None]

    def note_running(self, members: Iterable[LiveRequest], worker_id: str, now: float) -> None:
        """Tell requests that they were sent to a worker."""
        for live in members:
            live.started, live.worker_id = now, worker_id
            self.log.started(live, worker_id, now)
            self.figures.started(live)
            live.listener.on_status(live.request_id, RequestStatus.RUNNING)

    def note_progress(self, report: StepReport, now: float) -> None:
        """Tell requests how far they are."""
        for state in report.states:
            if (live := self.live.get(state.request_id)) is not None:
                self.figures.advance(live, state.step_index, state.num_steps)
                live.tell_progress(report.previews.pop(state.request_id, None), now)
        for request_id, preview in report.previews.items():
            if (live := self.live.get(request_id)) is not None:
                live.tell_progress(preview, now)

    def finish_all(
        self, outputs: Iterable[DiffusionOutput], now: float, *, stepped: bool = False
    ) -> None:
        """End requests; those that completed have done their last step.

        Args:
            outputs: of the requests.
            now: seconds, monotonic.
            stepped: whether an output's number of steps was counted step by step.
        """
        for output in outputs:
            live = self.live[output.request_id]
            steps = live.num_steps or (output.metrics.num_steps if stepped else 0)
            if output.error is None and steps:
                self.figures.advance(live, steps, steps)
                live.tell_progress(None, now)
            self.finish(output, now)


class SchedulerLife(Protocol):
    """The life of requests that both schedulers keep."""

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""

    @property
    def num_running(self) -> int:
        """How many requests run."""

    def held(self) -> dict[str, int]:
        """Return how much is kept of what requests bring with them; all 0 when none is live."""

    def add(
        self,
        request_id: str,
        *,
        key: Hashable,
        adapter: Hashable | None,
        weights: tuple[str, ...] = (),
        rows: int = 1,
        work: int = 1,
        now: float,
    ) -> None:
        """Queue a request."""

    def abort(self, request_id: str, now: float) -> RequestStatus | None:
        """End a waiting request at once; mark a running one."""

    def finish(self, request_id: str, status: RequestStatus, now: float) -> RequestStatus | None:
        """Take note that a running request ended."""

    def upcoming(self, count: int) -> list[tuple[str, ...]]:
        """The contents of adapters that so many of the next batches need."""

    def next_deadline(self, now: float) -> float | None:
        """When to schedule again if nothing else happens."""


class Dispatch(Protocol):
    """Gives workers what a scheduler decides and acts on what they answer."""

    @property
    def scheduler(self) -> SchedulerLife:
        """Keeps the waiting and the running requests."""

    def dispatch(self, now: float) -> None:
        """Give workers what the scheduler decides."""

    def next_deadline(self, now: float) -> float | None:
        """When ``dispatch`` may decide differently through time alone."""

    def worker_of(self, request_id: str) -> str:
        """Return the worker that runs a running request."""

    def running_on(self, worker_id: str) -> Iterable[str]:
        """Return the requests that a worker runs."""

    def on_outputs(self, worker: WorkerHandle, outputs: list[DiffusionOutput], now: float) -> None:
        """Act on the end of a batch."""

    def on_report(self, worker: WorkerHandle, report: StepReport, now: float) -> None:
        """Act on a tick, or on progress of a batch."""

    def lose(self, worker: WorkerHandle, now: float) -> list[str]:
        """Forget a dead worker; return the requests it ran, the oldest first."""

    def run_again(self, request_ids: list[str], now: float) -> None:
        """Let requests of a dead worker wait at their old places.

        Each may be what killed it: none of them shares a batch any more.
        """

    def describe_worker(self, worker: WorkerHandle) -> dict[str, Any]:
        """Return what status shows of a worker in this mode alone."""
