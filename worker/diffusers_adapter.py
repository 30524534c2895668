"""Gives any diffusers pipeline the request-batch contract.

n outputs are n rows, each a picture of its own with seed + i; ``num_images_per_prompt`` is never
passed on, since several pipelines pair pictures and prompts wrongly for n > 1. A batch is one list
call for families known to be exact that way; all others run row by row, which is always exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from omni_engine.protocol.errors import ModelError, RequestAbortedError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.stages.families import family_of
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.tensors import tensor_to_wire, to_uint8

DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
_CALL_FIELDS_SET_HERE = frozenset(
    {
        "seed",
        "num_outputs_per_prompt",
        "output_type",
        "lora_request",
        "extra_args",
        "negative_prompt",
        "fps",
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """One picture of one request."""

    request: DiffusionRequest
    index: int

    @property
    def seed(self) -> int:
        """Picture i uses the request's seed + i."""
        return self.request.seed + self.index

    def generator(self) -> torch.Generator:
        """A CPU generator, so that the same seed starts from the same noise on every device."""
        return torch.Generator("cpu").manual_seed(self.seed)


class DiffusersRequestPipeline:
    """The request-batch contract around a diffusers pipeline.

    Args:
        pipe: a loaded pipeline; called unmodified.
        aborts: consulted after each denoising step.
    """

    def __init__(self, pipe: Any, aborts: AbortFlags) -> None:
        self.pipe = pipe
        self._aborts = aborts
        self._parameters = frozenset(inspect.signature(type(pipe).__call__).parameters)
        self.supports_request_batch = family_of(type(pipe).__name__).exact_list_call
        self._steps = 0
        self._forwards = 0
        self._count_denoiser_forwards()

    def capabilities(self) -> PipelineCapabilities:
        """Describe the pipeline for admission and the compatibility key."""
        return diffusers_capabilities(self.pipe, self.supports_request_batch)

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run the batch: one list call where that is exact, else one call per row.

        Raises:
            RequestAbortedError: when every request of the batch was aborted.
        """
        rows = [Row(request, i) for request in batch.requests for i in range(request.num_outputs)]
        self._steps = self._forwards = 0
        if self.supports_request_batch:
            made = self._call(rows, batch)
        else:
            made = [picture for row in rows for picture in self._call([row], batch)]
        if len(made) != len(rows):
            raise ModelError(f"the pipeline returned {len(made)} results for {len(rows)} rows")
        return self._outputs(batch, made)

    def _call(self, rows: Sequence[Row], batch: DiffusionRequestBatch) -> list[Any]:
        as_list = self.supports_request_batch
        first = rows[0].request
        arguments = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in first.sampling_params.given().items()
            if name not in _CALL_FIELDS_SET_HERE and name in self._parameters
        }
        arguments.update(first.sampling_params.extra_args)
        latent = first.sampling_params.output_type == "latent"
        arguments["output_type"] = "latent" if latent else "np"
        arguments["generator"] = _listed([row.generator() for row in rows], as_list)
        if "prompt" in self._parameters:
            arguments["prompt"] = _listed([row.request.prompt for row in rows], as_list)
        if first.sampling_params.negative_prompt is not None:
            negatives = [row.request.sampling_params.negative_prompt for row in rows]
            arguments["negative_prompt"] = _listed(negatives, as_list)
        for name in first.multi_modal_data:
            arguments[name] = _listed(
                [_pictures(r.request.multi_modal_data[name]) for r in rows], as_list
            )
        if "callback_on_step_end" in self._parameters:
            arguments["callback_on_step_end"] = self._step_callback(batch)
        torch.manual_seed(rows[0].seed)  # pipelines that draw from global state stay reproducible
        return _unpack(self.pipe(**arguments), latent)

    def _step_callback(self, batch: DiffusionRequestBatch) -> Any:
        def after_step(
            pipe: Any, step: int, timestep: Any, state: dict[str, Any]
        ) -> dict[str, Any]:
            self._steps += 1
            if all(self._aborts.is_set(request_id) for request_id in batch.request_ids):
                raise RequestAbortedError("the request was aborted")
            return state

        return after_step

    def _outputs(self, batch: DiffusionRequestBatch, made: list[Any]) -> list[DiffusionOutput]:
        remaining = iter(made)
        return [
            self._output(r, [next(remaining) for _ in range(r.num_outputs)], batch)
            for r in batch.requests
        ]

    def _output(
        self, request: DiffusionRequest, made: list[Any], batch: DiffusionRequestBatch
    ) -> DiffusionOutput:
        output = DiffusionOutput(request.request_id, seed=request.seed)
        output.metrics = OutputMetrics(num_steps=self._steps, num_forwards=self._forwards)
        if isinstance(made[0], torch.Tensor):
            output.latents = tensor_to_wire(torch.stack(made))
        elif made[0].ndim == 4:
            output.frames = [to_uint8(clip) for clip in made]
        else:
            output.images = [to_uint8(picture) for picture in made]
        return output

    def _count_denoiser_forwards(self) -> None:
        for name in DENOISERS:
            if isinstance(module := getattr(self.pipe, name, None), torch.nn.Module):
                module.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._forwards += 1


def _listed(values: list[Any], as_list: bool) -> Any:
    return values if as_list else values[0]


def _pictures(value: Any) -> Any:
    if isinstance(value, list):
        return [Image.fromarray(picture) for picture in value]
    return Image.fromarray(value)


def _unpack(result: Any, latent: bool) -> list[Any]:
    """Return one entry per row of what a pipeline returned: arrays, or tensors for latents."""
    for name in ("images", "frames", "videos"):
        if (found := getattr(result, name, None)) is not None:
            break
    else:
        raise ModelError(f"the pipeline returned {type(result).__name__} without images or frames")
    if latent and isinstance(found, torch.Tensor):
        return list(found)
    return [np.asarray(item) for item in found]
