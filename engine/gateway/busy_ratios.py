"""How busy each worker was lately, from figures that only grow. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

SHORTEST_S, LONGEST_S = 10.0, 130.0
"""The time that a ratio is about; it depends on when the figures were asked for."""
_SPACING_S = 1.0
"""Figures that follow others sooner are not remembered: several may ask."""

_Busy = dict[tuple[str, str], float]


class BusyRatios:
    """Remembers figures for two minutes."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, _Busy]] = deque()

    def note(self, metrics: Mapping[str, Any], now: float) -> dict[tuple[str, str], float]:
        """Note figures and return the share of the time since earlier ones that was busy, 0 to 1.

        The time begins with the latest figures that are ``SHORTEST_S`` old, if they are at most
        ``LONGEST_S``; a worker for which there are none yet is left out.

        Args:
            metrics: the engine's.
            now: seconds, monotonic.
        """
        busy = {
            (stage["name"], worker["worker_id"]): float(worker["busy_s"])
            for stage in metrics["stages"]
            for worker in stage["workers"]
        }
        while self._past and now - self._past[0][0] > LONGEST_S:
            self._past.popleft()
        before = [entry for entry in self._past if now - entry[0] >= SHORTEST_S]
        if not self._past or now - self._past[-1][0] >= _SPACING_S:
            self._past.append((now, busy))
        if not before:
            return {}
        then, was = before[-1]
        grown = {name: value - was[name] for name, value in busy.items() if name in was}
        if any(
            value < 0 for value in grown.values()
        ):  # another engine, which counts from its start
            self._past.clear()
            return {}
        return {name: min(1.0, value / (now - then)) for name, value in grown.items()}
