"""Deterministic mode: a request's picture does not depend on its company by a single bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from omni_engine import Omni, OmniDiffusionSamplingParams
from omni_engine.protocol.outputs import DiffusionOutput

pytestmark = pytest.mark.slow

COUNT = 50
WORDS = ("red", "blue", "a small green", "two yellow", "one big white and one small black")


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni(
        step_execution=True, deterministic=True, max_num_seqs=4, devices="cpu", threads=1
    ) as omni:
        yield omni


def requests() -> list[tuple[str, OmniDiffusionSamplingParams]]:
    """Prompts of several lengths, mixed steps and guidance, some adapters, one or two pictures."""
    draw = random.Random(7)
    made = []
    for seed in range(COUNT):
        params: dict[str, Any] = {"seed": seed, "num_inference_steps": draw.choice((1, 2, 3, 4))}
        params["num_outputs_per_prompt"] = 2 if seed % 10 == 0 else 1
        if seed % 5 == 1:
            params["lora_request"] = {"name": "outline", "scale": 0.5}
        if seed % 3 == 0:
            params |= {"true_cfg_scale": draw.choice((1.5, 4.0)), "negative_prompt": "blurry"}
        prompt = f"a picture of {draw.choice(WORDS)} circle"
        made.append((prompt, OmniDiffusionSamplingParams(**params)))
    return made


def run_shuffled(omni: Omni, order: int) -> dict[int, DiffusionOutput]:
    asked = list(enumerate(requests()))
    random.Random(order).shuffle(asked)
    outputs = omni.generate([prompt for _, (prompt, _) in asked], [p for _, (_, p) in asked])
    return {seed: output for (seed, _), output in zip(asked, outputs, strict=True)}


def test_three_orders_of_arrival_give_byte_identical_pictures(omni: Omni) -> None:
    first, *others = [run_shuffled(omni, order) for order in range(3)]
    assert all(output.ok for output in first.values())
    mates = {output.metrics.mean_batch_size for run in (first, *others) for output in run.values()}
    assert max(mates) > 1, "nothing shared a forward: the test shows nothing"
    for other in others:
        for seed, output in first.items():
            assert output.images is not None
            same = other[seed].images
            assert same is not None
            assert [a.tobytes() for a in output.images] == [b.tobytes() for b in same]
    pictures = {image.tobytes() for output in first.values() for image in output.images or ()}
    assert len(pictures) == COUNT + COUNT // 10


def test_an_abort_changes_nobody_elses_picture_by_a_bit(omni: Omni) -> None:
    expected = run_shuffled(omni, 0)
    some = [(seed, *request) for seed, request in enumerate(requests()[:6])]
    handles = [omni.submit(prompt, params) for _, prompt, params in some]
    victim = omni.submit(
        "a red circle", OmniDiffusionSamplingParams(seed=99, num_inference_steps=500)
    )
    reached = next(e for e in victim.events() if getattr(e, "step", None))
    assert reached is not None
    victim.abort()
    assert victim.result(60).aborted
    for (seed, _, _), handle in zip(some, handles, strict=True):
        images, before = handle.result(60).images, expected[seed].images
        assert images is not None
        assert before is not None
        assert [a.tobytes() for a in images] == [b.tobytes() for b in before]


def test_request_mode_is_deterministic_too() -> None:
    params = [OmniDiffusionSamplingParams(seed=seed, num_inference_steps=2) for seed in range(5)]
    prompts = [f"a {word} circle" for word in WORDS]
    with Omni(deterministic=True, max_num_seqs=3, devices="cpu", threads=1) as omni:
        together = omni.generate(prompts, params)
        reverse = omni.generate(prompts[::-1], params[::-1])[::-1]
        alone = [omni.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    assert max(output.metrics.max_batch_size for output in together) == 3
    for outputs in zip(together, reverse, alone, strict=True):
        pictures = {(output.images or [])[0].tobytes() for output in outputs}
        assert len(pictures) == 1
