"""What a request may ask for at most: the engine's limits, and those of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omni_engine.protocol.errors import LimitExceededError
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.config import EngineArgs, Limits

MAX_INPUT_PICTURES = 32
"""Input pictures of one request, all inputs together."""

_PIXELS_IN_ALL = "num_outputs_per_prompt x height x width x num_frames"


def work_of(params: OmniDiffusionSamplingParams) -> int:
    """Return rows x pixels x frames; what is not known counts as 1."""
    pixels = (params.height or 1) * (params.width or 1) * (params.num_frames or 1)
    return (params.num_outputs_per_prompt or 1) * pixels


def beyond_limits(
    limits: Limits, arguments: EngineArgs, params: OmniDiffusionSamplingParams
) -> Iterator[LimitExceededError]:
    """Yield an error for everything that effective parameters ask too much of.

    Args:
        limits: the engine's.
        arguments: the stage's settings, which bound a batch.
        params: with every default filled in.
    """
    for field, value, most, unit in _bounded(limits, params):
        if value is not None and value > most:
            yield _beyond(field, value, most, unit)
    rows, work = params.num_outputs_per_prompt or 1, work_of(params)
    if arguments.max_batch_rows is not None and rows > arguments.max_batch_rows:
        yield LimitExceededError(
            "the request makes more pictures than a batch may hold",
            field="num_outputs_per_prompt",
            value=rows,
            expected=f"at most {arguments.max_batch_rows} (max_batch_rows)",
        )
    if arguments.max_batch_work is not None and work > arguments.max_batch_work:
        yield LimitExceededError(
            "the request is larger than a batch may be",
            value=work,
            field=_PIXELS_IN_ALL,
            expected=f"at most {arguments.max_batch_work} (max_batch_work)",
        )


def check_given(limits: Limits, request: DiffusionRequest) -> None:
    """Refuse a prompt that is too long, and input pictures that are too large or too many.

    Raises:
        LimitExceededError: naming the prompt, or the input and which of its pictures.
    """
    if len(request.prompt) > limits.max_prompt_chars:
        raise _beyond("prompt", len(request.prompt), limits.max_prompt_chars, " characters")
    count = 0
    for where, picture in _pictures(request.multi_modal_data):
        count += 1
        height, width = picture.shape[:2]
        if height * width > limits.max_input_pixels:
            raise LimitExceededError(
                "an input picture is larger than the engine's limit",
                field=where,
                value=f"{height} x {width} pixels",
                expected=f"at most {limits.max_input_pixels} pixels (max_input_pixels)",
                hint="Make it smaller before sending it.",
            )
    if count > MAX_INPUT_PICTURES:
        raise _beyond("multi_modal_data", count, MAX_INPUT_PICTURES, " pictures")


def _pictures(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every input picture with the field that it stands in."""
    for name, value in inputs.items():
        where = f"multi_modal_data.{name}"
        if isinstance(value, list):
            yield from ((f"{where}[{index}]", picture) for index, picture in enumerate(value))
        else:
            yield where, value


def _bounded(
    limits: Limits, params: OmniDiffusionSamplingParams
) -> Iterator[tuple[str, int | None, int, str]]:
    """Yield (field, value, largest allowed, unit) for every parameter that the engine bounds."""
    height, width = params.height, params.width
    negative = len(params.negative_prompt or "")
    yield "negative_prompt", negative, limits.max_prompt_chars, " characters"
    yield "height", height, limits.max_side, ""
    yield "width", width, limits.max_side, ""
    yield "height x width", (height or 0) * (width or 0), limits.max_pixels, ""
    yield "num_frames", params.num_frames, limits.max_frames, ""
    yield "num_inference_steps", params.num_inference_steps, limits.max_steps, ""
    outputs = params.num_outputs_per_prompt
    yield "num_outputs_per_prompt", outputs, limits.max_outputs_per_prompt, ""
    yield _PIXELS_IN_ALL, work_of(params), limits.max_request_pixels, ""


def _beyond(field: str, value: int, most: int, unit: str) -> LimitExceededError:
    return LimitExceededError(
        f"{field} is beyond the engine's limit",
        field=field,
        value=f"{value}{unit}",
        expected=f"at most {most}{unit}",
    )
