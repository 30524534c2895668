"""When requests run out of time: a heap from which those that have ended are dropped in passing.

Pure: the time is passed in.
"""

from __future__ import annotations

import heapq
from itertools import count

_SLACK = 64


class Deadlines:
    """The deadlines of live requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._current: dict[str, int] = {}
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._current)

    def add(self, request_id: str, at: float) -> None:
        """Note when a request's time is over, in seconds, monotonic."""
        ticket = next(self._tickets)
        self._current[request_id] = ticket
        heapq.heappush(self._heap, (at, ticket, request_id))

    def discard(self, request_id: str) -> None:
        """Forget a request, which may have no deadline."""
        if self._current.pop(request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline; None if there is none."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[str]:
        """Return the requests whose time is over, and forget them."""
        due = []
        while (at := self.next()) is not None and at <= now:
            _, _, request_id = heapq.heappop(self._heap)
            del self._current[request_id]
            due.append(request_id)
        return due

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        return self._current.get(entry[2]) == entry[1]
