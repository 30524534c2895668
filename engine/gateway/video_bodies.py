"""Reads the body of a request for a video: JSON, or a form with an upload."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.datastructures import UploadFile

from omni_engine.engine.gateway.bodies import PICTURE_BODY_BYTES, form_body, json_body
from omni_engine.engine.gateway.video_schemas import InputReference, VideoRequest

REFERENCE = "input_reference"
_NESTED = frozenset({"lora", "extra_args"})


async def read_request(request: Request) -> tuple[VideoRequest, UploadFile | str | None]:
    """Return what is asked for, and the file or URL of a picture to start from.

    Raises:
        GatewayError: if the body is neither JSON nor a form, or naming the field that is wrong.
    """
    if "json" not in request.headers.get("content-type", ""):
        wanted, given = await form_body(request, VideoRequest, {REFERENCE: 1}, _NESTED)
        return wanted, next(iter(given.get(REFERENCE, ())), None)
    wanted = await json_body(request, VideoRequest, PICTURE_BODY_BYTES)
    source = wanted.input_reference
    return wanted, source.image_url if isinstance(source, InputReference) else source


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
