"""A thousand random aborts while others are stepped: nothing of the aborted stays."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from tiny_models import tiny_stable_diffusion

from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.step_loop import StepLoop


@pytest.fixture(scope="module")
def pipeline() -> Any:
    torch.set_num_threads(1)
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    report = FusionReport(True, "")
    stepper = make_stepper(pipe, report, prompt_cache_size=4)
    return DiffusersPipeline(pipe, stepper, diffusers_capabilities(pipe, report), AbortFlags())


def request(index: int) -> DiffusionRequest:
    params = OmniDiffusionSamplingParams(
        seed=index, num_inference_steps=30, height=16, width=16, guidance_scale=3.0
    )
    return build_request(f"a cat {index % 7}", params, request_id=f"request {index}")


def test_a_thousand_random_aborts_leave_memory_flat(pipeline: Any) -> None:
    draw, aborted = random.Random(3), set[str]()
    loop = StepLoop(pipeline, aborted.__contains__)
    samples: list[weakref.ref[torch.Tensor]] = []
    tensors: list[int] = []
    for index in range(1000):
        loop.join([request(index)])
        if index % 10 == 0:
            loop.tick()
            live = pipeline.stepper.live
            samples.extend(weakref.ref(call.pending.call.arguments["sample"]) for call in live[-1:])
        running = loop.request_ids
        if len(running) > 5:
            aborted.add(draw.choice(running))
            ended = loop.end_aborted()
            assert [output.aborted for output in ended] == [True]
        if index % 250 == 249:
            gc.collect()
            tensors.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
    aborted |= set(loop.request_ids)
    assert len(loop.end_aborted()) == 5
    assert pipeline.stepper.live == []
    assert samples
    assert not [sample for sample in samples if sample() is not None], "without a collection"
    assert max(tensors[1:]) - min(tensors[1:]) < 0.02 * tensors[1], tensors


def test_an_aborted_requests_tensors_are_gone_one_tick_later(pipeline: Any) -> None:
    aborted = set[str]()
    loop = StepLoop(pipeline, aborted.__contains__)
    loop.join([request(index) for index in range(6)])
    for _ in range(3):
        loop.tick()
    call = pipeline.stepper.live[2]
    held = [weakref.ref(v) for v in call.pending.call.arguments.values()
            if isinstance(v, torch.Tensor) and v.ndim]  # fmt: skip
    aborted.add(call.owner)
    del call
    (output,) = loop.tick()
    assert output.aborted
    assert len(held) >= 2
    assert not [tensor for tensor in held if tensor() is not None]
    aborted |= set(loop.request_ids)
    loop.end_aborted()
