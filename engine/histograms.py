"""Counts of values by size, as metrics show them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

SECONDS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds for what requests wait and take, from 5 ms to 10 minutes."""

REQUESTS = tuple(float(1 << power) for power in range(13))
"""Bounds for numbers of requests, from 1 to 4096."""


class Histogram:
    """How many values fell between fixed bounds, and their sum.

    Args:
        bounds: ascending; a value equal to one counts below it, and one more count takes what is
            above the last.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    @classmethod
    def of(cls, values: Iterable[tuple[float, int]], bounds: Sequence[float]) -> Histogram:
        """Return a histogram of values, each with how often it came."""
        made = cls(bounds)
        for value, times in values:
            made.add(value, times)
        return made

    @property
    def total(self) -> int:
        """How many values there are."""
        return sum(self._counts)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> dict[str, Any]:
        """Return bounds, counts (one more than bounds, not cumulative) and the values' sum."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
