"""Clients of HTTP that hold connections, send slowly, or take nothing: others are served."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import psutil
import pytest
import uvicorn
from conftest import PATTERN
from fastapi import FastAPI, Request
from http_server import http_server
from starlette.types import Receive, Scope, Send
from test_gateway import call, gateway_of
from waiting import wait_for

from omni_engine.engine.gateway import errors
from omni_engine.engine.gateway.connections import BoundedConnection, most_connections
from omni_engine.engine.gateway.uploads import Uploads

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MUCH = 64 << 20


class Quick(BoundedConnection):
    most: ClassVar[int] = 2
    header_s: ClassVar[float] = 0.3
    stall_s: ClassVar[float] = 0.3


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with a word, or with much at ``/much``."""
    size = MUCH if scope["path"] == "/much" else 5
    head = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    while size > 0:
        part = min(size, 1 << 16)
        await send({"type": "http.response.body", "body": bytes(part), "more_body": size > part})
        size -= part


@contextlib.contextmanager
def serving(app: Any, protocol: type[BoundedConnection]) -> Iterator[tuple[int, uvicorn.Server]]:
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield listener.getsockname()[1], server
        finally:
            server.should_exit = server.force_exit = True
            thread.join(60)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def answer(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


@pytest.fixture(scope="module")
def quick() -> Iterator[tuple[int, uvicorn.Server]]:
    with serving(hello, Quick) as found:
        yield found


@pytest.mark.parametrize("sent", [b"", REQUEST[:-2], REQUEST + REQUEST[:-2]])
def test_who_asks_nothing_is_closed(quick: tuple[int, uvicorn.Server], sent: bytes) -> None:
    port, server = quick
    with connected(port) as connection:
        connection.sendall(sent)
        assert answer(connection).count(b"200 OK") == sent.count(REQUEST)
    wait_for(lambda: not server.server_state.connections)


def test_who_takes_nothing_is_closed(quick: tuple[int, uvicorn.Server]) -> None:
    port, server = quick
    with connected(port) as connection:
        connection.sendall(REQUEST.replace(b"/", b"/much", 1))
        wait_for(lambda: server.server_state.connections)
        wait_for(lambda: not server.server_state.connections)
        assert len(answer(connection)) < MUCH


def test_connections_are_bounded_in_number() -> None:
    class Few(BoundedConnection):
        most: ClassVar[int] = 2

    with serving(hello, Few) as (port, server), contextlib.ExitStack() as idle:
        for _ in range(2):
            idle.enter_context(connected(port))
        wait_for(lambda: len(server.server_state.connections) == 2)
        with connected(port) as refused:
            head, _, body = answer(refused).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        idle.close()
        wait_for(lambda: not server.server_state.connections)
        with connected(port) as served:
            served.sendall(REQUEST)
            assert served.recv(100).startswith(b"HTTP/1.1 200 ")


def receiving(**options: Any) -> FastAPI:
    app = FastAPI()
    errors.install(app)
    app.add_middleware(Uploads, **options)

    @app.post("/")
    async def receive(request: Request) -> int:
        return len(await request.body())

    return app


def upload(port: int, length: int, sent: int) -> socket.socket:
    connection = connected(port)
    head = f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + bytes(sent))
    return connection


def test_a_body_that_does_not_come_on_is_refused() -> None:
    with serving(receiving(most=1 << 20, pause_s=0.2), BoundedConnection) as (port, _):
        with upload(port, 100, 50) as slow:
            assert answer(slow).startswith(b"HTTP/1.1 408 ")
        with upload(port, 50, 50) as served:
            assert answer(served).endswith(b"\r\n\r\n50")


def test_a_body_that_drips_is_refused() -> None:
    with serving(receiving(most=1 << 20, pause_s=1.0, slowest=1e9), BoundedConnection) as (port, _):
        stop = threading.Event()
        with upload(port, 1 << 30, 50) as slow:

            def drip() -> None:
                with contextlib.suppress(OSError):
                    while not stop.wait(0.05):
                        slow.sendall(b"x")

            dripping = threading.Thread(target=drip)
            dripping.start()
            try:
                assert answer(slow).startswith(b"HTTP/1.1 408 ")
            finally:
                stop.set()
                dripping.join(60)


def test_all_bodies_together_are_bounded() -> None:
    app = receiving(most=200_000)
    with serving(app, BoundedConnection) as (port, server):
        with upload(port, 200_000, 199_999):
            large = 150_000

            def refused() -> bool:
                with upload(port, large, large) as other:
                    return answer(other).startswith(b"HTTP/1.1 503 ")

            wait_for(refused)
            with upload(port, 50_000, 50_000) as small:
                assert answer(small).endswith(b"50000")
        wait_for(lambda: not server.server_state.tasks)
        with upload(port, large, large) as served:
            assert answer(served).endswith(b"150000")


def test_connections_leave_half_of_the_descriptors_for_all_else() -> None:
    """Here 100 of 200; what came before them and after them is served."""
    assert most_connections(1 << 20) == 8192
    with http_server("--pipeline", PATTERN, "--name", "pattern") as server:
        psutil.Process(server.process.pid).rlimit(resource.RLIMIT_NOFILE, (200, 200))
        first = gateway_of(server)
        first.kill()
        assert call(f"{server.url}/health")[0] == 200
        assert gateway_of(server).pid != first.pid
        with contextlib.ExitStack() as idle:
            early = idle.enter_context(connected(server.port))
            late = [idle.enter_context(connected(server.port)) for _ in range(110)]

            def refused() -> bool:
                found = select.select(late, [], [], 0)[0]
                return any(one.recv(100).startswith(b"HTTP/1.1 503 ") for one in found)

            wait_for(refused)
            early.sendall(REQUEST.replace(b"/", b"/health", 1))
            assert early.recv(100).startswith(b"HTTP/1.1 200 ")
        wait_for(lambda: gateway_of(server).num_fds() < 100)
        assert call(f"{server.url}/health")[0] == 200
        assert not [line for line in server.errors if "out of system resource" in line]
