"""Which of the running requests were aborted; written by the I/O thread, read between steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class AbortFlags:
    """The aborts of requests that are here, safe to use from two threads.

    A request id may come again once its request has ended: an abort that comes too late must not
    reach its successor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aborted: dict[str, bool] = {}

    def __len__(self) -> int:
        """How many requests are here."""
        return len(self._aborted)

    def expect(self, request_ids: Iterable[str]) -> None:
        """Note requests that have come; only these can be aborted."""
        with self._lock:
            self._aborted.update(dict.fromkeys(request_ids, False))

    def set(self, request_ids: Iterable[str]) -> None:
        """Mark requests as aborted; passes over those that have ended."""
        with self._lock:
            here = self._aborted.keys() & set(request_ids)
            self._aborted.update(dict.fromkeys(here, True))

    def is_set(self, request_id: str) -> bool:
        """Whether the request was aborted."""
        with self._lock:
            return self._aborted.get(request_id, False)

    def clear(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        with self._lock:
            for request_id in request_ids:
                self._aborted.pop(request_id, None)
