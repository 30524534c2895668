"""The gateway's process: what to serve comes over standard input; when that ends, so does it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys

import uvicorn

from omni_engine.engine.gateway.app import create_app
from omni_engine.engine.gateway.settings import GatewaySettings
from omni_engine.protocol import pipes
from omni_engine.protocol.logs import start_logging
from omni_engine.protocol.stderr_writer import stderr_writer

_STDIN, _STDOUT = 0, 1
_LAST_WORDS_S = 10
"""How long answers that are under way may take when the gateway ends."""


def main() -> int:
    """Serve HTTP until standard input ends."""
    try:
        settings = GatewaySettings.model_validate(pipes.read_message(_STDIN))
    except EOFError:  # the engine left before it said what to serve
        return 1
    start_logging("gateway", "INFO", stderr_writer())
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = uvicorn.Server(config)
    listener = socket.socket(fileno=settings.listener)
    asyncio.run(_serve(server, listener))
    return 0 if server.started else 1


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        if not os.read(_STDIN, 4096):
            loop.remove_reader(_STDIN)
            server.should_exit = True

    loop.add_reader(_STDIN, on_input)
    told = asyncio.create_task(_tell_when_up(server))
    try:
        await server.serve(sockets=[listener])
    finally:
        told.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await told


async def _tell_when_up(server: uvicorn.Server) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    pipes.write_message(_STDOUT, {"started": True})


if __name__ == "__main__":
    sys.exit(main())
