"""When a worker that died is started again: exponential back-off and a circuit breaker.

Pure: the time is passed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from omni_engine.protocol.errors import OmniError

MAX_BACKOFF_S = 30.0
_MAX_KEPT = 100
_BARREN_FACTOR = 4
"""So many times the deaths that are allowed, in a row and without a completed request, show that
the worker is broken even if requests seem to explain them."""


@dataclass(slots=True, eq=False)
class Death:
    """The end of a worker's process that nobody asked for.

    Attributes:
        at: seconds, monotonic.
        error: why.
        stderr_tail: the last lines that it wrote.
        was_useful: whether it had completed a request since its start.
        explained: whether a request turned out to be what kills workers.
    """

    at: float
    error: OmniError
    stderr_tail: list[str] = field(default_factory=list)
    was_useful: bool = False
    explained: bool = False


class RestartPolicy:
    """Decides when a worker is started again.

    The delay doubles with every death within the window, up to 30 s. After ``max_deaths`` within
    the window the worker is left dead until the window holds fewer. Deaths that a request
    explains don't count, so that whoever sends such requests can't shut others out; unless the
    worker completes nothing at all in between: then it is broken, whatever requests it gets.

    Args:
        backoff_s: the first delay, in seconds.
        max_deaths: deaths within the window after which the worker is left dead.
        window_s: seconds.
    """

    def __init__(self, backoff_s: float, max_deaths: int, window_s: float) -> None:
        self._backoff_s, self._max_deaths, self._window_s = backoff_s, max_deaths, window_s
        self.deaths: deque[Death] = deque(maxlen=max(_BARREN_FACTOR * max_deaths, _MAX_KEPT))

    def note(self, death: Death) -> None:
        """Take note of a death."""
        self.deaths.append(death)

    def next_start(self, now: float) -> tuple[float, bool]:
        """Return when to start the worker again, and whether it is left dead until then.

        Args:
            now: seconds, monotonic.
        """
        recent = [death for death in self.deaths if death.at > now - self._window_s]
        barren = list(takewhile(lambda death: not death.was_useful, reversed(recent)))
        is_broken = len(barren) >= _BARREN_FACTOR * self._max_deaths
        counted = [death.at for death in recent if is_broken or not death.explained]
        if len(counted) >= self._max_deaths:
            return counted[-self._max_deaths] + self._window_s, True
        doublings = min(max(0, len(counted) - 1), 30)
        return now + min(MAX_BACKOFF_S, self._backoff_s * 2**doublings), False
