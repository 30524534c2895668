"""What the routes share: the connection to the engine, the settings, the threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fastapi import Request

from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.engine.gateway.byte_budget import ByteBudget, Lease
from omni_engine.engine.gateway.catalog import Catalog
from omni_engine.engine.gateway.encoders import EncoderPool
from omni_engine.engine.gateway.kept_files import KeptFiles
from omni_engine.engine.gateway.pulse import Pulse
from omni_engine.stages.config import HttpArgs, Limits

_LARGEST_AT_ONCE = 4
"""How many of the largest requests may have their pictures in memory at a time."""


@dataclass
class Gateway:
    """What the routes share.

    Attributes:
        client: the connection to the engine.
        catalog: what the served models can do.
        http: the deploy file's section.
        limits: the engine's.
        encoders: threads for work that would hold up the event loop.
        directory: this process's own, for files; it is removed at its end.
        files: pictures that were asked for as URLs.
        decoded: room for the pictures of requests, decoded.
        pulse: tells how the engine does.
        started: when this process began: unix seconds.
        closing: set when the process is about to end: streams without an end must end then.
    """

    client: AsyncOmniClient
    catalog: Catalog
    http: HttpArgs
    limits: Limits
    encoders: EncoderPool
    directory: Path
    files: KeptFiles = field(init=False)
    decoded: ByteBudget = field(init=False)
    pulse: Pulse = field(init=False)
    started: float = field(default_factory=time.time)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.files = KeptFiles(self.http.max_kept_bytes, self.http.result_ttl_s)
        self.decoded = ByteBudget(_LARGEST_AT_ONCE * self.limits.max_message_bytes)
        self.pulse = Pulse(self.client)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that a request came to; a dependency for routes."""
    return cast("Gateway", request.app.state.gateway)


async def lease_of(request: Request) -> AsyncIterator[Lease]:
    """Lend a request room for its pictures until its answer is sent; a dependency for routes."""
    lease = Lease(gateway_of(request).decoded)
    try:
        yield lease
    finally:
        lease.end()
