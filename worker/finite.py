"""Refuses results that hold NaN or infinity: they would come out as black pictures and noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from omni_engine.protocol.errors import ModelError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.tensors import TensorData


def check_finite(item: Any) -> None:
    """Check one picture, clip, sound or tensor of latents; what is none of these passes.

    Raises:
        ModelError: if a value in it is NaN or infinite.
    """
    if isinstance(item, np.ndarray) and np.issubdtype(item.dtype, np.floating):
        finite = not item.size or _are_finite(item.min(), item.max())
    elif isinstance(item, torch.Tensor) and item.is_floating_point():
        finite = not item.numel() or _are_finite(*torch.aminmax(item.detach()))
    else:
        return
    if not finite:
        raise ModelError(
            "the pipeline's result holds NaN or infinite values",
            hint="The model's numbers left its dtype's range: choose dtype bfloat16 or float32, or "
            "an autoencoder that is safe in float16 (or cast to float32: force_upcast).",
        )


def check_output(output: DiffusionOutput) -> None:
    """Check all that a hand-written pipeline's output holds.

    Raises:
        ModelError: if a value in it is NaN or infinite.
    """
    for made in (output.images, output.frames, output.audio):
        for item in made if isinstance(made, list) else ():
            check_finite(item)
    latents = output.latents
    check_finite(latents.to_numpy() if isinstance(latents, TensorData) else latents)


def _are_finite(lowest: Any, highest: Any) -> bool:
    """Whether both are finite: NaN among values is their minimum and maximum."""
    return math.isfinite(lowest) and math.isfinite(highest)
