"""What the served models can do, asked of the engine once and remembered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.protocol.errors import nearest, shorten
from omni_engine.protocol.plans import PipelineCapabilities

_ASK_AGAIN_S = 1.0
"""How long to wait before asking again for what a loading model can do."""


@dataclass(frozen=True)
class ServedModel:
    """A model as the gateway needs to know it.

    Attributes:
        name: that clients use.
        capabilities: None while it loads for the first time.
        defaults: what requests get that leave sampling parameters out.
        step_execution: whether it runs in step mode.
        state: of its stage when it was last asked for, as in the engine's status.
    """

    name: str
    capabilities: PipelineCapabilities | None
    defaults: Mapping[str, Any]
    step_execution: bool
    state: str = "loading"

    def default(self, field: str) -> Any:
        """Return the value of a sampling parameter that a request leaves out, if it is known."""
        own = {} if self.capabilities is None else self.capabilities.defaults
        return self.defaults.get(field, own.get(field))


class Catalog:
    """The served models, in the engine's order.

    Args:
        client: the connection to the engine.
    """

    def __init__(self, client: AsyncOmniClient) -> None:
        self._client = client
        self._models: dict[str, ServedModel] = {}
        self._asked_at = -float("inf")
        self._asking = asyncio.Lock()

    async def models(self) -> dict[str, ServedModel]:
        """Return the models by name."""
        async with self._asking:
            known = self._models and all(m.capabilities for m in self._models.values())
            if not known and time.monotonic() - self._asked_at >= _ASK_AGAIN_S:
                status = await self._client.status()
                self._models = {m.name: m for m in map(_served, status["stages"])}
                self._asked_at = time.monotonic()
        return self._models

    async def loaded(self, model: ServedModel) -> ServedModel:
        """Return a model once it is known what it can do, or that it can't be loaded."""
        while model.capabilities is None and model.state == "loading":
            await asyncio.sleep(_ASK_AGAIN_S)
            model = (await self.models()).get(model.name, model)
        return model

    async def find(self, name: str | None) -> ServedModel | None:
        """Return a model; without a name the first, as the engine does. None if unknown."""
        models = await self.models()
        return next(iter(models.values()), None) if name is None else models.get(name)


def unknown_model(name: str, models: Iterable[str]) -> GatewayError:
    """Return what to answer when a model is named that is not served."""
    known = set(models)
    close = nearest(name, known)
    hint = f" Did you mean {close!r}?" if close else ""
    message = f"No model {shorten(name)!r} is served. Served: {', '.join(sorted(known))}.{hint}"
    return GatewayError(404, message, "model", "unknown_model")


def _served(stage: Mapping[str, Any]) -> ServedModel:
    told = stage["capabilities"]
    return ServedModel(
        name=stage["name"],
        capabilities=None if told is None else PipelineCapabilities.from_wire(told),
        defaults=stage["default_sampling_params"],
        step_execution=stage["step_execution"],
        state=stage["state"],
    )
