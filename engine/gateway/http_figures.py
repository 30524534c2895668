"""The gateway's own figures and access log: HTTP requests, and what its threads encode."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_engine.engine.gateway.errors import CLIENT_CLOSED_REQUEST

logger = logging.getLogger(__name__)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"
_BOUNDS = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class HttpFigures:
    """Counts what one gateway does.

    Attributes:
        requests: answered requests.
        seconds: from a request's arrival until its answer's end.
        in_flight: requests that are being answered.
        encode_seconds: what calls of the encoder threads took.
    """

    def __init__(self) -> None:
        self.requests = Counter(
            "omni_http_requests", "HTTP requests answered; status 499: the client left before.",
            ("route", "method", "status"), registry=None,
        )  # fmt: skip
        self.seconds = Histogram(
            "omni_http_request_duration_seconds", "From a request's arrival to its answer's end.",
            ("route", "method"), registry=None, buckets=_BOUNDS,
        )  # fmt: skip
        self.in_flight = Gauge(
            "omni_http_in_flight", "HTTP requests that are being answered.", registry=None
        )
        self.encode_seconds = Histogram(
            "omni_encode_seconds", "Calls that encode, decode or read pictures, videos and files.",
            registry=None, buckets=_BOUNDS,
        )  # fmt: skip

    def collectors(self) -> Iterator[Collector]:
        """Yield everything that is counted, for a registry."""
        yield from (self.requests, self.seconds, self.in_flight, self.encode_seconds)


class HttpMeter:
    """Counts and logs every HTTP request that passes, and how long its answer takes.

    Args:
        app: what comes next.
        figures: where to count.
    """

    def __init__(self, app: ASGIApp, figures: HttpFigures) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = str(CLIENT_CLOSED_REQUEST), time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        self._figures.in_flight.inc()
        try:
            await self._app(scope, receive, noting)
        except Exception:  # boundary: counted here, answered by the server around it
            status = "500"
            raise
        finally:
            self._figures.in_flight.dec()
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._figures.requests.labels(route, method, status).inc()
            elapsed = time.perf_counter() - began
            self._figures.seconds.labels(route, method).observe(elapsed)
            _log(scope, status, elapsed)
        return None


def _log(scope: Scope, status: str, elapsed_s: float) -> None:
    """Write the access log's line."""
    address = scope.get("client") or ("", 0)
    fields = {
        "event": "http_request",
        "method": scope["method"],
        "path": scope["path"],
        "status": int(status),
        "ms": round(1000 * elapsed_s, 3),
        "address": address[0],
    }
    line = "%(method)s %(path)s from %(address)s: %(status)d, %(ms).1f ms"
    logger.debug(line, fields, extra=fields)
