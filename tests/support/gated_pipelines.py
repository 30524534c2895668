"""Hand-written stepped pipelines for tests: a run can be held at a step, to be looked at there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from support_pipelines import pattern

from omni_engine.stages.contracts import LoadContext, StepBatch, StepRequestState

_GATE_TIMEOUT_S = 60.0


class GatedSteps:
    """Steps that cost nothing; ``extra_args`` can hold them or raise.

    ``holds`` is a list of steps, each with the file whose existence lets it go on.
    """

    supports_step_execution = True
    extra_args = frozenset({"holds", "raise_text"})
    per_request: ClassVar = {"holds", "raise_text", "negative_prompt"}
    defaults: ClassVar = {"height": 16, "width": 16, "num_inference_steps": 4}
    size_multiple = 8

    @classmethod
    def load(cls, context: LoadContext) -> GatedSteps:
        return cls()

    def prepare_encode(self, state: StepRequestState) -> None:
        params = state.request.sampling_params
        if text := params.extra_args.get("raise_text"):
            raise RuntimeError(text)
        state.num_steps = params.num_inference_steps or 1

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        for state in states:
            for step, gate in state.request.sampling_params.extra_args.get("holds", ()):
                if state.step_index == step:
                    _wait_for(Path(gate))
        return [None] * len(states)

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        state.step_index += 1

    def post_decode(self, state: StepRequestState) -> np.ndarray[Any, Any]:
        params = state.request.sampling_params
        assert params.height is not None
        assert params.width is not None
        return pattern(state.request.prompt, state.seed, params.height, params.width)

    def preview(self, state: StepRequestState) -> np.ndarray[Any, Any]:
        """A picture in the colour of the step."""
        return np.full((8, 8, 3), state.step_index, np.uint8)


class ExclusiveSteps(GatedSteps):
    """Must have one request at a time."""

    exclusive = True


def _wait_for(gate: Path) -> None:
    deadline = time.monotonic() + _GATE_TIMEOUT_S
    while not gate.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened {gate}")
        time.sleep(0.002)
