"""Standard error for a process that must not wait for whoever reads it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading

_MAX_LINES = 10_000
_FLUSH_S = 1.0
"""How long the process's end waits for lines that nobody has read."""


class StderrWriter:
    """Writes lines from a thread of its own; beyond 10,000 that nobody reads, lines are lost.

    How many were lost is told as soon as lines are read again.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[bytes | threading.Event] = queue.Queue(_MAX_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="stderr-writer", daemon=True)
        self._thread.start()
        atexit.register(self.flush)

    def write(self, line: bytes) -> None:
        """Take a line, its end included; never waits."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def flush(self, timeout_s: float = _FLUSH_S) -> None:
        """Wait until all lines so far are written, or time is up."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(timeout_s)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            lost, self._lost = self._lost, 0
            if lost:
                line = b"(%d lines are missing here: nobody read them)\n" % lost + line
            with contextlib.suppress(OSError):  # nobody can read it
                _write_all(line)


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(2, data) :]


@functools.cache
def stderr_writer() -> StderrWriter:
    """Return this process's writer."""
    return StderrWriter()


def write_stderr(line: bytes) -> None:
    """Write a line, its end included, to standard error; never waits."""
    stderr_writer().write(line)
