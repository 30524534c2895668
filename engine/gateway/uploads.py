"""Bodies on their way in: none may stand still, and all together are bounded."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.stages.config import Limits

_SMALL = 64 << 10
"""Bytes of a body that always find room."""
_LARGEST_AT_ONCE = 4


def install(app: FastAPI, limits: Limits) -> None:
    """Watch the bodies of an application; together they may have those of a few large messages."""
    app.add_middleware(Uploads, most=_LARGEST_AT_ONCE * limits.max_message_bytes)


class Uploads:
    """Refuses bodies that don't come on, and those that there is no room for.

    Args:
        app: what comes next.
        most: bytes that the bodies of all requests under way may have together.
        pause_s: how long nothing of a body may come.
        slowest: bytes a second that it must have on average once it is late.
    """

    def __init__(
        self, app: ASGIApp, most: int, pause_s: float = 30.0, slowest: float = 1024.0
    ) -> None:
        self._app, self._most, self._pause_s, self._slowest = app, most, pause_s, slowest
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        loop = asyncio.get_running_loop()
        began, received, held, complete = loop.time(), 0, 0, False

        async def watched() -> Message:
            nonlocal received, held, complete
            if complete:
                return await receive()
            until = began + self._pause_s + received / self._slowest
            try:
                async with asyncio.timeout(min(self._pause_s, until - loop.time())):
                    message = await receive()
            except TimeoutError:
                raise _too_slow() from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            more = max(0, received - _SMALL) - held
            if self._held + more > self._most:
                raise _no_room()
            self._held += more
            held += more
            return message

        try:
            await self._app(scope, watched, send)
        finally:
            self._held -= held


def _too_slow() -> GatewayError:
    return GatewayError(
        408,
        "The request's body came too slowly, or not at all.",
        code="upload_too_slow",
        headers={"Connection": "close"},
    )


def _no_room() -> GatewayError:
    return GatewayError(
        503,
        "Too much is being uploaded at this moment. Try again later.",
        code="too_many_uploads",
        headers={"Connection": "close", "Retry-After": "5"},
    )
