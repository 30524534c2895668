"""``POST /v1/images/edits``: pictures from words and pictures."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.bodies import form_body
from omni_engine.engine.gateway.byte_budget import Lease
from omni_engine.engine.gateway.disconnects import while_connected
from omni_engine.engine.gateway.edit_inputs import PICTURE_FIELDS, check_given, decoded, size_like
from omni_engine.engine.gateway.image_jobs import (
    ImageJob,
    caller_id,
    check_background,
    checked_params,
    model_for_pictures,
)
from omni_engine.engine.gateway.image_results import ImagesAnswer
from omni_engine.engine.gateway.image_schemas import ImageEditRequest
from omni_engine.engine.gateway.images import respond
from omni_engine.engine.gateway.openapi import errors_of_requests, event_stream, takes_form
from omni_engine.engine.gateway.state import Gateway, gateway_of, lease_of

router = APIRouter(prefix="/v1/images", tags=["images"], dependencies=[Depends(require_key)])

_NESTED = frozenset({"lora", "extra_args", "stream_options"})
_PICTURES = {
    "image": "The picture to change: PNG, JPEG or WebP, or its URL as text. Repeat the field, or "
    "call it `image[]`, for models that take several.",
    "mask": "What to change: where it is transparent, or white if nothing in it is transparent. "
    "As large as the picture.",
    "control_image": "What guides models that take one.",
}


@router.post(
    "/edits",
    response_class=Response,
    responses={
        **event_stream(
            ImagesAnswer,
            "The pictures. With `stream`: `image_edit.partial_image` and `image_edit.completed` "
            "events, and `error` if it fails midway.",
        ),
        **errors_of_requests(),
    },
    openapi_extra=takes_form(ImageEditRequest, _PICTURES, ["image"]),
)
async def edit_images(
    request: Request,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    lease: Annotated[Lease, Depends(lease_of)],
) -> Response:
    """Change a picture. Mappings (`lora`, `extra_args`, `stream_options`) are JSON texts."""
    fields, given = await form_body(request, ImageEditRequest, PICTURE_FIELDS, _NESTED)
    finding = model_for_pictures(gateway, fields, loaded=True)
    model = await while_connected(request.receive, finding)
    check_background(fields, model)
    check_given(given, model)
    inputs = await while_connected(request.receive, decoded(gateway, given, model, lease))
    like_input = size_like(inputs, model, gateway.limits.max_side)
    params = await checked_params(gateway, fields, **_more(fields, like_input))
    job = ImageJob(fields, model, params, inputs, caller_id(request))
    return await respond(request, gateway, job, "image_edit")


def _more(fields: ImageEditRequest, like_input: tuple[int, int] | None) -> dict[str, Any]:
    more: dict[str, Any] = {"strength": fields.strength}
    if fields.height_and_width is None and like_input is not None:
        more["height"], more["width"] = like_input
    return more
