"""Requests that can't be judged yet: their model loads, or their adapters are being checked."""

from __future__ import annotations

from collections.abc import Iterator

from omni_engine.engine.live_request import LiveRequest


class Parking:
    """Keeps requests in the order in which they came until they can be judged."""

    def __init__(self) -> None:
        self._parked: dict[str, LiveRequest] = {}
        self._awaited: dict[str, set[str]] = {}
        self._by_name: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._parked.values())

    def park(self, live: LiveRequest, names: frozenset[str] = frozenset()) -> None:
        """Keep a request.

        Args:
            live: the request.
            names: the adapters whose checks it waits for; none if it waits for the model.
        """
        request_id = live.request_id
        self._parked[request_id] = live
        self._awaited[request_id] = set(names)
        for name in names:
            self._by_name.setdefault(name, {})[request_id] = None

    def leave(self, request_id: str) -> bool:
        """Let a request go for good; False if it is not here."""
        if self._parked.pop(request_id, None) is None:
            return False
        for name in self._awaited.pop(request_id):
            of_name = self._by_name[name]
            del of_name[request_id]
            if not of_name:
                del self._by_name[name]
        return True

    def release(self, name: str) -> list[LiveRequest]:
        """Return the requests that wait for nothing more once an adapter's check has ended."""
        free = []
        for request_id in self._by_name.pop(name, {}):
            awaited = self._awaited[request_id]
            awaited.discard(name)
            if not awaited:
                free.append(self._parked.pop(request_id))
                del self._awaited[request_id]
        return free

    def release_all(self) -> list[LiveRequest]:
        """Return all requests: their model is there."""
        free = list(self._parked.values())
        self._parked.clear()
        self._awaited.clear()
        self._by_name.clear()
        return free
