"""``POST /v1/images/generations``: pictures from words."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.bodies import json_body
from omni_engine.engine.gateway.disconnects import while_connected
from omni_engine.engine.gateway.image_answers import answer, base64_picture, seed_of
from omni_engine.engine.gateway.image_jobs import (
    ImageJob,
    caller_id,
    check_background,
    checked_params,
    model_for_pictures,
    pictures_of,
)
from omni_engine.engine.gateway.image_results import ImagesAnswer
from omni_engine.engine.gateway.image_schemas import ImageGenerationRequest
from omni_engine.engine.gateway.openapi import errors_of_requests, event_stream, takes_json
from omni_engine.engine.gateway.picture_encoding import encode_picture
from omni_engine.engine.gateway.state import Gateway, gateway_of
from omni_engine.engine.gateway.streaming import image_stream

router = APIRouter(prefix="/v1/images", tags=["images"], dependencies=[Depends(require_key)])


@router.post(
    "/generations",
    response_class=Response,
    responses={
        **event_stream(
            ImagesAnswer,
            "The pictures. With `stream`: `image_generation.partial_image` and "
            "`image_generation.completed` events, and `error` if it fails midway.",
        ),
        **errors_of_requests(),
    },
    openapi_extra=takes_json(ImageGenerationRequest),
)
async def create_images(
    request: Request, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> Response:
    """Draw one or several pictures."""
    fields = await json_body(request, ImageGenerationRequest)
    model = await while_connected(request.receive, model_for_pictures(gateway, fields))
    check_background(fields, model)
    params = await checked_params(gateway, fields)
    job = ImageJob(fields, model, params, request_id=caller_id(request))
    return await respond(request, gateway, job, "image_generation")


async def respond(request: Request, gateway: Gateway, job: ImageJob, events: str) -> Response:
    """Run a job and answer with its pictures.

    Args:
        request: whose client waits; if it goes away, the job is aborted.
        gateway: that runs it.
        job: what to run.
        events: the start of the names of a stream's events.

    Raises:
        GatewayError: if it can't be run, or fails.
        OmniError: if the engine refuses it.
    """
    if job.fields.stream:
        return await image_stream(request, gateway, job, events)
    started = time.monotonic()
    handle = await job.submit(gateway)
    refused = handle.done  # it may bear the id of another, which goes on if this client goes
    waiting = handle.result()
    output = await (waiting if refused else while_connected(request.receive, waiting))
    pictures = pictures_of(output, job)
    items = await asyncio.gather(*(_item(request, gateway, job, picture) for picture in pictures))
    for index, item in enumerate(items):
        item["seed"] = seed_of(output, index)
    body = await gateway.encoders.run(json.dumps, answer(output, job, list(items), pictures[0]))
    took_ms = round(1000 * (time.monotonic() - started))
    headers = {"x-request-id": output.request_id, "openai-processing-ms": str(took_ms)}
    return Response(body, media_type="application/json", headers=headers)


async def _item(request: Request, gateway: Gateway, job: ImageJob, picture: Any) -> dict[str, Any]:
    if job.fields.response_format != "url":
        return {"b64_json": await gateway.encoders.run(base64_picture, picture, job)}
    how = job.fields.picture_format
    name = gateway.files.keep(
        await gateway.encoders.run(encode_picture, picture, how), how.media_type
    )
    return {"url": str(request.url_for("kept_file", name=name))}
