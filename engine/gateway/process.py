"""The gateway's process: what to serve comes over standard input; when that ends, so does it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from omni_engine.engine.file_limits import raise_file_limit
from omni_engine.engine.gateway.app import create_app
from omni_engine.engine.gateway.connections import BoundedConnection, most_connections
from omni_engine.engine.gateway.launcher import BACKLOG, GOODBYE
from omni_engine.engine.gateway.settings import GatewaySettings
from omni_engine.engine.gateway.state import Gateway
from omni_engine.protocol import pipes
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.logs import start_logging
from omni_engine.protocol.stderr_writer import stderr_writer

logger = logging.getLogger(__name__)

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_LAST_WORDS_S = 10
"""How long answers under way may take once the engine has ended in order."""
_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before those beyond the limit are refused: few, so that they don't
take the last descriptors."""
_ORPHANED_S = 1
"""The same once it was killed: no results come any more."""


def main() -> int:
    """Serve HTTP until standard input ends."""
    try:
        settings = GatewaySettings.model_validate(pipes.read_message(_STDIN))
    except EOFError:  # the engine left before it said what to serve
        return 1
    news = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)  # nobody reads that pipe after the first message
    start_logging("gateway", "INFO", stderr_writer())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    app = create_app(settings)
    most = most_connections(raise_file_limit())
    config = uvicorn.Config(
        app,
        http=type("GatewayConnection", (BoundedConnection,), {"most": most}),
        ws="none",
        backlog=_ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    listener = socket.socket(fileno=settings.listener)
    try:
        asyncio.run(_serve(server, app, listener, news))
    except OmniError as error:  # from the connection to the engine
        logger.error("the HTTP gateway can't reach its engine: %s", error)
    return 0 if server.started else 1


async def _serve(server: uvicorn.Server, app: FastAPI, listener: socket.socket, news: int) -> None:
    loop = asyncio.get_running_loop()
    told_to_end = False

    def on_input() -> None:
        nonlocal told_to_end
        said = os.read(_STDIN, 4096)
        told_to_end = told_to_end or GOODBYE in said
        if not said:
            loop.remove_reader(_STDIN)
            server.config.timeout_graceful_shutdown = _LAST_WORDS_S if told_to_end else _ORPHANED_S
            gateway: Gateway | None = getattr(app.state, "gateway", None)
            if not told_to_end:  # nobody says goodbye to the dead
                _exit_in(2 * _ORPHANED_S, None if gateway is None else gateway.directory)
            if gateway is not None:
                gateway.closing.set()
            server.should_exit = True

    loop.add_reader(_STDIN, on_input)
    announcing = asyncio.create_task(_announce_when_up(server, listener, news))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing


def _exit_in(seconds: float, directory: Path | None) -> None:
    """Remove a directory and end this process then, whatever its loop and its threads do."""

    def leave() -> None:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True  # an end in order need not wait for it
    timer.start()


async def _announce_when_up(server: uvicorn.Server, listener: socket.socket, news: int) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    listener.listen(BACKLOG)  # that many may wait, though fewer are accepted at once
    with contextlib.suppress(BrokenPipeError):  # the engine has gone; standard input tells
        pipes.write_message(news, {"started": True})
    os.close(news)


if __name__ == "__main__":
    sys.exit(main())
