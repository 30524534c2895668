"""``/v1/models``: what is served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.catalog import ServedModel, unknown_model
from omni_engine.engine.gateway.openapi import errors_of
from omni_engine.engine.gateway.state import Gateway, gateway_of

router = APIRouter(prefix="/v1", tags=["models"], dependencies=[Depends(require_key)])


class Model(BaseModel):
    """A served model; what it can do is not known while it loads for the first time.

    Attributes:
        defaults: sampling parameters of requests that leave them out.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "omni-engine"
    pipeline: str | None
    makes: Literal["image", "video"] | None
    inputs: list[str] | None
    required_inputs: list[str] | None
    size_multiple: int | None
    makes_previews: bool | None
    makes_transparency: bool | None
    step_execution: bool
    defaults: dict[str, Any]


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/models", responses=errors_of(401, 403, 503))
async def list_models(gateway: Annotated[Gateway, Depends(gateway_of)]) -> ModelList:
    """List the served models."""
    models = await gateway.catalog.models()
    return ModelList(data=[_described(model, gateway) for model in models.values()])


@router.get("/models/{model:path}", responses=errors_of(401, 403, 404, 503))
async def retrieve_model(model: str, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Model:
    """Describe a served model."""
    models = await gateway.catalog.models()
    if model not in models:
        raise unknown_model(model, models)
    return _described(models[model], gateway)


def _described(model: ServedModel, gateway: Gateway) -> Model:
    able = model.capabilities
    return Model(
        id=model.name,
        created=int(gateway.started),
        pipeline=None if able is None else able.pipeline,
        makes=None if able is None else ("video" if able.makes_video else "image"),
        inputs=None if able is None else sorted(able.inputs),
        required_inputs=None if able is None else sorted(able.required_inputs),
        size_multiple=None if able is None else able.size_multiple,
        makes_previews=None if able is None else able.makes_previews,
        makes_transparency=None if able is None else able.makes_transparency,
        step_execution=model.step_execution,
        defaults=dict(model.defaults),
    )
