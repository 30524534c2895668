"""One stage at work: its workers, its scheduler, its live requests.

No sockets here: messages to workers and answers to clients leave through callbacks, and the time is
passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission, AdmittedRequest
from omni_engine.engine.deadlines import Deadlines
from omni_engine.engine.dispatch import Floor
from omni_engine.engine.figures import StageFigures
from omni_engine.engine.live_request import Listener, LiveRequest
from omni_engine.engine.modes import effective_max_num_seqs, make_dispatch, warn_of_capacity
from omni_engine.engine.reception import Reception
from omni_engine.engine.request_log import RequestLog
from omni_engine.engine.restarts import Death
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.stage_adapters import StageAdapters
from omni_engine.engine.timeline import BoxRing, StageTimeline
from omni_engine.engine.worker_handle import WorkerHandle, WorkerState
from omni_engine.protocol import adapters, plans
from omni_engine.protocol.errors import (
    OmniError,
    RequestAbortedError,
    RequestTimeoutError,
    StageUnavailableError,
    WorkerDiedRepeatedlyError,
    error_from_wire,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import Heartbeat, PipelineCapabilities, StepReport
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.config import Limits, StageConfig

logger = logging.getLogger(__name__)


class StageRuntime:
    """Serves one model with its workers.

    Args:
        stage: the stage's configuration.
        limits: the engine's limits.
        send: sends a message to a worker by its id.
        boxes: takes the batches and ticks that have ended; the stage's own if None.

    Raises:
        ConfigError: if an adapter's file is missing.
    """

    def __init__(
        self,
        stage: StageConfig,
        limits: Limits,
        send: Callable[[str, dict[str, Any]], None],
        boxes: BoxRing | None = None,
    ) -> None:
        self.stage = stage
        self.name = stage.display_name
        self._limits = limits
        self._send = send
        self._last_added = 0.0
        self.capabilities: PipelineCapabilities | None = None
        self._live: dict[str, LiveRequest] = {}
        self._deadlines = Deadlines()
        self.workers: dict[str, WorkerHandle] = {}
        registry = AdapterRegistry(stage.engine_args)
        self._reception = Reception(registry, self._admit, self._refuse)
        self.adapters = StageAdapters(
            stage, registry, self.workers, self._live, self._reception, send
        )
        self._log = RequestLog(self.name)
        self.figures = StageFigures()
        self.timeline = StageTimeline(self.name, boxes or BoxRing())
        self._floor = Floor(
            self._live, self.workers, send, self._finish, self._log, self.figures, self.timeline
        )
        self._dispatch = make_dispatch(stage.engine_args, None, self._floor)

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``degraded`` (some workers gone) or ``down`` (all left dead)."""
        workers = self.workers.values()
        if all(worker.state is WorkerState.DEAD for worker in workers):
            return "down"
        if not self._reception.is_open:
            return "loading"
        lacking = any(w.state is WorkerState.DEAD or w.is_recovering for w in workers)
        return "degraded" if lacking else "ready"

    @property
    def settled(self) -> bool:
        """Whether no worker is under way, and every configured adapter has had its verdict."""
        under_way = (WorkerState.LOADING, WorkerState.RESTARTING)
        loading = any(worker.state in under_way for worker in self.workers.values())
        return not loading and self.adapters.registry.settled

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, those that could not be judged yet included."""
        return self._dispatch.scheduler.num_waiting + len(self._reception.parking)

    @property
    def num_running(self) -> int:
        """Requests that a worker runs."""
        return self._dispatch.scheduler.num_running

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """What requests get that leave sampling parameters out, as far as that is known."""
        known = self._reception.defaults
        return self.stage.engine_args.default_sampling_params.given() if known is None else known

    @property
    def effective_max_num_seqs(self) -> int:
        """What ``max_num_seqs`` comes to."""
        return effective_max_num_seqs(self.stage.engine_args, self.capabilities)

    @property
    def error(self) -> OmniError | None:
        """Why the first worker that takes no work can't, or why it is being replaced."""
        errors = (worker.last_error for worker in self.workers.values())
        return next((error for error in errors if error is not None), None)

    def held(self) -> dict[str, int]:
        """Return how much is kept of what requests bring with them; all 0 when none is live."""
        workers = self.workers.values()
        return {
            "live": len(self._live),
            "parked": len(self._reception.parking),
            "deadlines": len(self._deadlines),
            "running": sum(len(list(self._dispatch.running_on(w.worker_id))) for w in workers),
            "on_workers": sum(worker.heartbeat.requests for worker in workers),
            **self._dispatch.scheduler.held(),
        }

    def live(self, request_id: str) -> LiveRequest | None:
        """Return a request that has not ended; None if the id is free."""
        return self._live.get(request_id)

    def submit(self, request: DiffusionRequest, listener: Listener, now: float) -> None:
        """Take a request in, or refuse it.

        Raises:
            OmniError: why the request is refused.
        """
        if self.state == "down":
            raise self.unavailable(now)
        live = LiveRequest(request, listener, now)
        self._reception.take_in(live, now)
        self._live[request.request_id] = live
        if live.deadline is not None:
            self._deadlines.add(request.request_id, live.deadline)
        self.figures.received(live)
        self._log.accepted(live, listener.label)
        listener.on_status(request.request_id, RequestStatus.WAITING)

    def abort(
        self, request_ids: Iterable[str], now: float, reason: OmniError | None = None
    ) -> None:
        """End requests; their clients are told at once. Unknown ids are ignored."""
        error = reason or RequestAbortedError("the request was aborted")
        running: dict[str, list[str]] = {}
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None or live.answered:
                continue
            self._answer(live, live.failed(error), now)
            if self._reception.parking.leave(request_id):
                self._forget(live)
            elif self._dispatch.scheduler.abort(request_id, now) is RequestStatus.RUNNING:
                worker_id = self._dispatch.worker_of(request_id)
                running.setdefault(worker_id, []).append(request_id)
            else:
                self._forget(live)
        for worker_id, ids in running.items():
            self._send(worker_id, {"type": plans.ABORT, "request_ids": ids})

    def abort_all(self, now: float, reason: OmniError) -> None:
        """End every request."""
        self.abort(list(self._live), now, reason)

    def on_worker_message(self, worker_id: str, message: dict[str, Any], now: float) -> None:
        """Act on a message from one of this stage's workers; a dead one's last words are late."""
        worker = self.workers[worker_id]
        if not worker.has_process:
            return
        worker.last_seen = now
        match message["type"]:
            case plans.READY:
                self._on_ready(worker, message, now)
            case plans.HEARTBEAT:
                worker.note_heartbeat(Heartbeat.from_wire(message))
            case plans.OUTPUTS:
                outputs = [DiffusionOutput.from_wire(wire) for wire in message["outputs"]]
                worker.note_outputs(outputs, message["forwards"])
                self._dispatch.on_outputs(worker, outputs, now)
            case plans.STEP_STATES:
                report = StepReport.from_wire(message)
                worker.note_outputs(report.outputs, report.forwards)
                self._dispatch.on_report(worker, report, now)
            case adapters.ADAPTER_CHECKED:
                self.adapters.on_checked(worker_id, message, now)
            case adapters.ADAPTERS_HELD:
                self.adapters.on_held(worker, message)
            case plans.FAULT:
                worker.error = error_from_wire(message["error"])
                logger.error("worker %s: %s", worker_id, worker.error)

    def give_up(self, worker_id: str, error: OmniError) -> None:
        """End a worker whose messages can't be used; its requests are told when it is gone."""
        worker = self.workers[worker_id]
        worker.error = error
        worker.kill()

    def dispatch(self, now: float) -> None:
        """Give workers what the scheduler decides, adapter files to check and to load ahead."""
        self._end_overdue(now)
        self.adapters.give_checks()
        self._dispatch.dispatch(now)
        running_on = self._dispatch.running_on
        self.adapters.look_ahead(
            self._dispatch.scheduler, lambda: self._floor.loads(running_on), now
        )

    def next_deadline(self, now: float) -> float | None:
        """When ``dispatch`` may decide differently through time alone."""
        deadlines = (
            self._dispatch.next_deadline(now),
            self.adapters.next_deadline(),
            self._deadlines.next(),
        )
        return min((at for at in deadlines if at is not None), default=None)

    def describe_workers(self, now: float) -> list[dict[str, Any]]:
        """Return the workers' states for status."""
        return [
            worker.describe(now) | self._dispatch.describe_worker(worker)
            for worker in self.workers.values()
        ]

    def check_workers(self, now: float) -> None:
        """Notice workers that ended, are stuck, or are to be started again."""
        for worker in self.workers.values():
            if worker.has_process:
                worker.watch(now)
                if worker.exit_code is not None:
                    self._on_death(worker, now)
            elif worker.next_start is not None and now >= worker.next_start:
                if worker.restart(now):
                    name, pid = worker.worker_id, worker.pid
                    logger.info("worker %s is started again, process %d", name, pid)
                self._end_all_if_down(now)

    def _admit(self, live: LiveRequest, admitted: AdmittedRequest, now: float) -> None:
        live.admitted = admitted
        # The scheduler's clock never goes back; a request that was parked may be older than it.
        self._last_added = max(self._last_added, live.arrival)
        self._dispatch.scheduler.add(
            live.request_id,
            key=admitted.key,
            adapter=admitted.key.adapter,
            weights=admitted.weights,
            rows=admitted.rows,
            work=admitted.work,
            now=self._last_added,
        )
        self.adapters.note_admitted(admitted.activation, now)

    def _refuse(self, live: LiveRequest, error: OmniError, now: float) -> None:
        """End a parked request."""
        self._answer(live, live.failed(error), now)
        self._forget(live)

    def _on_ready(self, worker: WorkerHandle, message: dict[str, Any], now: float) -> None:
        if self._reception.is_open:
            worker.note_ready(message)
            self.adapters.welcome(worker, now)
            return
        capabilities = PipelineCapabilities.from_wire(message["capabilities"])
        try:
            admission = Admission(
                self.stage.engine_args, self._limits, self.adapters.registry, capabilities
            )
        except OmniError as error:
            worker.error = error  # it counts as loading until it is gone, and the stage is down
            worker.kill()
            return
        worker.note_ready(message)
        self.capabilities = capabilities
        self._dispatch = make_dispatch(self.stage.engine_args, capabilities, self._floor)
        warn_of_capacity(self.name, self.stage.engine_args, capabilities)
        self.adapters.suit(capabilities, now)
        self._reception.open(admission, now)

    def _finish(self, output: DiffusionOutput, now: float) -> None:
        live = self._live[output.request_id]
        self._forget(live)
        output.applied_loras = live.as_named(output.applied_loras)
        status = RequestStatus.FINISHED_ERROR if output.error else RequestStatus.FINISHED_COMPLETED
        self._dispatch.scheduler.finish(output.request_id, status, now)
        if not live.answered:
            self._answer(live, output, now)

    def _forget(self, live: LiveRequest) -> None:
        """Drop a request that has ended."""
        del self._live[live.request_id]
        self._deadlines.discard(live.request_id)
        if live.admitted is not None:
            self.adapters.note_ended(live.admitted.activation)

    def _answer(self, live: LiveRequest, output: DiffusionOutput, now: float) -> None:
        started = now if live.started is None else live.started
        metrics = output.metrics
        metrics.queue_ms = (started - live.arrival) * 1000
        if output.error is not None:  # it may have ended without its worker's word
            metrics.run_ms = metrics.run_ms or (now - started) * 1000
            metrics.worker = metrics.worker or live.worker_id or ""
        live.answered = True
        self.figures.ended(live, output, now)
        self._log.ended(live, output, now, client=live.listener.label)
        live.listener.on_output(output)

    def _end_overdue(self, now: float) -> None:
        for request_id in self._deadlines.take_due(now):
            timeout_s = self._live[request_id].request.timeout_s
            error = RequestTimeoutError(
                f"the request did not end within {timeout_s:g} s",
                field="timeout_s",
                value=timeout_s,
            )
            self.abort([request_id], now, error)

    def _on_death(self, worker: WorkerHandle, now: float) -> None:
        death = worker.bury(now)
        lost = self._dispatch.lose(worker, now)
        again = [request_id for request_id in lost if self._survives(request_id, death, now)]
        self._dispatch.run_again(again, now)
        for request_id in again:
            self._live[request_id].start_over(death)
            self.figures.waits_again(self._live[request_id])
        for dead in self.workers.values():  # what is explained now no longer counts against it
            if dead.state is WorkerState.DEAD and (dead is worker or dead.next_start is not None):
                dead.plan_restart(now)
        worker.log_death(death, lost, again, now)
        self.adapters.lose(worker, now)
        self._end_all_if_down(now)

    def _end_all_if_down(self, now: float) -> None:
        if self.state == "down":
            self.abort_all(now, self.unavailable(now))
            self.adapters.refuse_checks(self.unavailable(now), now)

    def _survives(self, request_id: str, death: Death, now: float) -> bool:
        """Whether a dead worker's request is run again; one that isn't has ended."""
        live = self._live[request_id]
        first = live.first_death
        if first is None and not live.answered:
            return True
        if first is not None:
            first.explained = death.explained = True
        error = WorkerDiedRepeatedlyError(
            f"two workers died while they ran the request; the last one: {death.error.message}",
            hint="Others were run again, so it may be what kills them: see `omni-engine status`.",
        )
        self._finish(live.failed(error), now)
        return False

    def unavailable(self, now: float) -> StageUnavailableError:
        """Return the error for requests that come when no worker is left."""
        starts = [w.next_start for w in self.workers.values() if w.next_start is not None]
        return StageUnavailableError(
            f"no worker of model {self.name!r} is alive: {self.error}",
            field="model",
            value=self.name,
            hint="See `omni-engine status` and the engine's log.",
            retry_after_ms=max(0.0, min(starts) - now) * 1000 if starts else None,
        )
