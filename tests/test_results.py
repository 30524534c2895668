"""What a pipeline returns, taken apart into one result per row."""

from __future__ import annotations

import types
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from families import FAMILIES
from PIL import Image

from omni_engine.cli.pictures import PictureFolder
from omni_engine.engine.prompts import build_requests
from omni_engine.protocol.errors import InvalidRequestError, ModelError, PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.contracts import DiffusionRequestBatch, check_results
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.results import make_output
from omni_engine.worker.row_calls import CallBuilder, Row, sample_rate_of, unpack
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.tensors import to_sound


@pytest.mark.parametrize("name", ["images", "image", "frames", "videos", "audios"])
@pytest.mark.parametrize("of", [torch.as_tensor, np.asarray, list])
def test_a_result_is_found_under_every_name(name: str, of: Any) -> None:
    made = np.arange(12, dtype=np.float32).reshape(2, 6)
    one, other = unpack(types.SimpleNamespace(**{name: of(made)}), latents=False)
    assert isinstance(one, np.ndarray)
    assert np.array_equal(np.stack([one, other]), made)


def test_latents_stay_tensors() -> None:
    latents = torch.arange(12, dtype=torch.bfloat16).reshape(2, 6)
    one, other = unpack(types.SimpleNamespace(images=latents), latents=True)
    assert torch.equal(torch.stack([one, other]), latents)


def test_a_result_without_any_is_refused() -> None:
    with pytest.raises(ModelError, match="images, image, frames, videos, audios"):
        unpack(types.SimpleNamespace(prediction=1), latents=False)


def test_a_sound_has_channels_and_a_rate() -> None:
    pipe = FAMILIES["stable_audio"].pipeline()
    result = pipe(["a cat", "a dog"], num_inference_steps=2, audio_end_in_s=1.0, output_type="np")
    sounds = [to_sound(sound) for sound in unpack(result, latents=False)]
    assert [(sound.shape, sound.dtype) for sound in sounds] == [((2, 4), np.float32)] * 2
    assert not np.array_equal(*sounds)
    assert sample_rate_of(pipe) == 4
    assert to_sound(np.zeros(8)).shape == (1, 8)


def test_a_pipeline_that_makes_pictures_has_no_rate() -> None:
    assert sample_rate_of(FAMILIES["stable_diffusion"].build()) is None


# -- from the pipeline to the client


def request_for(n: int = 1, image: Any = None, **params: Any) -> DiffusionRequest:
    inputs = None if image is None else {"image": image}
    sampling = OmniDiffusionSamplingParams(seed=5, num_outputs_per_prompt=n, **params)
    return build_request("a red cat", sampling, multi_modal_data=inputs)


@contextmanager
def served(name: str) -> Iterator[DiffusersPipeline]:
    family = FAMILIES[name]
    with family.context():
        pipe = family.pipeline().to(dtype=torch.float32)
        report = FusionReport(True, "")
        stepper = make_stepper(pipe, report)
        try:
            yield DiffusersPipeline(
                pipe, stepper, diffusers_capabilities(pipe, report), AbortFlags()
            )
        finally:
            stepper.close()


def ran(pipeline: DiffusersPipeline, *requests: DiffusionRequest) -> list[DiffusionOutput]:
    batch = DiffusionRequestBatch(requests)
    outputs = check_results(batch, pipeline.forward(batch))
    return [DiffusionOutput.from_wire(output.raise_for_error().to_wire()) for output in outputs]


@pytest.mark.parametrize("as_list", [False, True])
def test_a_request_gets_its_sounds_and_their_rate(as_list: bool) -> None:
    with served("stable_audio") as pipeline:
        pipeline.list_call = as_list
        extra = {"audio_end_in_s": 2.0}
        two = request_for(2, num_inference_steps=2, extra_args=extra)
        (output,) = ran(pipeline, two)
        expected = [
            pipeline.pipe(
                "a red cat", num_inference_steps=2, audio_end_in_s=2.0, output_type="np",
                generator=torch.Generator().manual_seed(seed),
            ).audios[0]
            for seed in (5, 6)
        ]  # fmt: skip
    assert output.images is output.frames is output.latents is None
    assert output.sample_rate == 4
    assert output.audio is not None
    assert [sound.shape for sound in output.audio] == [sound.shape for sound in expected]
    assert output.audio[0].shape[0] == 2
    for mine, alone in zip(output.audio, expected, strict=True):
        np.testing.assert_allclose(mine, alone, atol=1e-5)


def noise(*shape: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def test_a_picture_in_layers_is_one_output() -> None:
    with served("qwen_image_layered") as pipeline:
        params = {"num_inference_steps": 2, "extra_args": {"layers": 3}}
        two, other = (
            request_for(2, noise(32, 32, 4), **params),
            request_for(1, noise(32, 32, 4)[::-1].copy(), **params),
        )
        layered, different = ran(pipeline, two, other)
    assert layered.images is None
    assert layered.frames is not None
    assert different.frames is not None
    assert [clip.shape for clip in layered.frames] == [(3, 32, 32, 4)] * 2
    assert not np.array_equal(layered.frames[0], layered.frames[1])
    assert not np.array_equal(layered.frames[0], different.frames[0]), "alpha and colours count"


@pytest.mark.parametrize("made", [np.zeros((4, 4)), np.zeros(4, np.float32)])
def test_only_floats_without_pixels_are_sounds(made: Any) -> None:
    output = make_output(request_for(), [made], OutputMetrics(), 8000)
    assert output.sample_rate == 8000
    assert output.audio is not None
    assert output.audio[0].dtype == np.float32
    grey = make_output(request_for(), [made.astype(np.uint8)], OutputMetrics(), 8000)
    assert grey.audio is None
    with pytest.raises(PipelineContractError, match="unusable images"):
        grey.to_wire()


@pytest.mark.parametrize("name", ["images", "frames", "audio"])
def test_the_number_of_outputs_is_checked_whatever_they_are(name: str) -> None:
    request = request_for(2)
    output = DiffusionOutput(request.request_id)
    setattr(output, name, [np.zeros((1, 4))])
    with pytest.raises(PipelineContractError, match="wrong number of pictures or sounds") as caught:
        check_results(DiffusionRequestBatch((request,)), [output])
    assert caught.value.to_wire()["value"] == "1"


# -- pictures with alpha


@pytest.mark.parametrize(("channels", "accepted"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_picture_has_three_channels_or_alpha(channels: int, accepted: bool) -> None:
    picture = noise(8, 8, channels)
    if accepted:
        assert request_for(image=picture).multi_modal_data["image"] is picture
        return
    with pytest.raises(InvalidRequestError, match="not acceptable") as caught:
        request_for(image=picture)
    assert caught.value.field == "multi_modal_data.image"


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("RGB", 3), ("RGBA", 4), ("LA", 4), ("P", 4), ("L", None), ("CMYK", 3)],
)
def test_alpha_of_a_pil_image_is_kept(mode: str, channels: int | None) -> None:
    picture = Image.fromarray(noise(8, 8, 4)).convert(mode)
    prompt = {"prompt": "a", "multi_modal_data": {"image": picture}}
    (request,) = build_requests([prompt], None)
    assert isinstance(request, DiffusionRequest)
    found = request.multi_modal_data["image"]
    assert found.shape == ((8, 8) if channels is None else (8, 8, channels))


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("qwen_image_layered", {1: "L", 3: "RGBA", 4: "RGBA"}),
        ("sdxl_img2img", {1: "L", 3: "RGB", 4: "RGB"}),
    ],
)
def test_a_pipeline_gets_the_alpha_that_it_takes(name: str, modes: dict[int, str]) -> None:
    builder = CallBuilder(FAMILIES[name].build())
    for channels, mode in modes.items():
        pixels = noise(8, 8) if channels == 1 else noise(8, 8, channels)
        one = builder.single(Row(request_for(image=pixels), 0))["image"]
        (listed,) = builder.single(Row(request_for(image=[pixels]), 0))["image"]
        for given in (one, listed):
            assert given.mode == mode
            colours = np.asarray(given)[..., :3] if channels > 1 else np.asarray(given)
            np.testing.assert_array_equal(colours, pixels[..., :3] if channels > 1 else pixels)
        if mode == "RGBA":
            alpha = pixels[..., 3] if channels == 4 else np.full((8, 8), 255)
            np.testing.assert_array_equal(np.asarray(one)[..., 3], alpha)


# -- files


def test_sounds_and_pictures_with_alpha_are_saved(tmp_path: Path) -> None:
    folder = PictureFolder(tmp_path)
    left = np.linspace(-1, 1, 9, dtype=np.float32)
    sounds = [np.stack([left, 2 * left]), np.stack([-left, np.full(9, np.nan, np.float32)])]
    heard = DiffusionOutput("a", audio=sounds, sample_rate=8000, seed=3)
    files = folder.write(1, "a cat", heard) + folder.write(1, "a cat", heard)
    names = ["01-a-cat-3.wav", "01-a-cat-4.wav", "01-a-cat-3-2.wav", "01-a-cat-4-2.wav"]
    assert [path.name for path in files] == names
    with wave.open(str(files[0]), "rb") as file:
        assert file.getparams()[:4] == (2, 2, 8000, 9)
        samples = np.frombuffer(file.readframes(9), "<i2").reshape(9, 2)
    np.testing.assert_allclose(samples[:, 0] / 32767, left, atol=1e-4)
    np.testing.assert_allclose(samples[:, 1] / 32767, (2 * left).clip(-1, 1), atol=1e-4)

    picture, layers = noise(6, 6, 4), noise(3, 6, 6, 4)
    (one,) = folder.write(2, "a dog", DiffusionOutput("b", images=[picture], seed=1))
    np.testing.assert_array_equal(np.asarray(Image.open(one)), picture)
    (all_layers,) = folder.write(3, "a dog", DiffusionOutput("c", frames=[layers], seed=1))
    with Image.open(all_layers) as file:
        assert (file.n_frames, file.mode) == (3, "RGBA")
