"""Work for a client that may go away: then it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from omni_engine.engine.gateway.errors import client_gone

T = TypeVar("T")


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client has gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return what comes of work, or cancel it when the client has gone.

    Args:
        receive: of a request whose body has been read.
        work: what the client waits for.

    Raises:
        GatewayError: if the client has gone; nobody will read the answer.
    """
    doing = asyncio.ensure_future(work)
    watching = asyncio.create_task(until_disconnected(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise client_gone()
    finally:
        doing.cancel()
        watching.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)
