"""Hand-written pipelines for tests that make clips, with a gate or with sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gated_pipelines import GatedSteps

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch, LoadContext, StepRequestState

SAMPLE_RATE = 8000
DEFAULTS: Mapping[str, Any] = {
    "height": 16,
    "width": 16,
    "num_frames": 4,
    "num_inference_steps": 4,
    "fps": 12.0,
}


def clip(seed: int, params: Any) -> np.ndarray[Any, Any]:
    """Frames of one colour each, which depends on the seed and on which frame it is."""
    frames = np.zeros((params.num_frames, params.height, params.width, 3), np.uint8)
    for index in range(params.num_frames):
        frames[index] = colour(seed, index)
    return frames


def colour(seed: int, index: int) -> tuple[int, int, int]:
    return 40 + seed % 160, 60 + 10 * (index % 15), 120


class GatedClips(GatedSteps):
    """Clips from steps that can be held; see ``GatedSteps``."""

    makes_video = True
    defaults: ClassVar = dict(DEFAULTS)

    def post_decode(self, state: StepRequestState) -> np.ndarray[Any, Any]:
        return clip(state.seed, state.request.sampling_params)


class SoundingClips:
    """Clips with a tone of one second in stereo; the first frame is the given picture's colour."""

    makes_video = True
    inputs = frozenset({"image"})
    defaults: ClassVar = dict(DEFAULTS)

    @classmethod
    def load(cls, context: LoadContext) -> SoundingClips:
        return cls()

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        return [self._made(request) for request in batch.requests]

    def _made(self, request: DiffusionRequest) -> DiffusionOutput:
        frames = clip(request.seed, request.sampling_params)
        if (picture := request.multi_modal_data.get("image")) is not None:
            frames[0] = picture[0, 0]
        tone = np.sin(2 * np.pi * 440 * np.arange(SAMPLE_RATE) / SAMPLE_RATE)
        return DiffusionOutput(
            request.request_id,
            frames=[frames],
            audio=[np.stack([tone, -tone]).astype(np.float32)],
            sample_rate=SAMPLE_RATE,
        )
