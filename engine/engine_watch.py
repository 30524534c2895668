"""Tells when a process of one's own has ended, and how."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from omni_engine.protocol.errors import EngineClosedError


class EngineWatch:
    """Waits in a thread for an engine process to end; leaves it to its owner to reap it.

    Args:
        pid: a child of this process.
        on_end: called from the thread, once, with what to tell those who wait for the engine.
    """

    def __init__(self, pid: int, on_end: Callable[[EngineClosedError], None]) -> None:
        self._thread = threading.Thread(
            target=_wait, args=(pid, on_end), name="omni-engine-watch", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the process has ended and that was told."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _wait(pid: int, on_end: Callable[[EngineClosedError], None]) -> None:
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # its owner was faster
        ended = None
    how = "" if ended is None else f" with {_how(ended.si_code, ended.si_status)}"
    on_end(EngineClosedError(f"the engine process ended{how}", hint="Start a new engine."))


def _how(code: int, status: int) -> str:
    if code == os.CLD_EXITED:
        return f"exit code {status}"
    try:
        return f"signal {status} ({signal.Signals(status).name})"
    except ValueError:  # a real-time signal has no name
        return f"signal {status}"
