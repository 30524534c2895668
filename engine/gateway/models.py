"""``/v1/models``: what is served."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import Gateway, gateway_of

router = APIRouter(prefix="/v1", tags=["models"], dependencies=[Depends(require_key)])


@router.get("/models")
async def list_models(gateway: Annotated[Gateway, Depends(gateway_of)]) -> dict[str, Any]:
    """List the served models."""
    models = await gateway.catalog.models()
    return {"object": "list", "data": [_described(m, gateway) for m in models.values()]}


@router.get("/models/{model:path}")
async def retrieve_model(
    model: str, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> dict[str, Any]:
    """Describe a served model."""
    found = await gateway.catalog.find(model)
    if found is None:
        raise GatewayError(404, f"No model {model!r} is served.", "model", "unknown_model")
    return _described(found, gateway)


_SHOWN_DEFAULTS = (
    "width",
    "height",
    "num_frames",
    "fps",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "negative_prompt",
)


def _described(model: ServedModel, gateway: Gateway) -> dict[str, Any]:
    able = model.capabilities
    return {
        "id": model.name,
        "object": "model",
        "created": int(gateway.started),
        "owned_by": "omni-engine",
        "pipeline": None if able is None else able.pipeline,
        "makes": None if able is None else ("video" if able.makes_video else "image"),
        "inputs": None if able is None else sorted(able.inputs),
        "required_inputs": None if able is None else sorted(able.required_inputs),
        "size_multiple": None if able is None else able.size_multiple,
        "defaults": {name: model.default(name) for name in _SHOWN_DEFAULTS},
        "step_execution": model.step_execution,
    }
