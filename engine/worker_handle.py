"""One worker process as the engine sees it: started, watched, sent plans, stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import subprocess
import sys
from collections.abc import Hashable, Iterable
from typing import Any

from omni_engine.engine.devices import WorkerDevice
from omni_engine.engine.scheduler import WorkerSlot
from omni_engine.protocol import pipes
from omni_engine.protocol.adapters import AdapterActivation, AdaptersHeld
from omni_engine.protocol.errors import ModelLoadError, OmniError, WorkerLostError
from omni_engine.protocol.plans import WorkerSpec

WORKER_MODULE = "omni_engine.worker.process"

_PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Idle compute threads sleep instead of spinning: spinning ones slow a shared machine many-fold."""


class WorkerState(enum.Enum):
    """A worker's life, as shown in status."""

    LOADING = "loading"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


class WorkerHandle:
    """A worker process.

    Args:
        spec: what the worker is told at its start.
        device: the device and the environment that makes only it visible.
        now: seconds, monotonic.
    """

    def __init__(self, spec: WorkerSpec, device: WorkerDevice, now: float) -> None:
        self.worker_id = spec.worker_id
        self.device = device
        self.state = WorkerState.LOADING
        self.error: OmniError | None = None
        self.ready_message: dict[str, Any] = {}
        self.started_at = self.last_seen = now
        self.batches = self.requests = self.adapters_needed = 0
        self._busy_s = 0.0
        self._busy_since = now
        self.held: AdaptersHeld | None = None
        self._active: Hashable | None = None
        self._process = self._spawn(spec)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: the signal's number), or None while it runs."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.exit_code
        if code is not None and code < 0:
            return f"killed by signal {-code}"
        return f"exit code {code}"

    @property
    def is_ready(self) -> bool:
        """Whether it takes work; one with an error is about to end."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY) and self.error is None

    @property
    def slot(self) -> WorkerSlot:
        """The worker as the scheduler sees it."""
        on_device = frozenset() if self.held is None else frozenset(self.held.device)
        return WorkerSlot(self.worker_id, self._active, on_device)

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

    def check_startup(self, limit_s: float, now: float) -> None:
        """End the process if it takes longer to load than ``limit_s`` seconds."""
        if self.state is WorkerState.LOADING and now - self.started_at > limit_s:
            self.error = ModelLoadError(
                f"worker {self.worker_id} was not ready after {limit_s:g} s",
                field="worker_startup_timeout_s",
                value=limit_s,
                hint="Raise the limit if the model is large or must be downloaded.",
            )
            self.kill()
            self.wait(5)

    def end(self, now: float) -> OmniError:
        """Note that the process is gone; returns why."""
        self._busy_s = self.busy_s(now)
        self.state, self.held = WorkerState.DEAD, None
        self.close()
        self.error = self.error or WorkerLostError(
            f"worker {self.worker_id} died: {self.ending}",
            hint="Its log on the engine's standard error tells more.",
        )
        return self.error

    def describe(self, now: float) -> dict[str, Any]:
        """Return the worker's state for status."""
        return {
            "worker_id": self.worker_id,
            "device": self.device.name,
            "pid": self.pid,
            "state": self.state.value,
            "error": None if self.error is None else self.error.to_wire(),
            "load_ms": self.ready_message.get("load_ms"),
            "parameter_bytes": self.ready_message.get("parameter_bytes"),
            "since_seen_ms": (now - self.last_seen) * 1000,
            "batches": self.batches,
            "requests": self.requests,
            "busy_s": self.busy_s(now),
            "adapters": None if self.held is None else self._describe_held(self.held),
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
        self._process.terminate()

    def kill(self) -> None:
        """End the process for sure."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; False if it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Release the pipe to an ended process."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _spawn(self, spec: WorkerSpec) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.device.environment}
        if spec.threads is not None:
            environment |= {
                name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
            }
        for name, value in _PASSIVE_WAIT.items():
            environment.setdefault(name, value)
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            env=environment,
            bufsize=0,
            process_group=0,  # Ctrl-C is for the engine; the pipe's end tells the worker
        )
        assert process.stdin is not None  # PIPE was asked for
        with contextlib.suppress(BrokenPipeError):  # it died already; its exit code tells
            pipes.write_message(process.stdin.fileno(), spec.to_wire())
        return process
