"""One stage at work: its workers, its scheduler, its live requests.

No sockets here: messages to workers and answers to clients leave through callbacks, and the time is
passed in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission, AdmittedRequest
from omni_engine.engine.dispatch import Floor
from omni_engine.engine.live_request import Listener, LiveRequest
from omni_engine.engine.modes import effective_max_num_seqs, make_dispatch, warn_of_capacity
from omni_engine.engine.reception import Reception
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.stage_adapters import StageAdapters
from omni_engine.engine.worker_handle import WorkerHandle, WorkerState
from omni_engine.protocol import adapters, plans
from omni_engine.protocol.errors import (
    OmniError,
    RequestAbortedError,
    StageUnavailableError,
    error_from_wire,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import PipelineCapabilities, StepReport
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.config import Limits, StageConfig

logger = logging.getLogger(__name__)


class StageRuntime:
    """Serves one model with its workers.

    Args:
        stage: the stage's configuration.
        limits: the engine's limits.
        send: sends a message to a worker by its id.

    Raises:
        ConfigError: if an adapter's file is missing.
    """

    def __init__(
        self, stage: StageConfig, limits: Limits, send: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.stage = stage
        self.name = stage.display_name
        self._limits = limits
        self._send = send
        self._last_added = 0.0
        self.capabilities: PipelineCapabilities | None = None
        self._live: dict[str, LiveRequest] = {}
        self.workers: dict[str, WorkerHandle] = {}
        registry = AdapterRegistry(stage.engine_args)
        self._reception = Reception(registry, self._admit, self._refuse)
        self.adapters = StageAdapters(
            stage, registry, self.workers, self._live, self._reception, send
        )
        self.counters: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self._floor = Floor(self._live, self.workers, send, self._finish, self.batch_sizes)
        self._dispatch = make_dispatch(stage.engine_args, None, self._floor)

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``degraded`` (some workers dead) or ``down`` (all dead)."""
        states = [worker.state for worker in self.workers.values()]
        if all(state is WorkerState.DEAD for state in states):
            return "down"
        if not self._reception.is_open:
            return "loading"
        return "degraded" if WorkerState.DEAD in states else "ready"

    @property
    def settled(self) -> bool:
        """Whether no worker is still loading, and every configured adapter has had its verdict."""
        loading = any(worker.state is WorkerState.LOADING for worker in self.workers.values())
        return not loading and self.adapters.registry.settled

    @property
    def busy(self) -> bool:
        """Whether a request runs."""
        return any(worker.state is WorkerState.BUSY for worker in self.workers.values())

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, those that could not be judged yet included."""
        return self._dispatch.scheduler.num_waiting + len(self._reception.parking)

    @property
    def num_running(self) -> int:
        """Requests that a worker runs."""
        return self._dispatch.scheduler.num_running

    @property
    def effective_max_num_seqs(self) -> int:
        """What ``max_num_seqs`` comes to."""
        return effective_max_num_seqs(self.stage.engine_args, self.capabilities)

    @property
    def error(self) -> OmniError | None:
        """Why the stage's first dead worker died."""
        errors = (worker.error for worker in self.workers.values())
        return next((error for error in errors if error is not None), None)

    def live(self, request_id: str) -> LiveRequest | None:
        """Return a request that has not ended; None if the id is free."""
        return self._live.get(request_id)

    def submit(self, request: DiffusionRequest, listener: Listener, now: float) -> None:
        """Take a request in, or refuse it.

        Raises:
            OmniError: why the request is refused.
        """
        if self.state == "down":
            raise self.unavailable()
        live = LiveRequest(request, listener, now)
        self._reception.take_in(live, now)
        self._live[request.request_id] = live
        self.counters["received"] += 1
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
                del self._live[request_id]
            elif self._dispatch.scheduler.abort(request_id, now) is RequestStatus.RUNNING:
                worker_id = self._dispatch.worker_of(request_id)
                running.setdefault(worker_id, []).append(request_id)
            else:
                self._forget(live)
        for worker_id, ids in running.items():
            self._send(worker_id, {"type": plans.ABORT, "request_ids": ids})

    def abort_all(self, now: float, reason: OmniError, *, waiting_only: bool = False) -> None:
        """End every request, or every one that has not started."""
        ids = [i for i, live in self._live.items() if not waiting_only or live.started is None]
        self.abort(ids, now, reason)

    def on_worker_message(self, worker_id: str, message: dict[str, Any], now: float) -> None:
        """Act on a message from one of this stage's workers; a dead one's last words are late."""
        worker = self.workers[worker_id]
        if worker.state is WorkerState.DEAD:
            return
        worker.last_seen = now
        match message["type"]:
            case plans.READY:
                self._on_ready(worker, message, now)
            case plans.OUTPUTS:
                outputs = [DiffusionOutput.from_wire(wire) for wire in message["outputs"]]
                self._dispatch.on_outputs(worker, outputs, now)
            case plans.STEP_STATES:
                self._dispatch.on_report(worker, StepReport.from_wire(message), now)
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
        self.adapters.give_checks()
        self._dispatch.dispatch(now)
        running_on = self._dispatch.running_on
        self.adapters.look_ahead(
            self._dispatch.scheduler, lambda: self._floor.loads(running_on), now
        )

    def next_deadline(self, now: float) -> float | None:
        """When ``dispatch`` may decide differently through time alone."""
        deadlines = (self._dispatch.next_deadline(now), self.adapters.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def describe_workers(self, now: float) -> list[dict[str, Any]]:
        """Return the workers' states for status."""
        return [
            worker.describe(now) | self._dispatch.describe_worker(worker)
            for worker in self.workers.values()
        ]

    def check_workers(self, now: float) -> None:
        """Notice workers that ended, or take too long to load."""
        for worker in self.workers.values():
            if worker.state is WorkerState.DEAD:
                continue
            worker.check_startup(self.stage.engine_args.worker_startup_timeout_s, now)
            if worker.exit_code is not None:
                self._on_death(worker, now)

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
        del self._live[live.request_id]

    def _on_ready(self, worker: WorkerHandle, message: dict[str, Any], now: float) -> None:
        worker.ready_message = message
        if self._reception.is_open:
            worker.state = WorkerState.IDLE
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
        worker.state = WorkerState.IDLE
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
        """Drop an admitted request that has ended."""
        del self._live[live.request_id]
        if live.admitted is not None:
            self.adapters.note_ended(live.admitted.activation)

    def _answer(self, live: LiveRequest, output: DiffusionOutput, now: float) -> None:
        started = now if live.started is None else live.started
        output.metrics.queue_ms = (started - live.arrival) * 1000
        live.answered = True
        kind = "aborted" if output.aborted else "failed" if output.error else "completed"
        self.counters[kind] += 1
        live.listener.on_output(output)

    def _on_death(self, worker: WorkerHandle, now: float) -> None:
        error = worker.end(now)
        logger.error("%s", error)
        for request_id in self._dispatch.lose(worker, now):
            self._finish(self._live[request_id].failed(error), now)
        self.adapters.lose(worker, now)
        if self.state == "down":
            self.abort_all(now, self.unavailable())
            self.adapters.refuse_checks(self.unavailable(), now)

    def unavailable(self) -> StageUnavailableError:
        """Return the error for requests that come when no worker is left."""
        return StageUnavailableError(
            f"no worker of model {self.name!r} is alive: {self.error}",
            field="model",
            value=self.name,
            hint="See `omni-engine status` and the engine's log.",
        )
