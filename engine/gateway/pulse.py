"""How the engine does, asked seldom however often somebody wants to know."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.protocol.errors import OmniError

_KEPT_S = 0.5
"""For how long an answer counts."""
_PATIENCE_S = 3.0
"""How long the engine may take to answer."""

Verdict = Literal["ok", "starting", "unhealthy"]


@dataclass(frozen=True)
class Finding:
    """How the engine does.

    Attributes:
        verdict: ``starting`` while a model loads for the first time.
        reason: why it is ``unhealthy`` as a whole; None if it is not.
        health: "healthy", "starting" or "unhealthy" by model.
        states: of the models, as in the engine's status.
    """

    verdict: Verdict
    reason: str | None = None
    health: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)


class Pulse:
    """Asks the engine how it does.

    Args:
        client: the connection to it.
    """

    def __init__(self, client: AsyncOmniClient) -> None:
        self._client = client
        self._asking = asyncio.Lock()
        self._felt: tuple[float, Finding] | None = None

    async def feel(self) -> Finding:
        """Return how the engine does, as of half a second ago at most."""
        async with self._asking:
            if self._felt is None or time.monotonic() - self._felt[0] > _KEPT_S:
                finding = await self._ask()
                self._felt = time.monotonic(), finding
            return self._felt[1]

    async def _ask(self) -> Finding:
        try:
            status = await asyncio.wait_for(self._client.status(), _PATIENCE_S)
        except TimeoutError:
            return Finding("unhealthy", f"the engine has not answered for {_PATIENCE_S:g} s")
        except OmniError as error:
            return Finding("unhealthy", error.message)
        return finding_of(status)


def finding_of(status: dict[str, Any]) -> Finding:
    """Return what an engine's status says of how it does."""
    stages = {stage["name"]: stage for stage in status["stages"]}
    health = {name: stage["health"]["state"] for name, stage in stages.items()}
    states = {name: stage["state"] for name, stage in stages.items()}
    of_stages = {reason for stage in stages.values() for reason in stage["health"]["reasons"]}
    of_engine = [reason for reason in status["health"]["reasons"] if reason not in of_stages]
    if of_engine:
        return Finding("unhealthy", "; ".join(of_engine), health, states)
    if "unhealthy" in health.values():
        return Finding("unhealthy", "a model has no worker that can work", health, states)
    return Finding("starting" if "starting" in health.values() else "ok", None, health, states)
