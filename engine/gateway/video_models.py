"""Which models make videos; those that still load are waited for."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED

from omni_engine.engine.gateway.catalog import ServedModel, unknown_model
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import Gateway
from omni_engine.protocol.plans import PipelineCapabilities

_LONGEST_S = 300.0
"""How long a request waits for a model to load: less than clients wait for an answer."""


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
    found = await gateway.catalog.find(name)
    if found is None:
        raise unknown_model(name or "", await gateway.catalog.models())
    loading = asyncio.ensure_future(gateway.catalog.loaded(found))
    ending = asyncio.ensure_future(gateway.closing.wait())
    try:
        await asyncio.wait({loading, ending}, timeout=_LONGEST_S, return_when=FIRST_COMPLETED)
        if not loading.done():
            raise _not_there(found.name, "it is still loading, try again later")
        model = loading.result()
    finally:
        loading.cancel()
        ending.cancel()
    if model.capabilities is None:
        raise _not_there(model.name, await _why_down(gateway, model.name))
    return model, able_to_make_videos(model.name, model.capabilities)


def able_to_make_videos(name: str, able: PipelineCapabilities) -> PipelineCapabilities:
    """Return what a model can do.

    Raises:
        GatewayError: if it makes pictures.
    """
    if able.makes_video:
        return able
    told = f"The model {name!r} makes pictures, not videos: use POST /v1/images/generations."
    raise GatewayError(400, told, "model")


async def _why_down(gateway: Gateway, name: str) -> str:
    models = await gateway.client.models()
    error = next((model["error"] for model in models if model["name"] == name), None)
    return "it could not be loaded" if error is None else str(error["message"])


def _not_there(name: str, reason: str) -> GatewayError:
    told = f"The model {name!r} is not there: {reason.rstrip('.')}."
    return GatewayError(503, told, "model", "stage_unavailable")
