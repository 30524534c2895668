"""Whether the worker's main thread gets on: what its heartbeats tell the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """When one thread last got on, and whether it waits; written by it, read by another one.

    Attributes:
        forwards: denoiser forwards that it ran; one that several requests share counts once.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self._last = time.monotonic()
        self._waits = False

    def mark(self) -> None:
        """Note that the thread got on: a plan came, a forward began or ended."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for something that is not this thread's work; it has got on when that is over."""
        self._waits = True
        try:
            yield
        finally:
            self._last = time.monotonic()  # first: a reader must not see old work resumed
            self._waits = False

    def working_ms(self) -> float:
        """Return the milliseconds since the thread last got on; 0 while it waits."""
        return 0.0 if self._waits else (time.monotonic() - self._last) * 1000


main_thread = Progress()
"""Of the thread that runs plans; there is one in a worker process."""
