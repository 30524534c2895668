"""A stepwise pipeline that does next to nothing and logs what it is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from omni_engine import OmniDiffusionSamplingParams
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.stages.contracts import StepBatch, StepRequestState


class Counting:
    """Does next to nothing and logs it: (method, "id/row") per state."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.batches: list[tuple[StepBatch, list[str]]] = []

    def note(self, method: str, state: StepRequestState) -> None:
        self.log.append((method, f"{state.request_id}/{state.row}"))

    def take_log(self) -> list[tuple[str, str]]:
        taken, self.log = self.log, []
        return taken

    def prepare_encode(self, state: StepRequestState) -> None:
        self.note("encode", state)
        state.num_steps = state.request.sampling_params.num_inference_steps or 1
        state.latents = torch.full((1, 2), float(state.seed))
        state.timesteps = torch.arange(state.num_steps, 0, -1)

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        for state in states:
            self.note("denoise", state)
        self.batches.append((batch, [f"{state.request_id}/{state.row}" for state in states]))
        return batch.latents

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        self.note("step", state)
        assert noise_pred.tolist() == [[state.seed, state.seed]], "somebody else's prediction"
        state.step_index += 1

    def post_decode(self, state: StepRequestState) -> Any:
        self.note("decode", state)
        return np.full((4, 6, 3), state.seed, np.uint8)


def request(name: str, steps: int = 3, n: int = 1, **changes: Any) -> DiffusionRequest:
    params = OmniDiffusionSamplingParams(
        seed=ord(name[0]), num_inference_steps=steps, num_outputs_per_prompt=n
    )
    return build_request("a prompt", params, request_id=name, **changes)


def logged(log: list[tuple[str, str]], method: str) -> list[str]:
    return [who for what, who in log if what == method]
