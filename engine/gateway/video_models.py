"""Which models make videos; those that still load are waited for."""

from __future__ import annotations

import asyncio

from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import Gateway
from omni_engine.protocol.plans import PipelineCapabilities

_LONGEST_S = 300.0
"""How long a request waits for a model to load: less than clients wait for an answer."""
_LOOK_AGAIN_S = 0.5


async def model_for_videos(
    gateway: Gateway, name: str | None
) -> tuple[ServedModel, PipelineCapabilities]:
    """Return a model that makes videos and what it can do, once it is loaded.

    Args:
        gateway: that serves it.
        name: None for the first model.

    Raises:
        GatewayError: if it is not served, makes pictures, or can't be loaded.
        OmniError: if the engine can't be asked.
    """
    deadline = asyncio.get_running_loop().time() + _LONGEST_S
    while True:
        model = await gateway.catalog.find(name)
        if model is None:
            known = ", ".join(await gateway.catalog.models())
            told = f"No model {name!r} is served. Served: {known}."
            raise GatewayError(404, told, "model", "unknown_model")
        if model.capabilities is not None:
            return model, able_to_make_videos(model.name, model.capabilities)
        if (reason := await _why_down(gateway, model.name)) is not None:
            raise _not_there(model.name, reason)
        if asyncio.get_running_loop().time() > deadline:
            raise _not_there(model.name, "it is still loading, try again later")
        await asyncio.sleep(_LOOK_AGAIN_S)


def able_to_make_videos(name: str, able: PipelineCapabilities) -> PipelineCapabilities:
    """Return what a model can do.

    Raises:
        GatewayError: if it makes pictures.
    """
    if able.makes_video:
        return able
    told = f"The model {name!r} makes pictures, not videos: use POST /v1/images/generations."
    raise GatewayError(400, told, "model")


async def _why_down(gateway: Gateway, name: str) -> str | None:
    models = await gateway.client.models()
    error = next((model["error"] for model in models if model["name"] == name), None)
    return None if error is None else str(error["message"])


def _not_there(name: str, reason: str) -> GatewayError:
    told = f"The model {name!r} is not there: {reason.rstrip('.')}."
    return GatewayError(503, told, "model", "stage_unavailable")
