"""Which of the running requests were aborted; written by the I/O thread, read between steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class AbortFlags:
    """A set of request ids, safe to use from two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[str] = set()

    def set(self, request_ids: Iterable[str]) -> None:
        """Mark requests as aborted."""
        with self._lock:
            self._ids.update(request_ids)

    def is_set(self, request_id: str) -> bool:
        """Whether the request was aborted."""
        with self._lock:
            return request_id in self._ids

    def clear(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        with self._lock:
            self._ids.difference_update(request_ids)
