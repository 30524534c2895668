"""What a request for a video asks the engine for: frames, rate, sampling parameters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.image_schemas import PASSED_ON
from omni_engine.engine.gateway.video_schemas import (
    FASTEST_FPS,
    SLOWEST_FPS,
    VideoRequest,
)
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

DEFAULT_FPS = 16.0
"""Of models that tell none."""

_RATE_ARGUMENT = "frame_rate"
"""What pipelines that are told the rate call it, if not ``fps``: LTX's do."""
_DEFAULT_OF_RATE_ARGUMENT = 25.0
"""LTX's own."""


@dataclass(frozen=True)
class VideoPlan:
    """What the engine is asked for.

    Attributes:
        params: sampling parameters.
        fps: frames per second of the file.
        num_frames: as far as it is known before the video is made.
        size: height and width, as far as known.
    """

    params: OmniDiffusionSamplingParams
    fps: float
    num_frames: int | None
    size: tuple[int, int] | None


def plan_of(request: VideoRequest, model: ServedModel, able: PipelineCapabilities) -> VideoPlan:
    """Return what to ask the engine for.

    Args:
        request: what is wanted.
        model: that is to make it.
        able: what the model can do.

    Raises:
        GatewayError: naming the field, for what can't be.
        OmniError: for values that the engine would refuse by themselves.
    """
    extra_args: dict[str, Any] = dict(request.extra_args or {})
    fps = _fps(request, model, able)
    if _RATE_ARGUMENT in able.extra_args:
        extra_args[_RATE_ARGUMENT] = fps
    num_frames = _num_frames(request, fps)
    size = request.height_and_width
    params = OmniDiffusionSamplingParams(
        height=None if size is None else size[0],
        width=None if size is None else size[1],
        num_frames=num_frames,
        fps=fps if "fps" in able.sampling_fields else None,
        lora_request=request.lora_request,
        extra_args=extra_args,
        **{name: getattr(request, name) for name in PASSED_ON},
    )
    height, width = size or (model.default("height"), model.default("width"))
    return VideoPlan(
        params,
        fps,
        num_frames or model.default("num_frames"),
        (height, width) if height and width else None,
    )


def _fps(request: VideoRequest, model: ServedModel, able: PipelineCapabilities) -> float:
    """Return the rate: the request's, else the model's, else one that is usual."""
    in_extra = (request.extra_args or {}).get(_RATE_ARGUMENT)
    if in_extra is None:
        if request.fps is not None:
            return request.fps
        own = model.default("fps")
        if own is None and _RATE_ARGUMENT in able.extra_args:
            own = (model.default("extra_args") or {}).get(_RATE_ARGUMENT, _DEFAULT_OF_RATE_ARGUMENT)
        return DEFAULT_FPS if own is None else min(max(float(own), SLOWEST_FPS), FASTEST_FPS)
    rate = in_extra if isinstance(in_extra, int | float) else float("nan")
    if not SLOWEST_FPS <= rate <= FASTEST_FPS or request.fps not in (None, rate):
        raise GatewayError(
            400,
            f"extra_args.{_RATE_ARGUMENT} is the frames per second, {SLOWEST_FPS:g} to "
            f"{FASTEST_FPS:g}: give it, or fps, or both with one value.",
            f"extra_args.{_RATE_ARGUMENT}",
        )
    return float(rate)


def _num_frames(request: VideoRequest, fps: float) -> int | None:
    if request.seconds is None:
        return request.num_frames
    wanted = max(1, round(request.seconds * fps))
    if request.num_frames not in (None, wanted):
        raise GatewayError(
            400,
            f"{request.seconds:g} seconds of {fps:g} frames each are {wanted} frames, and "
            f"num_frames is {request.num_frames}: give one of the two.",
            "num_frames",
        )
    return wanted
