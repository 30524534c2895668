"""Reads the body of a request for a video: JSON, or a form with an upload."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from omni_engine.engine.gateway.bodies import checked_form, form_body, json_body
from omni_engine.engine.gateway.picture_inputs import Pixels
from omni_engine.engine.gateway.picture_sources import picture_from
from omni_engine.engine.gateway.state import Gateway
from omni_engine.engine.gateway.video_schemas import InputReference, VideoRequest

REFERENCE = "input_reference"
_NESTED = frozenset({"lora", "extra_args"})


async def read_request(request: Request, gateway: Gateway) -> tuple[VideoRequest, Pixels | None]:
    """Return what is asked for, and the picture to start from, if there is one.

    Raises:
        GatewayError: if the body is neither JSON nor a form, naming the field that is wrong, or if
            the picture can't be had.
    """
    if "json" in request.headers.get("content-type", ""):
        wanted = await json_body(request, VideoRequest)
        source = wanted.input_reference
        if source is None:
            return wanted, None
        url = source.image_url if isinstance(source, InputReference) else source
        return wanted, await picture_from(gateway, url, REFERENCE)
    form = await form_body(request, {REFERENCE: 1}, _NESTED)
    wanted = checked_form(form, VideoRequest)
    for upload in form.pictures.get(REFERENCE, ()):
        return wanted, await picture_from(gateway, upload, REFERENCE)
    return wanted, None


def request_body() -> dict[str, Any]:
    """Return the OpenAPI description of a body that is JSON or a form with an upload."""
    schema = VideoRequest.schema_for_openapi()
    upload = {
        "type": "string",
        "format": "binary",
        "description": "A picture for models that start from one; or its URL as text.",
    }
    form = {**schema, "properties": {**schema["properties"], REFERENCE: upload}}
    content = {"application/json": schema, "multipart/form-data": form}
    return {
        "required": True,
        "content": {kind: {"schema": described} for kind, described in content.items()},
    }
