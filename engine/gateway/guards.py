"""What every request passes first: the size of its body, and where a browser sends it from."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.host_check import HostCheck
from omni_engine.stages.config import HttpArgs


def install(app: FastAPI, http: HttpArgs) -> None:
    """Put the guards before the routes."""
    app.add_middleware(BodyLimit, most=http.max_body_bytes)
    app.add_middleware(OriginCheck, allowed=frozenset(http.cors_origins))
    if http.api_key is None:  # other sites' pages don't have it
        app.add_middleware(HostCheck, http=http)
    if http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(http.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's client sends a dozen of its own
            expose_headers=["X-Request-Id", "Retry-After"],
        )


class BodyLimit:
    """Refuses bodies that are too large, told so in their header or not.

    Args:
        app: what comes next.
        most: bytes that a body may have.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        told = Headers(scope=scope).get("content-length", "0")
        if told.isdecimal() and int(told) > self._most:
            return await self._too_large().response()(scope, receive, send)
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> GatewayError:
        return GatewayError(
            413,
            f"The request's body is larger than {self._most} bytes (http.max_body_bytes).",
            code="message_too_large",
            headers={"Connection": "close"},
        )


class OriginCheck:
    """Refuses what other sites' pages make a browser send, unless their origin is allowed.

    Args:
        app: what comes next.
        allowed: origins such as ``https://example.org``; ``*`` is all.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._may_call(origin, headers.get("host", "")):
                refusal = GatewayError(
                    403,
                    f"Pages of {origin} may not call this server (http.cors_origins).",
                    code="origin_refused",
                )
                return await refusal.response()(scope, receive, send)
        await self._app(scope, receive, send)

    def _may_call(self, origin: str, host: str) -> bool:
        if {origin, "*"} & self._allowed:
            return True
        try:
            return urlsplit(origin).netloc == host
        except ValueError:
            return False
