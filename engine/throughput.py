"""How fast requests end, and so how long it takes until there is room for more.

Pure: the time is passed in.
"""

from __future__ import annotations

from collections import deque

_WINDOW_S = 30.0
_SAMPLE_S = 0.2
_LEAST_S, _MOST_S = 0.1, 60.0
_UNKNOWN_S = 1.0
_SHARE_FREED = 0.1
"""Waiting helps when at least this part of the queue is free again."""


class Throughput:
    """Estimates waits from how many requests ended during the last half minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, ended: int, now: float) -> None:
        """Take note of how many requests have ended since the start.

        Args:
            ended: never less than before.
            now: seconds, monotonic, never less than before.
        """
        samples = self._samples
        if samples and now - samples[-1][0] < _SAMPLE_S:
            return
        samples.append((now, ended))
        while now - samples[1 if len(samples) > 1 else 0][0] > _WINDOW_S:
            samples.popleft()

    def wait_ms(self, waiting: int, ended: int, now: float) -> float:
        """Return after how many milliseconds to try again, from 100 to 60,000.

        Args:
            waiting: requests in the queue that is full.
            ended: as in ``note``, by now.
            now: seconds, monotonic.
        """
        return 1000 * min(_MOST_S, max(_LEAST_S, self._wait_s(waiting, ended, now)))

    def _wait_s(self, waiting: int, ended: int, now: float) -> float:
        if not self._samples:
            return _UNKNOWN_S
        since, ended_then = self._samples[0]
        observed_s = now - since
        if ended == ended_then or observed_s <= 0:
            return max(_UNKNOWN_S, observed_s)  # nothing ended: it takes longer than that
        return (1 + waiting * _SHARE_FREED) * observed_s / (ended - ended_then)
