"""The kind of a request or a call, in words: what decides how much memory a row of it takes."""

from __future__ import annotations

from typing import Any

import torch

from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.worker.fusion import Call


def kind_of_request(pipeline: Any, request: DiffusionRequest) -> str:
    """Return the kind of a forward of a pipeline's own: "PipelineName 512x512", frames first."""
    capabilities = getattr(pipeline, "capabilities", None)
    name = getattr(capabilities, "pipeline", None) or type(pipeline).__name__
    params = request.sampling_params
    return _words(name, (params.num_frames, params.height, params.width))


def kind_of_call(call: Call) -> str:
    """Return the kind of a module's call: "ModuleName 64x64"; tokens where latents are packed."""
    name = type(call.module).__name__
    shapes = [shape for value in call.arguments.values() if (shape := _shape(value)) is not None]
    for rank in (3, 2):  # latents or hidden states; else an encoder's tokens
        for shape in shapes:
            if len(shape) >= rank:
                return _words(name, shape[2:] if len(shape) > 3 else shape[1:2])
    return name


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an argument with its rows; a list of tensors has one per row."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return (len(value), *value[0].shape)
    return None


def _words(name: str, sizes: tuple[int | None, ...]) -> str:
    shown = "x".join(str(size) for size in sizes if size is not None)
    return f"{name} {shown}" if shown else name
