"""LoRA on the bundled model: the right adapter on every picture, and the bare model untouched."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.numpy import load_file, save_file

from omni_engine import DiffusionOutput, LoRARequest, Omni, OmniDiffusionSamplingParams
from omni_engine.protocol.errors import ConfigError, ModelLoadError, UnknownAdapterError
from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR

PROMPT = "a large red square on a white background"
STYLES = ("outline", "night")


@pytest.fixture(scope="module")
def omni(start_engine: Callable[..., Omni]) -> Omni:
    """The bundled stage as shipped: both styles are registered."""
    return start_engine(max_num_seqs=4, threads=1)


def params(lora: str | None = None, scale: float | None = None, **fields: Any) -> Any:
    request = None if lora is None else LoRARequest(lora, scale)
    return OmniDiffusionSamplingParams(lora_request=request, **{"seed": 3, **fields})


def picture(output: DiffusionOutput) -> np.ndarray[Any, Any]:
    assert output.raise_for_error().images is not None
    return output.images[0]


def plain(lora: str | None, scale: float = 1.0, steps: int = 16) -> np.ndarray[Any, Any]:
    torch.set_num_threads(1)
    pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(ADAPTER_DIR, weight_name=f"{lora}.safetensors", adapter_name=lora)
        pipe.set_adapters([lora], [scale])
    made = pipe(
        PROMPT, negative_prompt=" ", true_cfg_scale=3.0, height=64, width=64,
        num_inference_steps=steps, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    return np.asarray(made.images[0])


def test_each_style_shows_in_the_pixels_and_equals_plain_diffusers(omni: Omni) -> None:
    base, outline, night = omni.generate(
        [PROMPT] * 3, [params(), params("outline"), params("night")]
    )
    centre = (slice(28, 36), slice(28, 36))
    assert picture(base)[centre].mean(axis=(0, 1))[1] < 100, "a filled red square"
    assert picture(outline)[centre].mean(axis=(0, 1))[1] > 150, "only its outline is drawn"
    assert picture(night).mean() < 0.6 * picture(base).mean(), "a darkened palette"
    for output, style in zip((base, outline, night), (None, *STYLES), strict=True):
        assert np.abs(picture(output).astype(int) - plain(style)).max() <= 1


def test_outputs_report_the_adapter_that_was_active(omni: Omni) -> None:
    one = {"num_inference_steps": 1}
    base, half, default = omni.generate(
        [PROMPT] * 3, [params(**one), params("night", 0.500004, **one), params("night", **one)]
    )
    assert base.applied_loras == []
    (applied,) = half.applied_loras
    digest = hashlib.sha256((ADAPTER_DIR / "night.safetensors").read_bytes()).hexdigest()
    assert (applied.name, applied.digest, applied.scale) == ("night", digest, 0.5)
    assert default.applied_loras[0].scale == 1.0


def test_the_bare_model_is_bit_identical_after_any_history_of_adapters(
    omni: Omni, start_own_engine: Callable[..., Omni]
) -> None:
    asked = params(num_inference_steps=3)
    history = [params(style, scale, num_inference_steps=1) for style in STYLES for scale in (1, 2)]
    for one in history:
        omni.generate(PROMPT, one)
    (after,) = omni.generate(PROMPT, asked)
    untouched = start_own_engine(max_num_seqs=4, threads=1, lora_modules=[])
    (before,) = untouched.generate(PROMPT, asked)
    np.testing.assert_array_equal(picture(after), picture(before))


def test_scale_zero_means_the_bare_model(omni: Omni) -> None:
    asked = {"num_inference_steps": 2}
    zero, bare = omni.generate([PROMPT] * 2, [params("night", 0, **asked), params(**asked)])
    np.testing.assert_array_equal(picture(zero), picture(bare))
    assert zero.applied_loras == []
    assert zero.metrics.max_batch_size == 2, "they share a batch"


@pytest.mark.parametrize(("policy", "at_most", "at_least"), [("grouped", 12, 10), ("fifo", 40, 40)])
def test_alternating_adapters(
    start_own_engine: Callable[..., Omni], policy: str, at_most: int, at_least: int
) -> None:
    omni = start_own_engine(
        max_num_seqs=4, threads=1, scheduling_policy=policy,
        **({"max_skip_ms": 60_000} if policy == "grouped" else {}),
    )  # fmt: skip
    asked = [params(STYLES[i % 2], num_inference_steps=1, seed=i) for i in range(40)]
    outputs = omni.generate([PROMPT] * 40, asked)
    for i, output in enumerate(outputs):
        assert output.raise_for_error().applied_loras[0].name == STYLES[i % 2]
    (stage,) = omni.status()["stages"]
    number = sum(stage["batch_sizes"].values())
    assert at_least <= number <= at_most
    assert sum(int(size) * n for size, n in stage["batch_sizes"].items()) == 40


def test_an_unknown_adapter_is_refused_with_the_nearest_name(omni: Omni) -> None:
    good, bad = omni.generate(
        [PROMPT] * 2, [params(num_inference_steps=1), params("nigth", num_inference_steps=1)]
    )
    assert good.error is None
    assert isinstance(bad.error, UnknownAdapterError)
    assert bad.error.field == "lora_request.name"
    assert "'night'" in str(bad.error)


def test_default_adapter_applies_when_a_request_names_none(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(max_num_seqs=4, threads=1, default_lora={"name": "night", "scale": 0.5})
    default, other, none = omni.generate(
        [PROMPT] * 3,
        [
            params(num_inference_steps=1),
            params("outline", num_inference_steps=1),
            params("night", 0, num_inference_steps=1),
        ],
    )
    assert [(lora.name, lora.scale) for lora in default.applied_loras] == [("night", 0.5)]
    assert [(lora.name, lora.scale) for lora in other.applied_loras] == [("outline", 1.0)]
    assert none.applied_loras == []


def test_an_adapter_that_fits_the_model_in_part_is_refused_and_others_serve(
    start_own_engine: Callable[..., Omni], tmp_path: Path
) -> None:
    weights = load_file(ADAPTER_DIR / "night.safetensors")
    wrong = {name.replace("transformer_blocks.0.", "blocks.0."): w for name, w in weights.items()}
    save_file(wrong, tmp_path / "partial.safetensors")
    prefixed = {f"other.{name.removeprefix('transformer.')}": w for name, w in weights.items()}
    save_file(prefixed, tmp_path / "prefixed.safetensors")
    (tmp_path / "garbage.safetensors").write_bytes(b"\x00" * 100)
    names = ("partial", "prefixed", "garbage")
    modules = [{"name": name, "path": str(tmp_path / f"{name}.safetensors")} for name in names]
    modules.append({"name": "night", "path": str(ADAPTER_DIR / "night.safetensors")})
    omni = start_own_engine(max_num_seqs=4, threads=1, lora_modules=modules)
    outputs = omni.generate(
        [PROMPT] * 5, [params(n, num_inference_steps=2) for n in (*names, "night", None)]
    )
    for name, output in zip(names, outputs[:3], strict=True):
        assert isinstance(output.error, ModelLoadError)
        assert output.error.field == "lora_modules"
        assert name in str(output.error)
    assert outputs[3].raise_for_error().applied_loras[0].name == "night"
    assert np.abs(picture(outputs[3]).astype(int) - plain("night", steps=2)).max() <= 1
    assert np.abs(picture(outputs[4]).astype(int) - plain(None, steps=2)).max() <= 1
    (stage,) = omni.status()["stages"]
    errors = {adapter["name"]: adapter["error"] for adapter in stage["adapters"]}
    assert errors["night"] is None
    assert all(errors[name] for name in names)


def test_a_missing_adapter_file_is_refused_at_the_start(tmp_path: Path) -> None:
    module = {"name": "gone", "path": str(tmp_path / "gone.safetensors")}
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        Omni(devices="cpu", lora_modules=[module])


def test_more_adapters_than_stay_loaded(start_own_engine: Callable[..., Omni]) -> None:
    omni = start_own_engine(max_num_seqs=4, threads=1, max_loras=1)
    for style in (*STYLES, *STYLES):
        (output,) = omni.generate(PROMPT, params(style, num_inference_steps=2))
        assert np.abs(picture(output).astype(int) - plain(style, steps=2)).max() <= 1
