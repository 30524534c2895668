"""A worker's operating-system process: its start, its last words, its end."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading

from omni_engine.engine.devices import WorkerDevice
from omni_engine.protocol import pipes
from omni_engine.protocol.logs import passed_on
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.protocol.stderr_writer import write_stderr

WORKER_MODULE = "omni_engine.worker.process"

TAIL_LINES = 60
_MAX_LINE_BYTES = 1 << 20
_TAIL_LINE_CHARS = 4096
_LAST_WORDS_S = 0.2
"""How long to wait, once a process has ended, for what it wrote last."""

_PASSIVE_WAIT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Idle compute threads sleep instead of spinning: spinning ones slow a shared machine many-fold."""


class WorkerProcess:
    """A running worker; what it writes goes to this process's standard error, the end is kept.

    Args:
        spec: what the worker is told at its start.
        device: the environment that makes only its device visible.
    """

    def __init__(self, spec: WorkerSpec, device: WorkerDevice) -> None:
        self._worker_id = spec.worker_id
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        reader, writer = os.pipe()
        try:
            self._process = _spawn(spec, device, writer)
        except BaseException:  # whatever it is: clean up, then pass it on
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._pump = threading.Thread(
            target=self._pass_on, args=(reader,), name=f"stderr-{spec.identity}", daemon=True
        )
        try:
            self._pump.start()
        except RuntimeError:  # no thread is left: clean up, then pass it on
            self._process.kill()
            self._process.wait()
            os.close(reader)
            raise
        assert self._process.stdin is not None  # PIPE was asked for
        with contextlib.suppress(BrokenPipeError):  # it died already; its exit code tells
            pipes.write_message(self._process.stdin.fileno(), spec.to_wire())

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
        if code is None or code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else "no name"
        return f"killed by signal {-code} ({name})"

    @property
    def tail(self) -> list[str]:
        """The last lines that it wrote, the newest last; control characters are escaped."""
        return list(self._tail)

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end; False if it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Release the pipes to an ended process, and end what it left running.

        Its last words have been read then.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it left nothing
            os.killpg(self.pid, signal.SIGKILL)
        self._pump.join(_LAST_WORDS_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _pass_on(self, reader: int) -> None:
        with open(reader, "rb", closefd=True) as source:
            while line := source.readline(_MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    shown = (c if c.isprintable() else repr(c)[1:-1] for c in text)
                    self._tail.append("".join(shown)[:_TAIL_LINE_CHARS])
                write_stderr(passed_on(self._worker_id, line))


def _spawn(spec: WorkerSpec, device: WorkerDevice, output: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **device.environment}
    if spec.threads is not None:
        environment |= {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    for name, value in _PASSIVE_WAIT.items():
        environment.setdefault(name, value)
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        bufsize=0,
        process_group=0,  # Ctrl-C is for the engine; the pipe's end tells the worker
    )
