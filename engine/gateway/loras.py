"""Adapters over HTTP: list them for everybody; load and unload them, as vLLM does, for admins."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from omni_engine.engine.gateway.auth import require_admin_key, require_key
from omni_engine.engine.gateway.bodies import json_body
from omni_engine.engine.gateway.errors import GatewayError, from_engine
from omni_engine.engine.gateway.openapi import errors_of, takes_json
from omni_engine.engine.gateway.state import Gateway, gateway_of
from omni_engine.engine.gateway.validation import Body
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.lora_info import LoRAInfo

router = APIRouter(prefix="/v1", tags=["adapters"])

GatewayDep = Annotated[Gateway, Depends(gateway_of)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
_REFUSALS = errors_of(400, 401, 403, 404, 413, 415, 422, 429, 500, 503, 504)
_PARAM_BY_FIELD = {"name": "lora_name", "path": "lora_path", "replace": "load_inplace"}


class LoadLora(Body):
    """An adapter to register."""

    lora_name: Annotated[Name, Field(description="What requests will call it.")]
    lora_path: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4096,
            description="A safetensors file inside one of the engine's lora_dirs, or bundled:NAME.",
        ),
    ]
    model: Annotated[str | None, Field(description="The first served one if left out.")] = None
    default_scale: Annotated[float, Field(ge=-100, le=100)] = 1.0
    preload: Annotated[bool, Field(description="Load it on every worker at once.")] = False
    pin: Annotated[bool, Field(description="Never evict it from a device.")] = False
    load_inplace: Annotated[bool, Field(description="The name may be in use.")] = False
    replace: Annotated[bool, Field(description="The same as load_inplace.")] = False


class UnloadLora(Body):
    """An adapter to forget."""

    lora_name: Name
    model: Annotated[str | None, Field(description="The first served one if left out.")] = None


@router.get(
    "/loras", dependencies=[Depends(require_key)], responses=errors_of(401, 403, 404, 500, 503, 504)
)
async def list_loras(
    gateway: GatewayDep, model: Annotated[str | None, Query(description="Of one model.")] = None
) -> dict[str, Any]:
    """List the registered adapters of all models, or of one."""
    models = list(await gateway.catalog.models()) if model is None else [model]
    found = [info for name in models for info in await gateway.client.loras(name)]
    return {"object": "list", "data": [_described(info) for info in found]}


@router.post(
    "/load_lora_adapter",
    dependencies=[Depends(require_admin_key)],
    response_class=PlainTextResponse,
    responses=_REFUSALS,
    openapi_extra=takes_json(LoadLora),
)
async def load_lora_adapter(request: Request, gateway: GatewayDep) -> str:
    """Register an adapter; answers when a worker has checked its file."""
    body = await json_body(request, LoadLora)
    try:
        await gateway.client.load_lora(
            body.lora_name,
            body.lora_path,
            default_scale=body.default_scale,
            preload=body.preload,
            pin=body.pin,
            replace=body.replace or body.load_inplace,
            model=body.model,
        )
    except OmniError as error:
        raise _lora_error(error) from None
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@router.post(
    "/unload_lora_adapter",
    dependencies=[Depends(require_admin_key)],
    response_class=PlainTextResponse,
    responses=_REFUSALS,
    openapi_extra=takes_json(UnloadLora),
)
async def unload_lora_adapter(request: Request, gateway: GatewayDep) -> str:
    """Forget an adapter: new requests that name it are refused, those taken in end under it."""
    body = await json_body(request, UnloadLora)
    try:
        await gateway.client.unload_lora(body.lora_name, model=body.model)
    except OmniError as error:
        raise _lora_error(error) from None
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


def _lora_error(error: OmniError) -> GatewayError:
    """Return an engine's error, naming the field as it is called here."""
    told = from_engine(error)
    return dataclasses.replace(told, param=_PARAM_BY_FIELD.get(told.param or "", told.param))


def _described(info: LoRAInfo) -> dict[str, Any]:
    """Return an adapter for clients, who need not know where on the machine its file is."""
    wire = info.to_wire()
    error = info.error
    wire["error"] = None if error is None else {"code": error.code, "message": error.message}
    del wire["path"]
    return {"id": info.name, "object": "lora", **wire}
