"""Connections over HTTP: bounded in number, and none is held by who sends or takes nothing."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Retry-After: 5\r\nContent-Length: %d\r\n\r\n%s"
)
_TOLD = (
    b'{"error": {"message": "The server has too many connections.", "type": "server_error", '
    b'"param": null, "code": "too_many_connections"}}'
)
_MOST = 8192


def most_connections(file_limit: int) -> int:
    """Return how many connections there may be; the other half of the files is for all else.

    Args:
        file_limit: how many files the process may have open.
    """
    return min(_MOST, file_limit // 2)


class BoundedConnection(H11Protocol):
    """A connection that is refused if there are too many, and closed if its client stands still.

    Attributes:
        most: connections at a time.
        header_s: how long a request's header may take, from the connection or the answer before.
        stall_s: how long a client may take none of what is sent to it.
    """

    most: ClassVar[int] = _MOST
    header_s: ClassVar[float] = 30.0
    stall_s: ClassVar[float] = 60.0

    _look: asyncio.TimerHandle | None = None
    _header_since = _taken_since = 0.0
    _untaken = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or refuse to."""
        super().connection_made(transport)
        self._header_since = self._taken_since = self.loop.time()
        self._look_soon()
        if len(self.connections) > self.most:
            transport.write(_REFUSAL % (len(_TOLD), _TOLD))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._header_since = self.loop.time()
        super().on_response_complete()

    def _look_soon(self) -> None:
        every_s = min(self.header_s, self.stall_s) / 6
        self._look = self.loop.call_later(every_s, self._look_after_it)

    def _look_after_it(self) -> None:
        now, untaken = self.loop.time(), self.transport.get_write_buffer_size()
        if not 0 < self._untaken <= untaken:
            self._taken_since = now
        self._untaken = untaken
        no_request = self.cycle is None or self.cycle.response_complete
        silent = no_request and not untaken and now - self._header_since > self.header_s
        if silent or now - self._taken_since > self.stall_s:
            self.transport.abort()
        else:
            self._look_soon()
