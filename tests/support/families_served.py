"""A family's requests as the engine and a worker run them: admitted, in waves and in steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from families_parts import Family, double_stays_double
from PIL import Image

from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import INPUT_NAMES, DiffusionRequest, build_request
from omni_engine.protocol.sampling import SAMPLING_FIELDS, OmniDiffusionSamplingParams
from omni_engine.stages.config import EngineArgs, Limits
from omni_engine.stages.contracts import DiffusionRequestBatch, check_results
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.diffusers_adapter import CooperativeState, DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.step_loop import StepLoop

STEPS = (4, 3, 4, 2, 3)
OUTPUTS = (1, 2, 1, 1, 1)
UNGUIDED = 3
"""The request without guidance."""
DECODED = 4
"""The request that asks for pictures; the others ask for latents, which keep float64."""

Made = dict[tuple[int, int], torch.Tensor]
"""Results by request and output."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request as the arguments of plain diffusers' call, but for the generator."""

    arguments: dict[str, Any]
    seed: int
    outputs: int = 1


@dataclasses.dataclass(frozen=True)
class Ran:
    """What running a family's requests in one mode came to.

    Attributes:
        difference: largest difference of latents from plain diffusers', of full scale.
        decoded: the same of decoded pictures, clips or sounds before they are rounded.
        forwards: that ran.
        calls: denoiser calls that the pictures asked for.
        rows: in all forwards.
        optimum: fewest forwards that could do.
        fallbacks: shared forwards that failed.
        overlaps: requests that joined while others were under way.
        remembered: prompts that were not encoded again.
    """

    difference: float
    decoded: float
    forwards: int
    calls: int
    rows: int
    optimum: int
    fallbacks: int
    overlaps: int
    remembered: int


def wanted_of(family: Family) -> list[Wanted]:
    """Five requests: other prompts, seeds, steps and guidance, one without and one of two."""
    return [
        Wanted(_arguments(family, index), 10 * index, outputs)
        for index, outputs in enumerate(OUTPUTS)
    ]


def shapes_of(family: Family) -> list[Wanted]:
    """Four requests of two shapes with equal token counts."""
    return [
        Wanted(
            {**_arguments(family, 0), "prompt": prompt, "height": height, "width": 80 - height},
            seed,
        )
        for seed, (prompt, height) in enumerate(
            zip(family.prompts[:4], (16, 64, 64, 16), strict=True)
        )
    ]


def _arguments(family: Family, index: int) -> dict[str, Any]:
    arguments = {**family.request(index), "num_inference_steps": STEPS[index]}
    arguments["output_type"] = "latent" if family.latents and index != DECODED else "np"
    if index == UNGUIDED and family.guidance is not None:
        arguments[family.guidance] = family.no_guidance
        if family.guidance == "true_cfg_scale":
            arguments.pop("negative_prompt", None)  # the engine refuses what has no effect
    return arguments


def request_of(wanted: Wanted, request_id: str) -> DiffusionRequest:
    """The same as a request: every argument is expressed in the fields of the protocol."""
    arguments = wanted.arguments
    inputs = {name: _as_arrays(arguments[name]) for name in INPUT_NAMES & set(arguments)}
    fields = {name: arguments[name] for name in SAMPLING_FIELDS & set(arguments)}
    extra = {
        name: value for name, value in arguments.items() if name not in {"prompt", *inputs, *fields}
    }
    params = OmniDiffusionSamplingParams(
        **fields, seed=wanted.seed, num_outputs_per_prompt=wanted.outputs, extra_args=extra
    )
    return build_request(
        arguments["prompt"], params, request_id=request_id, multi_modal_data=inputs
    )


@contextlib.contextmanager
def all_in_double(family: Family) -> Iterator[None]:
    """Nothing is rounded to float32 on the way, neither between steps nor when it is decoded."""

    def kept(pictures: torch.Tensor) -> np.ndarray[Any, Any]:
        return pictures.cpu().permute(0, 2, 3, 1).numpy()

    lifted = contextlib.nullcontext() if family.rounds else double_stays_double()
    with mock.patch.object(VaeImageProcessor, "pt_to_numpy", staticmethod(kept)), lifted:
        yield


def alone(pipe: Any, arguments: dict[str, Any], seed: int) -> torch.Tensor:
    """What plain diffusers makes of a call: the batch of its results."""
    torch.manual_seed(seed)
    result = pipe(**arguments, generator=torch.Generator().manual_seed(seed))
    return batch_in(result)


def batch_in(output: Any) -> torch.Tensor:
    found = next(iter(output.values()))
    if isinstance(found, list):
        return torch.stack([torch.as_tensor(np.asarray(item)) for item in found])
    return torch.as_tensor(found)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, as a part of full scale; not a number counts as infinite."""
    full_scale = other.abs().max().item()
    difference = (one - other).abs().max().item() / full_scale
    return difference if difference == difference else float("inf")


def made_alone(pipe: Any, requests: Sequence[Wanted]) -> Made:
    """Every output of the requests by plain diffusers, one call each."""
    return {
        (index, output): alone(pipe, wanted.arguments, wanted.seed + output)[0]
        for index, wanted in enumerate(requests)
        for output in range(wanted.outputs)
    }


def run_waves(pipe: Any, requests: Sequence[Wanted], report: FusionReport, expected: Made) -> Ran:
    """Request mode: one batch."""
    served = _Served(pipe, report)
    batch = DiffusionRequestBatch(served.admitted(requests))
    outputs = check_results(batch, served.forward(batch))
    return served.compared(outputs, expected, [0] * len(requests), 0)


def run_steps(pipe: Any, requests: Sequence[Wanted], report: FusionReport, expected: Made) -> Ran:
    """Step mode: request i joins at tick i."""
    served = _Served(pipe, report, step_execution=True)
    loop = StepLoop(served, lambda _: False)
    waiting = list(served.admitted(requests))
    outputs: list[DiffusionOutput] = []
    overlaps = 0
    while waiting or len(loop):
        if waiting:
            overlaps += len(loop) > 0
            loop.join([waiting.pop(0)])
        outputs += loop.tick()
    outputs.sort(key=lambda output: output.request_id)
    return served.compared(outputs, expected, range(len(requests)), overlaps)


class _Served(DiffusersPipeline):
    """Keeps what it decoded, before it becomes pictures of 8 bits, and counts calls."""

    def __init__(self, pipe: Any, report: FusionReport, **settings: Any) -> None:
        stepper = make_stepper(pipe, report, prompt_cache_size=32)
        super().__init__(pipe, stepper, diffusers_capabilities(pipe, report), AbortFlags())
        args = EngineArgs(model="some/model", **settings)
        self._admission = Admission(args, Limits(), AdapterRegistry(args), self.capabilities)
        self._made: Made = {}
        self._calls: dict[tuple[int, int], int] = {}

    def admitted(self, requests: Sequence[Wanted]) -> tuple[DiffusionRequest, ...]:
        """The requests as the engine passes them on to a worker."""
        asked = [request_of(wanted, str(index)) for index, wanted in enumerate(requests)]
        return tuple(self._admission.admit(request).request for request in asked)

    def post_decode_batch(self, states: Sequence[CooperativeState]) -> list[Any]:
        results = super().post_decode_batch(states)
        for state, made in zip(states, results, strict=True):
            if made is not None and not isinstance(made, BaseException):
                key = int(state.request_id), state.row
                self._made[key] = torch.as_tensor(made)
                assert state.counts is not None
                self._calls[key] = state.counts.forwards
        return results

    def compared(
        self,
        outputs: Sequence[DiffusionOutput],
        expected: Made,
        joined: Sequence[int],
        overlaps: int,
    ) -> Ran:
        self.stepper.close()
        for output in outputs:
            output.raise_for_error()
        assert set(self._made) == set(expected)
        differences = {key: apart(made, expected[key]) for key, made in self._made.items()}
        for (index, row), made in self._made.items():
            latents = outputs[index].latents
            if isinstance(latents, np.ndarray):
                assert torch.equal(torch.as_tensor(latents[row]), made)
            else:
                assert index == DECODED or made.shape[-1] == 4
        return Ran(
            difference=max(d for (index, _), d in differences.items() if index != DECODED),
            decoded=max([d for (i, _), d in differences.items() if i == DECODED], default=0.0),
            forwards=self.stepper.forwards,
            calls=sum(self._calls.values()),
            rows=self.stepper.rows,
            optimum=max(joined[index] + calls for (index, _), calls in self._calls.items()),
            fallbacks=self.stepper.fallbacks,
            overlaps=overlaps,
            remembered=self.stepper.prompts.hits,
        )


def _as_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_arrays(item) for item in value]
    assert isinstance(value, Image.Image)
    return np.asarray(value)
