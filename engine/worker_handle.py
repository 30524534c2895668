"""One worker as the engine sees it: its process started, watched, sent plans, replaced, stopped."""

from __future__ import annotations

import dataclasses
import enum
import logging
import signal
from collections.abc import Hashable, Iterable
from typing import Any

from omni_engine.engine.devices import WorkerDevice
from omni_engine.engine.figures import WorkerFigures
from omni_engine.engine.restarts import Death, RestartPolicy
from omni_engine.engine.scheduler import WorkerSlot
from omni_engine.engine.worker_process import WorkerProcess
from omni_engine.protocol.adapters import AdapterActivation, AdaptersHeld
from omni_engine.protocol.errors import ModelLoadError, OmniError, WorkerLostError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import Heartbeat, WorkerSpec
from omni_engine.stages.config import EngineArgs

logger = logging.getLogger(__name__)

_ABORT_GRACE_S = 2.0
"""How long a stalled worker may take to write its Python stack and end, before it is killed."""

_SOON_S = 60.0
"""For how long after a worker's death others need not take over what only it should run."""

_DEATHS_SHOWN = 5
_TAIL_SHOWN = 40


class WorkerState(enum.Enum):
    """A worker's life, as shown in status."""

    LOADING = "loading"
    IDLE = "idle"
    BUSY = "busy"
    RESTARTING = "restarting"
    DEAD = "dead"


class WorkerHandle:
    """A worker: one process at a time, started again when it dies.

    Args:
        spec: what a process is told at its start.
        device: the device and the environment that makes only it visible.
        arguments: the stage's settings, for the limits of a worker's life.
        now: seconds, monotonic.

    Attributes:
        error: why its process died or is about to end; None while it does well.
        next_start: when it is started again: seconds, monotonic; None if it runs or never will be.
        was_ready: whether any of its processes was.
        figures: what its processes have done.
    """

    def __init__(
        self, spec: WorkerSpec, device: WorkerDevice, arguments: EngineArgs, now: float
    ) -> None:
        self.worker_id = spec.worker_id
        self.device = device
        self._spec, self._arguments = spec, arguments
        self._policy = RestartPolicy(
            arguments.worker_restart_backoff_s,
            arguments.max_worker_deaths,
            arguments.worker_death_window_s,
        )
        self.next_start: float | None = None
        self.was_ready = False
        self.batches = self.requests = self.adapters_needed = self.completed = self.restarts = 0
        self.figures = WorkerFigures()
        self._busy_s = 0.0
        self._run(now)

    def _run(self, now: float) -> None:
        """Start a process."""
        self.state = WorkerState.LOADING
        self.error: OmniError | None = None
        self._process: WorkerProcess | None
        self.ready_message: dict[str, Any] = {}
        self.started_at = self.last_seen = self._busy_since = now
        self.heartbeat = Heartbeat(0.0)
        self.held: AdaptersHeld | None = None
        self._active: Hashable | None = None
        self._completed_before = self.completed
        self._kill_at: float | None = None
        try:
            self._process = WorkerProcess(self._spec, self.device)
        except (OSError, RuntimeError) as error:  # no descriptors, memory or threads are left
            self._process = None
            self.state = WorkerState.DEAD
            self.error = WorkerLostError(
                f"worker {self.worker_id} can't be started: {error}",
                hint="The machine is short of what a process needs: see its limits.",
            )
            self._policy.note(Death(now, self.error))
            self.plan_restart(now)
            logger.error("%s", self.error)

    def restart(self, now: float) -> bool:
        """Start another process in a dead one's place; False if that can't be done now."""
        self.restarts += 1
        self.next_start = None
        self._spec = dataclasses.replace(self._spec, incarnation=self._spec.incarnation + 1)
        self._run(now)
        return self._process is not None

    @property
    def identity(self) -> str:
        """The present process's name on the engine's socket."""
        return self._spec.identity

    @property
    def pid(self) -> int:
        """The process id; 0 if no process could be started."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: the signal's number), or None while the process runs."""
        return None if self._process is None else self._process.exit_code

    @property
    def has_process(self) -> bool:
        """Whether a process is there that has not been taken note of as dead."""
        return self.state not in (WorkerState.RESTARTING, WorkerState.DEAD)

    @property
    def is_ready(self) -> bool:
        """Whether it takes work; one with an error is about to end."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY) and self.error is None

    @property
    def is_recovering(self) -> bool:
        """Whether it died, and another process is or will soon be under way."""
        reloading = self.state is WorkerState.LOADING and self.restarts > 0
        return reloading or self.state is WorkerState.RESTARTING

    @property
    def slot(self) -> WorkerSlot:
        """The worker as the scheduler sees it."""
        on_device = frozenset() if self.held is None else frozenset(self.held.device)
        return WorkerSlot(self.worker_id, self._active, on_device)

    def is_expected(self, now: float) -> bool:
        """Whether it died only just now, so that it may soon be back."""
        return self.is_recovering and now - self._policy.deaths[-1].at < _SOON_S

    @property
    def last_error(self) -> OmniError | None:
        """Why it can't take work, or why its last process died while the next one loads."""
        if self.error is None and self.is_recovering:
            return self._policy.deaths[-1].error
        return self.error

    def busy_s(self, now: float) -> float:
        """Return the seconds for which it had work, up to now."""
        running_s = now - self._busy_since if self.state is WorkerState.BUSY else 0.0
        return self._busy_s + running_s

    def set_busy(self, busy: bool, now: float) -> None:
        """Note that a live worker has work, or has none left; nothing changes if that was known."""
        if busy == (self.state is WorkerState.BUSY):
            return
        if busy:
            self.state, self._busy_since = WorkerState.BUSY, now
        else:
            self._busy_s = self.busy_s(now)
            self.state = WorkerState.IDLE

    def note_sent(
        self, adapter: Hashable | None, activations: Iterable[AdapterActivation | None]
    ) -> None:
        """Note that it was sent requests.

        Args:
            adapter: what they all run under; None: the bare model, or several.
            activations: one per request.
        """
        self._active = adapter
        for activation in activations:
            self.requests += 1
            self.adapters_needed += 0 if activation is None else len(activation.adapters)

    def note_outputs(self, outputs: Iterable[DiffusionOutput], forwards: int) -> None:
        """Count what it completed.

        Args:
            outputs: of requests that have ended.
            forwards: denoiser forwards of its process so far.
        """
        self.completed += sum(output.error is None for output in outputs)
        self.figures.note_forwards(forwards)

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Note what its process says of itself; forwards made while it loads serve nobody."""
        self.heartbeat = heartbeat
        if self.state is not WorkerState.LOADING:
            self.figures.note_forwards(heartbeat.forwards)

    def note_ready(self, message: dict[str, Any]) -> None:
        """Note that its process has loaded the model."""
        self.ready_message = message
        self.state, self.was_ready = WorkerState.IDLE, True
        self.heartbeat = Heartbeat(0.0)

    def watch(self, now: float) -> None:
        """End a process that loads for too long, is silent for too long, or has stalled.

        Args:
            now: seconds, monotonic; what the process sent until then has been read.
        """
        if self._kill_at is not None:
            if now >= self._kill_at:
                self.kill()
            return
        limits, silent_s = self._arguments, now - self.last_seen
        if self.state is WorkerState.LOADING:
            if now - self.started_at > limits.worker_startup_timeout_s:
                self._give_up(
                    ModelLoadError(
                        f"worker {self.worker_id} was not ready after "
                        f"{limits.worker_startup_timeout_s:g} s",
                        field="worker_startup_timeout_s",
                        value=limits.worker_startup_timeout_s,
                        hint="Raise the limit if the model is large or must be downloaded.",
                    ),
                    now,
                )
        elif silent_s > limits.worker_heartbeat_timeout_s:
            self._give_up(
                WorkerLostError(
                    f"worker {self.worker_id} gave no sign of life for {silent_s:.1f} s",
                    field="worker_heartbeat_timeout_s",
                    value=limits.worker_heartbeat_timeout_s,
                ),
                now,
            )
        elif (stalled_s := self._stalled_s) > limits.worker_stall_timeout_s:
            self._give_up(
                WorkerLostError(
                    f"worker {self.worker_id} made no progress for {stalled_s:.1f} s",
                    field="worker_stall_timeout_s",
                    value=limits.worker_stall_timeout_s,
                    hint="Raise the limit if single forwards take that long.",
                ),
                now,
            )

    @property
    def _stalled_s(self) -> float:
        return max(self.heartbeat.working_ms, self.heartbeat.loading_ms) / 1000

    def _give_up(self, error: OmniError, now: float) -> None:
        """Let the process write where it is stuck, and end."""
        self.error = error
        self._kill_at = now + _ABORT_GRACE_S
        self._signal(signal.SIGABRT)

    def bury(self, now: float) -> Death:
        """Note that the process is gone; returns how and why."""
        self._busy_s = self.busy_s(now)
        self.figures.process_ended(self.held)
        self.state, self.held, self.heartbeat = WorkerState.DEAD, None, Heartbeat(0.0)
        process = self._process
        assert process is not None  # only what has lived can die
        process.close()
        self.error = self.error or WorkerLostError(
            f"worker {self.worker_id} died: {process.ending}",
            hint="Its last words are in `omni-engine status`.",
        )
        death = Death(now, self.error, process.tail, self.completed > self._completed_before)
        self._policy.note(death)
        return death

    def plan_restart(self, now: float) -> None:
        """Settle when a dead worker is started again, once it is known what its death is due to.

        One that could not load at its very first start, and said why, is left dead for good.
        """
        if not self.was_ready and not isinstance(self.error, WorkerLostError):
            return
        self.next_start, left_dead = self._policy.next_start(now)
        self.state = WorkerState.DEAD if left_dead else WorkerState.RESTARTING

    def log_death(self, death: Death, lost: list[str], again: list[str], now: float) -> None:
        """Log a death and what comes of it.

        Args:
            death: as ``bury`` returned it.
            lost: the requests that it ran.
            again: those of them that are run again.
            now: seconds, monotonic.
        """
        restart_in_s = None if self.next_start is None else round(self.next_start - now, 3)
        plan = "it is not started again"
        if restart_in_s is not None:
            plan = f"it is started again in {restart_in_s:.1f} s"
        if self.state is WorkerState.DEAD and restart_in_s is not None:
            limits = self._arguments
            plan += (
                f", as it died {limits.max_worker_deaths} times within "
                f"{limits.worker_death_window_s:g} s (max_worker_deaths)"
            )
        fields = {
            "event": "worker_died",
            "worker_id": self.worker_id,
            "worker_pid": self.pid,
            "error": death.error.code,
            "requests_again": again,
            "requests_ended": [one for one in lost if one not in again],
            "restart_in_s": restart_in_s,
        }
        logger.error(
            "%s (process %d); %d of its %d requests are run again; %s",
            death.error.message,
            self.pid,
            len(again),
            len(lost),
            plan,
            extra=fields,
        )

    def describe(self, now: float) -> dict[str, Any]:
        """Return the worker's state for status."""
        next_start = self.next_start
        return {
            "worker_id": self.worker_id,
            "device": self.device.name,
            "pid": self.pid if self.has_process else None,
            "state": self.state.value,
            "error": None if self.last_error is None else self.last_error.to_wire(),
            "load_ms": self.ready_message.get("load_ms"),
            "parameter_bytes": self.ready_message.get("parameter_bytes"),
            "since_seen_ms": (now - self.last_seen) * 1000,
            "working_ms": self.heartbeat.working_ms,
            "memory_caps": dict(self.heartbeat.memory_caps),
            "restarts": self.restarts,
            "next_start_s": None if next_start is None else max(0.0, next_start - now),
            "deaths": [self._describe_death(death, now) for death in self._last_deaths],
            "batches": self.batches,
            "requests": self.requests,
            "busy_s": self.busy_s(now),
            "adapters": None if self.held is None else self._describe_held(self.held),
        }

    @property
    def _last_deaths(self) -> list[Death]:
        return list(self._policy.deaths)[-_DEATHS_SHOWN:]

    def _describe_death(self, death: Death, now: float) -> dict[str, Any]:
        return {
            "ago_s": now - death.at,
            "error": death.error.to_wire(),
            "stderr_tail": death.stderr_tail[-_TAIL_SHOWN:],
        }

    def _describe_held(self, held: AdaptersHeld) -> dict[str, Any]:
        """Return how many adapters it has and what it counted; rates are of those needed."""
        counters = {**dataclasses.asdict(held), "device": len(held.device), "host": len(held.host)}
        hits = {"device": held.device_hits, "memory": held.device_hits + held.host_hits}
        needed = self.adapters_needed
        rates = {f"{where}_hit_rate": n / needed if needed else None for where, n in hits.items()}
        return {**counters, "needed": needed, **rates}

    def terminate(self) -> None:
        """Ask the operating system to end the process."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process for sure."""
        self._signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; False if it still runs."""
        return self._process is None or self._process.wait(timeout_s)

    def close(self) -> None:
        """Release the pipes to an ended process, and end what it left running."""
        if self._process is not None:
            self._process.close()

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
