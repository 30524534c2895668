"""Hand-written pipelines for tests: they take the whole real path and cost almost nothing."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, ClassVar

import numpy as np

from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.stages.contracts import DiffusionRequestBatch, LoadContext


def pattern(prompt: str, seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """A picture that depends on prompt and seed alone: any mix-up of requests shows."""
    digest = hashlib.sha256(f"{prompt}|{seed}".encode()).digest()
    return np.resize(np.frombuffer(digest, np.uint8), (height, width, 3))


class PatternPipeline:
    """Batched; ``extra_args`` can make it slow, raise, or end its process."""

    supports_request_batch = True
    extra_args = frozenset({"sleep_ms", "raise_text", "exit_code", "wrong_count"})
    defaults: ClassVar = {"height": 16, "width": 16, "num_inference_steps": 4}
    size_multiple = 8
    per_request: ClassVar = {"num_outputs_per_prompt", "negative_prompt", "raise_text"}

    @classmethod
    def load(cls, context: LoadContext) -> PatternPipeline:
        return cls()

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        extra = batch.requests[0].sampling_params.extra_args
        time.sleep(extra.get("sleep_ms", 0) / 1000)
        if "exit_code" in extra:
            os._exit(extra["exit_code"])
        for request in batch.requests:
            if text := request.sampling_params.extra_args.get("raise_text"):
                raise RuntimeError(text)
        outputs = [self._output(request) for request in batch.requests]
        return outputs[:-1] if extra.get("wrong_count") else outputs

    def _output(self, request: Any) -> DiffusionOutput:
        params = request.sampling_params
        pictures = [
            pattern(request.prompt, request.seed + i, params.height, params.width)
            for i in range(request.num_outputs)
        ]
        metrics = OutputMetrics(num_steps=params.num_inference_steps, num_forwards=1)
        return DiffusionOutput(request.request_id, images=pictures, metrics=metrics)


class ReusingPipeline(PatternPipeline):
    """Returns the same arrays every time, as one with pinned host memory would."""

    def __init__(self) -> None:
        self._kept: dict[Any, np.ndarray[Any, Any]] = {}

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        outputs = super().forward(batch)
        for row, output in enumerate(outputs):
            (picture,) = output.images or ()
            kept = self._kept.setdefault((row, picture.shape), np.empty_like(picture))
            kept[...] = picture
            output.images = [kept]
        return outputs


class NoisePipeline(PatternPipeline):
    """Its pictures take as long to encode as any can."""

    def _output(self, request: Any) -> DiffusionOutput:
        params = request.sampling_params
        shape = (params.height, params.width, 3)
        picture = np.random.default_rng(request.seed).integers(0, 256, shape, np.uint8)
        return DiffusionOutput(request.request_id, images=[picture])


class SerialPipeline(PatternPipeline):
    """Does not declare request batching."""

    supports_request_batch = False


class NoForward:
    """Lacks ``forward``."""

    @classmethod
    def load(cls, context: LoadContext) -> NoForward:
        raise AssertionError("the contract must be checked before anything is loaded")


class HalfStepped(PatternPipeline):
    """Declares steps and has only two of the four methods."""

    supports_step_execution = True

    @classmethod
    def load(cls, context: LoadContext) -> HalfStepped:
        raise AssertionError("the contract must be checked before anything is loaded")

    def prepare_encode(self, state: object) -> None:
        raise NotImplementedError

    def denoise_step(self, batch: object, states: object) -> None:
        raise NotImplementedError


class Undeclared(HalfStepped):
    """Has all of the methods and doesn't say so."""

    supports_step_execution = False

    def step_scheduler(self, state: object, noise_pred: object) -> None:
        raise NotImplementedError

    def post_decode(self, state: object) -> None:
        raise NotImplementedError
