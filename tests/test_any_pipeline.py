"""Any diffusers pipeline: certified at load, sharing forwards, equal to the plain call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from PIL import Image
from tiny_models import save_tiny_stable_diffusion

from omni_engine import Omni, OmniDiffusionSamplingParams
from omni_engine.protocol.errors import InvalidRequestError, UnknownFieldError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_stable_diffusion(tmp_path_factory.mktemp("models") / "tiny-sd")


@pytest.fixture(scope="module")
def img2img_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_stable_diffusion(tmp_path_factory.mktemp("models") / "tiny-i2i", img2img=True)


@pytest.fixture(scope="module")
def omni(start_engine: Callable[..., Omni], folder: Path) -> Omni:
    return start_engine(str(folder), max_num_seqs=4, threads=1)


def plain(pipe: Any, prompt: str, seed: int, **arguments: Any) -> np.ndarray[Any, Any]:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    picture = pipe(prompt, generator=generator, **arguments).images[0]
    return np.asarray(picture)


def test_pictures_equal_the_plain_diffusers_call(omni: Omni, folder: Path) -> None:
    params = OmniDiffusionSamplingParams(
        height=16,
        width=16,
        num_inference_steps=3,
        guidance_scale=4.0,
        negative_prompt="a cat",
        num_outputs_per_prompt=2,
        seed=7,
    )
    outputs = omni.generate(["a red circle", "a blue square on a cat"], params)
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    arguments = {"height": 16, "width": 16, "num_inference_steps": 3, "guidance_scale": 4.0}
    seen = []
    for prompt, output in zip(("a red circle", "a blue square on a cat"), outputs, strict=True):
        assert output.raise_for_error().images is not None
        assert output.seed == 7
        for i, picture in enumerate(output.images):
            expected = plain(pipe, prompt, 7 + i, negative_prompt="a cat", **arguments)
            assert picture.dtype == np.uint8
            assert np.abs(picture.astype(int) - expected).max() <= 1
            seen.append(picture.tobytes())
    assert len(set(seen)) == 4, "prompt and seed must change the picture"


def test_requests_share_forwards_and_status_says_why_they_may(omni: Omni) -> None:
    (stage,) = omni.status()["stages"]
    assert stage["pipeline"] == "StableDiffusionPipeline"
    assert stage["effective_max_num_seqs"] == stage["max_num_seqs"] == 4
    assert "certified at load" in stage["batching"]
    params = [
        OmniDiffusionSamplingParams(num_inference_steps=3, num_outputs_per_prompt=n, seed=n)
        for n in (1, 2, 1)
    ]
    outputs = omni.generate(["a", "b", "c"], params)
    for output in outputs:
        metrics = output.raise_for_error().metrics
        assert (metrics.max_batch_size, metrics.mean_batch_size) == (3, 3.0)
        assert (metrics.num_steps, metrics.num_forwards) == (3, 3)


def test_a_request_that_fails_in_its_batch_fails_alone(omni: Omni) -> None:
    """Its neighbours are neither lost nor run again."""
    params = OmniDiffusionSamplingParams(num_inference_steps=2, seed=1)
    fields = {"num_inference_steps": 2, "extra_args": {"guidance_rescale": "a string"}}
    outputs = omni.generate(
        ["a", "b", "c"], [params, OmniDiffusionSamplingParams(**fields), params]
    )
    assert [output.ok for output in outputs] == [True, False, True]
    assert outputs[1].error is not None
    assert outputs[1].error.code == "model_error"


def test_default_size_is_the_models_own(omni: Omni) -> None:
    (output,) = omni.generate("a", OmniDiffusionSamplingParams(num_inference_steps=1))
    assert output.raise_for_error().images is not None
    assert output.images[0].shape == (16, 16, 3)


def test_latents_are_returned_raw(omni: Omni) -> None:
    params = OmniDiffusionSamplingParams(
        num_inference_steps=1, output_type="latent", num_outputs_per_prompt=2
    )
    (output,) = omni.generate("a", params)
    assert output.raise_for_error().images is None
    assert isinstance(output.latents, np.ndarray)
    assert output.latents.shape == (2, 4, 8, 8)
    assert output.latents.dtype == np.float32


def test_call_arguments_outside_the_common_ones_go_through_extra_args(omni: Omni) -> None:
    params = {"num_inference_steps": 2, "seed": 1, "guidance_scale": 5.0}
    plain_output, rescaled, wrong = omni.generate(
        ["a red circle"] * 3,
        [
            OmniDiffusionSamplingParams(**params),
            OmniDiffusionSamplingParams(**params, extra_args={"guidance_rescale": 0.7}),
            OmniDiffusionSamplingParams(**params, extra_args={"guidance_rescal": 0.7}),
        ],
    )
    assert plain_output.raise_for_error().images is not None
    assert rescaled.raise_for_error().images is not None
    assert not np.array_equal(plain_output.images[0], rescaled.images[0])
    assert isinstance(wrong.error, UnknownFieldError)
    assert "guidance_rescale" in str(wrong.error)


def test_a_field_that_the_pipeline_would_ignore_is_refused(omni: Omni) -> None:
    (output,) = omni.generate("a", OmniDiffusionSamplingParams(num_frames=5))
    assert isinstance(output.error, InvalidRequestError)
    assert output.error.field == "num_frames"
    assert "StableDiffusionPipeline takes no num_frames" in str(output.error)


def test_an_input_picture_reaches_the_pipeline(
    start_own_engine: Callable[..., Omni], img2img_folder: Path
) -> None:
    omni = start_own_engine(str(img2img_folder), threads=1)
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
    params = OmniDiffusionSamplingParams(
        num_inference_steps=4, strength=0.5, guidance_scale=3.0, seed=3
    )
    prompt = {"prompt": "a cat", "multi_modal_data": {"image": picture}}
    with_input, without = omni.generate([prompt, "a cat"], params)
    pipe = StableDiffusionImg2ImgPipeline.from_pretrained(img2img_folder)
    expected = plain(
        pipe, "a cat", 3, image=picture, num_inference_steps=4, strength=0.5, guidance_scale=3.0
    )
    assert with_input.raise_for_error().images is not None
    assert np.abs(with_input.images[0].astype(int) - expected).max() <= 1
    assert isinstance(without.error, InvalidRequestError)
    assert without.error.field == "multi_modal_data.image"
