"""Loading model folders: dtype, variant, safetensors only, no remote code, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_stable_diffusion, tiny_stable_diffusion

from omni_engine.protocol.errors import ModelLoadError
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.stages.config import EngineArgs
from omni_engine.worker.loading import load_pipeline, parameter_bytes, resolve_dtype


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_stable_diffusion(tmp_path_factory.mktemp("models") / "tiny")


def load(model: Path | str, device: str = "cpu", **arguments: Any) -> Any:
    args = EngineArgs(model=str(model), **arguments).model_dump(mode="json")
    return load_pipeline(WorkerSpec("w", "ipc://nowhere", args, str(model), device))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_dtype(folder: Path, name: str, expected: torch.dtype) -> None:
    pipe = load(folder, dtype=name)
    assert {pipe.unet.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {expected}
    parameters = sum(p.numel() for m in (pipe.unet, pipe.vae, pipe.text_encoder)
                     for p in m.parameters())  # fmt: skip
    assert parameter_bytes(pipe) >= parameters * expected.itemsize


def test_automatic_dtype_depends_on_the_device() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda:0") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"


def test_variant(tmp_path: Path) -> None:
    tiny_stable_diffusion().save_pretrained(tmp_path, variant="fp16")
    assert load(tmp_path, variant="fp16").unet.dtype == torch.float32
    with pytest.raises(ModelLoadError, match="can't load model"):
        load(tmp_path, variant="ema")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tiny_stable_diffusion().save_pretrained(tmp_path, safe_serialization=False)
    assert list(tmp_path.glob("unet/*.bin"))
    with pytest.raises(ModelLoadError, match="safetensors"):
        load(tmp_path)


def test_code_in_a_model_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["unet"] = ["intruder", "Intruder"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "unet" / "intruder.py").write_text(
        "raise SystemExit('code of a model folder ran')\n"
    )
    with pytest.raises(ModelLoadError):
        load(tmp_path)


def test_an_unknown_class_is_named_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDifusionPipeline"}')
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert caught.value.field == "model_index.json:_class_name"
    assert "Did you mean 'StableDiffusionPipeline'?" in str(caught.value)


def test_a_folder_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="can't load model") as caught:
        load(tmp_path)
    assert "complete diffusers folder" in str(caught.value)


def test_a_hub_id_that_can_not_be_reached_says_what_it_needs() -> None:
    with pytest.raises(ModelLoadError) as caught:
        load("nobody/has-this-model")
    assert "network access" in str(caught.value)
    assert "HF_TOKEN" in str(caught.value)


def test_half_a_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_bytes((folder / "model_index.json").read_bytes())
    with pytest.raises(ModelLoadError, match="can't load model"):
        load(tmp_path)


def test_a_device_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="no cuda device") as caught:
        load(folder, device="cuda:0")
    assert caught.value.field == "devices"
