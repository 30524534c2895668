"""Request batching on the bundled model: what shares a batch; nobody's picture changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline

from omni_engine import DiffusionOutput, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.stages.bundled import MODEL_DIR

COLOURS = ["red", "green", "blue", "yellow", "purple", "orange", "white", "black"]
PROMPTS = [f"a {c} star left of a small {c} ring on a gray background" for c in COLOURS[:4]]
PROMPTS += [f"a large {c} square on a pink background" for c in COLOURS[4:]]


def batches(outputs: list[DiffusionOutput]) -> list[int]:
    """Sizes of the batches that ran, from the outputs' own metrics."""
    sizes = Counter(output.raise_for_error().metrics.max_batch_size for output in outputs)
    assert all(number % size == 0 for size, number in sizes.items()), sizes
    return sorted(size for size, number in sizes.items() for _ in range(number // size))


def only_picture(output: DiffusionOutput) -> np.ndarray[Any, Any]:
    assert output.raise_for_error().images is not None
    (picture,) = output.images
    return picture


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


@pytest.fixture(scope="module")
def four_at_once(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine(max_num_seqs=4, replicas=1, threads=1)


@pytest.fixture(scope="module")
def one_at_once(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine(max_num_seqs=1, replicas=1, threads=1)


@pytest.fixture(scope="module")
def two_workers(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine(max_num_seqs=8, replicas=2)


def test_eight_requests_run_as_two_batches_of_four_with_the_same_pictures(
    four_at_once: Omni, one_at_once: Omni
) -> None:
    params = [OmniDiffusionSamplingParams(seed=i, num_inference_steps=4) for i in range(8)]
    together = four_at_once.generate(PROMPTS, params)
    alone = one_at_once.generate(PROMPTS, params)
    assert batches(together) == [4, 4]
    assert batches(alone) == [1] * 8
    for a, b in zip(together, alone, strict=True):
        assert difference(only_picture(a), only_picture(b)) <= 1
    assert len({only_picture(output).tobytes() for output in together}) == 8


def test_requests_that_differ_in_shape_or_steps_do_not_share_a_batch(four_at_once: Omni) -> None:
    params = [
        OmniDiffusionSamplingParams(num_inference_steps=2, seed=1, height=height, width=width)
        for height, width in [(64, 64), (64, 32), (32, 64), (64, 64)]
    ]
    params.append(OmniDiffusionSamplingParams(num_inference_steps=3, seed=1))
    outputs = four_at_once.generate(PROMPTS[:5], params)
    assert [output.metrics.max_batch_size for output in outputs] == [2, 1, 1, 2, 1]
    shapes = [only_picture(output).shape[:2] for output in outputs]
    assert shapes == [(64, 64), (64, 32), (32, 64), (64, 64), (64, 64)]


def test_number_of_outputs_and_negative_prompt_may_differ_within_a_batch(
    four_at_once: Omni, one_at_once: Omni
) -> None:
    params = [
        OmniDiffusionSamplingParams(
            seed=5, num_inference_steps=2, num_outputs_per_prompt=n, negative_prompt=negative
        )
        for n, negative in [(1, " "), (2, "a red star on a white background"), (3, "blue")]
    ]
    together = four_at_once.generate(PROMPTS[:3], params)
    alone = one_at_once.generate(PROMPTS[:3], params)
    assert batches(together) == [3]
    for number, a, b in zip((1, 2, 3), together, alone, strict=True):
        assert a.images is not None
        assert b.images is not None
        assert len(a.images) == len(b.images) == number
        assert max(map(difference, a.images, b.images)) <= 1


@pytest.mark.timeout(600)
def test_every_picture_reaches_the_request_that_asked_for_it(two_workers: Omni) -> None:
    """Shuffled prompts, seeds and numbers of outputs against plain diffusers, one picture each."""
    rng = random.Random(0)
    asked = [(rng.choice(PROMPTS), rng.randrange(4), rng.choice([1, 2, 3])) for _ in range(200)]
    reference = _reference_pictures({(p, s + i) for p, s, n in asked for i in range(n)})
    outputs = two_workers.generate(
        [prompt for prompt, _, _ in asked],
        [
            OmniDiffusionSamplingParams(
                seed=seed, num_outputs_per_prompt=n, num_inference_steps=2, true_cfg_scale=1.0
            )
            for _, seed, n in asked
        ],
    )
    for (prompt, seed, n), output in zip(asked, outputs, strict=True):
        assert output.raise_for_error().images is not None
        assert len(output.images) == n
        for i, picture in enumerate(output.images):
            assert difference(picture, reference[prompt, seed + i]) <= 1
    assert len({output.request_id for output in outputs}) == 200
    assert {output.metrics.worker for output in outputs} == {"stage0-worker0", "stage0-worker1"}
    assert max(output.metrics.max_batch_size for output in outputs) == 8


def _reference_pictures(wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    torch.set_num_threads(1)
    pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pictures = {}
    for prompt, seed in sorted(wanted):
        generator = torch.Generator("cpu").manual_seed(seed)
        made = pipe(
            prompt, height=64, width=64, num_inference_steps=2, true_cfg_scale=1.0,
            generator=generator,
        )  # fmt: skip
        pictures[prompt, seed] = np.asarray(made.images[0])
    distinct = {picture.tobytes() for picture in pictures.values()}
    assert len(distinct) == len(wanted), "the pictures must be distinguishable"
    return pictures


def test_a_burst_fuses_within_the_admission_wait(start_own_engine: Callable[..., Omni]) -> None:
    """Submitted one after the other; the wait ends as soon as the batch is full."""
    omni = start_own_engine(max_num_seqs=3, request_batch_max_wait_ms=60_000, threads=1)
    params = OmniDiffusionSamplingParams(num_inference_steps=1)
    handles = []
    for prompt in PROMPTS[:3]:
        handle = omni.client.submit(prompt, params)
        assert next(handle.events()).status == "waiting"
        handles.append(handle)
    outputs = [handle.result(timeout_s=50) for handle in handles]
    assert batches(outputs) == [3]


def test_a_lone_request_waits_its_bound_and_then_runs(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(max_num_seqs=3, request_batch_max_wait_ms=300, threads=1)
    (output,) = omni.generate(PROMPTS[0], OmniDiffusionSamplingParams(num_inference_steps=1))
    assert output.raise_for_error().metrics.queue_ms >= 300
    assert batches([output]) == [1]


def test_without_admission_wait_a_lone_request_runs_at_once(four_at_once: Omni) -> None:
    """It starts although its batch could hold three more, and nobody else ever comes."""
    with OmniClient(four_at_once.endpoint) as client:
        handle = client.submit(PROMPTS[0], OmniDiffusionSamplingParams(num_inference_steps=1))
        events = [event.status for event in handle.events() if event.step is None]
        assert events == ["waiting", "running", "finished_completed"]
