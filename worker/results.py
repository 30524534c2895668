"""From what a pipeline made to what a request gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.worker.finite import check_finite
from omni_engine.worker.tensors import tensor_to_wire, to_sound, to_uint8

DEFAULT_PREVIEW_SIDE = 256
_MAX_PREVIEW_SOURCE = 4096 * 4096 * 3


def make_output(
    request: DiffusionRequest,
    made: Sequence[Any],
    metrics: OutputMetrics,
    sample_rate: int | None = None,
) -> DiffusionOutput:
    """Return the output of a request that completed.

    Args:
        request: the request.
        made: one entry per output: an array of shape (height, width, 3 or 4), a clip or the layers
            of a picture of shape (frames, height, width, 3 or 4), a sound of floats of shape
            (samples,) or (channels, samples), or a tensor of latents.
        metrics: how it was run.
        sample_rate: of sounds, in samples per second.

    Raises:
        PipelineContractError: if that is none of these, or latents that nobody asked for.
        ModelError: if there are values in it that are no finite numbers.
    """
    wants_latents = request.sampling_params.output_type == "latent"
    for item in made:
        _check_kind(item, wants_latents=wants_latents)
        check_finite(item)
    output = DiffusionOutput(request.request_id, seed=request.seed, metrics=metrics)
    if isinstance(made[0], torch.Tensor):
        output.latents = tensor_to_wire(torch.stack(list(made)))
    elif made[0].ndim <= 2 and np.issubdtype(made[0].dtype, np.floating):
        output.audio, output.sample_rate = [to_sound(sound) for sound in made], sample_rate
    elif made[0].ndim == 4:
        output.frames = [to_uint8(clip) for clip in made]
    else:
        output.images = [to_uint8(picture) for picture in made]
    return output


def _check_kind(item: Any, *, wants_latents: bool) -> None:
    is_result = isinstance(item, np.ndarray) and item.size > 0 and item.dtype.kind in "fuib"
    if is_result or (wants_latents and isinstance(item, torch.Tensor)):
        return
    raise PipelineContractError(
        "the pipeline's result is nothing that a request can get",
        field="post_decode",
        value=f"{type(item).__name__} {getattr(item, 'dtype', '')} {getattr(item, 'shape', '')}",
        expected="a numpy array of shape (height, width, 3) or (frames, height, width, 3), "
        'or a tensor if output_type is "latent"',
    )


def make_preview(
    picture: Any, max_side: int = DEFAULT_PREVIEW_SIDE
) -> npt.NDArray[np.uint8] | None:
    """Return a small uint8 picture of shape (height, width, 3); a clip's middle frame.

    Args:
        picture: what a pipeline made.
        max_side: the longest side of the result, in pixels.

    Returns:
        None for what is no picture.
    """
    if not isinstance(picture, np.ndarray) or picture.ndim not in (3, 4) or picture.shape[-1] != 3:
        return None
    frame = picture[len(picture) // 2] if picture.ndim == 4 else picture
    if not 0 < frame.size <= _MAX_PREVIEW_SOURCE:
        return None
    image = Image.fromarray(to_uint8(np.nan_to_num(np.clip(frame, 0, None))))
    image.thumbnail((max_side, max_side))
    return np.asarray(image)
