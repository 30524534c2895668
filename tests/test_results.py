"""What a pipeline returns, taken apart into one result per row."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES

from omni_engine.protocol.errors import ModelError
from omni_engine.worker.row_calls import sample_rate_of, unpack
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
