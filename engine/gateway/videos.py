"""``/v1/videos``: have videos made, ask how far they are, fetch them, forget them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response

from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.byte_budget import Lease
from omni_engine.engine.gateway.disconnects import while_connected
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.image_jobs import caller_id
from omni_engine.engine.gateway.image_results import AppliedLora, Metrics
from omni_engine.engine.gateway.openapi import errors_of, errors_of_requests
from omni_engine.engine.gateway.picture_sources import pictures_from
from omni_engine.engine.gateway.state import Gateway, gateway_of, lease_of
from omni_engine.engine.gateway.video_bodies import REFERENCE, read_request, request_body
from omni_engine.engine.gateway.video_job import VideoJob
from omni_engine.engine.gateway.video_jobs import VideoJobs, video_error
from omni_engine.engine.gateway.video_models import model_for_videos
from omni_engine.engine.gateway.video_requests import plan_of
from omni_engine.engine.gateway.video_schemas import (
    Video,
    VideoDeleted,
    VideoError,
    VideoList,
)
from omni_engine.protocol.errors import OmniError

_VIDEO_NAME = "video.mp4"


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.video_jobs = VideoJobs(app.state.gateway)
    try:
        yield
    finally:
        await app.state.video_jobs.close()


router = APIRouter(
    prefix="/v1/videos", tags=["videos"], dependencies=[Depends(require_key)], lifespan=_lifespan
)


def jobs_of(request: Request) -> VideoJobs:
    """Return the videos of the gateway that a request came to; a dependency for routes."""
    return cast("VideoJobs", request.app.state.video_jobs)


Jobs = Annotated[VideoJobs, Depends(jobs_of)]


@router.post("", openapi_extra={"requestBody": request_body()}, responses=errors_of_requests())
async def create_video(
    request: Request,
    jobs: Jobs,
    gateway: Annotated[Gateway, Depends(gateway_of)],
    lease: Annotated[Lease, Depends(lease_of)],
) -> Video:
    """Have a video made.

    The answer comes as soon as the engine has taken the job in; ask for it by its id until its
    status is `completed` or `failed`, then fetch its content.
    """
    wanted, source = await read_request(request)
    finding = model_for_videos(gateway, wanted.model)
    model, able = await while_connected(request.receive, finding)
    if source is not None and "image" not in able.inputs:
        told = f"The model {model.name!r} makes videos from text alone: it takes no picture."
        raise GatewayError(400, told, REFERENCE)
    if source is None and "image" in able.required_inputs:
        told = f"The model {model.name!r} starts from a picture: give one as input_reference."
        raise GatewayError(400, told, REFERENCE)
    try:
        if wanted.is_light:
            plan = plan_of(wanted, model, able)
        else:
            plan = await gateway.encoders.run(plan_of, wanted, model, able)
        inputs: dict[str, Any] = {}
        if source is not None:
            reading = pictures_from(gateway, [(REFERENCE, source)], lease)
            (inputs["image"],) = await while_connected(request.receive, reading)
        name = caller_id(request)
        job = await jobs.submit(wanted.prompt, inputs, model.name, plan, name)
    except OmniError as error:
        raise video_error(error) from None
    return described(job)


@router.get("", responses=errors_of(400, 401, 403, 404))
async def list_videos(
    jobs: Jobs,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    """List videos, the newest first unless the order is `asc`."""
    found, has_more = jobs.page(after, limit, newest_first=order == "desc")
    return VideoList(
        data=[described(job) for job in found],
        first_id=found[0].video_id if found else None,
        last_id=found[-1].video_id if found else None,
        has_more=has_more,
    )


@router.get("/{video_id}", responses=errors_of(401, 403, 404))
async def retrieve_video(video_id: str, jobs: Jobs) -> Video:
    """Tell how far a video is."""
    return described(jobs.find(video_id))


@router.delete("/{video_id}", responses=errors_of(401, 403, 404))
async def delete_video(video_id: str, jobs: Jobs) -> VideoDeleted:
    """Forget a video; one in the making is aborted, and frees its device at the next step."""
    jobs.delete(video_id)
    return VideoDeleted(id=video_id)


@router.get(
    "/{video_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"video/mp4": {}, "image/webp": {}}, "description": "The file."},
        206: {"content": {"video/mp4": {}}, "description": "The part of it that was asked for."},
        **errors_of(400, 401, 403, 404, 409, 416),
    },
)
async def download_video(
    video_id: str,
    jobs: Jobs,
    variant: Annotated[
        Literal["video", "thumbnail", "spritesheet"],
        Query(description="The MP4 file, or its first frame as a WebP picture."),
    ] = "video",
) -> Response:
    """Fetch a video that is completed, or parts of it by the `Range` header."""
    job = jobs.find(video_id)
    if variant == "spritesheet":
        told = "Sprite sheets are not made: ask for the variant video or thumbnail."
        raise GatewayError(400, told, "variant")
    if job.error is not None:
        raise GatewayError(404, f"The video failed: {job.error.message}", code="video_failed")
    if job.file is None:
        told = f"The video is {job.status}, {job.progress} %: wait until it is completed."
        raise GatewayError(409, told, code="video_not_ready", headers={"Retry-After": "1"})
    headers = {"Cache-Control": "private, no-store"}
    if variant == "thumbnail":
        return Response(job.thumbnail, headers=headers, media_type="image/webp")
    headers["Content-Disposition"] = f'inline; filename="{_VIDEO_NAME}"'
    return job.file.response("video/mp4", headers)


def described(job: VideoJob) -> Video:
    """Return a video as its clients see it."""
    output, error = job.output, job.error
    size = job.size
    return Video(
        id=job.video_id,
        model=job.model,
        status=job.status,
        progress=job.progress,
        created_at=job.created_at,
        completed_at=job.completed_at,
        expires_at=job.expires_at,
        size="auto" if size is None else f"{size[1]}x{size[0]}",
        seconds="auto" if job.num_frames is None else f"{job.num_frames / job.plan.fps:g}",
        prompt=job.prompt,
        error=error and VideoError(code=str(error.code), message=error.message, param=error.param),
        request_id=job.request_id,
        fps=job.plan.fps,
        num_frames=job.num_frames,
        seed=job.plan.params.seed if output is None else output.seed,
        applied_loras=[
            AppliedLora(**dataclasses.asdict(lora))
            for lora in (output.applied_loras if output else ())
        ],
        metrics=output and Metrics(**dataclasses.asdict(output.metrics)),
    )
