"""Pictures that cost nothing to make and a lot to encode; for ``encoding.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.stages.contracts import DiffusionRequestBatch, LoadContext


class NoisePipeline:
    """Noise that was smoothed a little, as photographs are; one picture, made once."""

    supports_request_batch = True
    defaults: ClassVar = {"height": 1024, "width": 1024, "num_inference_steps": 1}
    size_multiple = 8

    def __init__(self) -> None:
        noise = np.random.default_rng(0).normal(128, 60, (1024, 1024, 3))
        smooth = sum(np.roll(noise, shift, axis) for axis in (0, 1) for shift in (-1, 0, 1)) / 6
        self._picture: np.ndarray[Any, Any] = np.clip(smooth, 0, 255).astype(np.uint8)

    @classmethod
    def load(cls, context: LoadContext) -> NoisePipeline:
        return cls()

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        metrics = OutputMetrics(num_steps=1, num_forwards=1)
        return [
            DiffusionOutput(request.request_id, images=[self._picture], metrics=metrics)
            for request in batch.requests
        ]
