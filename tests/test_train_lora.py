"""`omni-engine train-lora`: an adapter from a folder of pictures with captions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from omni_engine.protocol.errors import ConfigError, ModelError
from omni_engine.stages.bundled import MODEL_DIR, pictures, training
from omni_engine.stages.bundled.adapter_training import (
    TrainingStopped,
    model_digest,
    write_adapter,
)
from omni_engine.stages.bundled.caption_folder import CaptionedPictures, read_caption_folder
from omni_engine.stages.bundled.denoiser_training import flow_loss, text_states, tokenize
from omni_engine.stages.bundled.export_style import export_style
from omni_engine.stages.bundled.latents import encode_batches, normalize
from omni_engine.stages.bundled.recipe import AdapterRecipe
from omni_engine.stages.bundled.score import load_pipeline
from omni_engine.stages.bundled.train_lora import check_model, checkpoint_path, train_lora

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
SHORT = AdapterRecipe(rank=4, alpha=12, targets=("to_q", "to_v"), steps=6, batch_size=4)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "silhouette"
    export_style(folder, "silhouette", 24)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> CaptionedPictures:
    return read_caption_folder(folder)


@pytest.fixture(scope="module")
def unbroken(data: CaptionedPictures, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What SHORT makes of the data in one go."""
    out = tmp_path_factory.mktemp("unbroken") / "adapter.safetensors"
    return train_lora(data, out, MODEL_DIR, SHORT).path


def stop_after(steps: int, batches: int = 1) -> Callable[[], bool]:
    """Says that it's time to stop after some steps; it's asked for each encoded batch, too."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= steps + batches


def assert_same(one: Path, other: Path) -> None:
    """Same tensors and metadata; the order of a safetensors file's metadata is arbitrary."""
    (tensors, metadata), (expected, told) = map(training.load_tensors, (one, other))
    assert metadata == told
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in tensors)


def interrupted(data: CaptionedPictures, out: Path, recipe: AdapterRecipe = SHORT) -> None:
    with pytest.raises(TrainingStopped) as stopped:
        train_lora(data, out, MODEL_DIR, recipe, stop=stop_after(3))
    assert stopped.value.step == 3


# The folder


def caption(folder: Path, name: str, text: str, size: tuple[int, int] = (64, 64)) -> None:
    Image.new("RGB", size, "red").save(folder / name)
    (folder / name).with_suffix(".txt").write_text(text)


def as_metadata(folder: Path, target: Path) -> None:
    """The same pictures and captions in the layout of `datasets`' imagefolder."""
    target.mkdir()
    lines = []
    for text in sorted(folder.glob("*.txt")):
        name = text.with_suffix(".png").name
        (target / name).write_bytes((folder / name).read_bytes())
        lines.append(json.dumps({"file_name": name, "text": text.read_text(), "other": 1}))
    (target / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def test_an_exported_style_reads_back_in_both_layouts(folder: Path, tmp_path: Path) -> None:
    found = read_caption_folder(folder)
    assert len(found.pictures) == 24
    assert not any(pictures.is_held_out(pictures.parse(text)) for text in found.captions)
    assert np.array_equal(found.pictures[3], np.asarray(Image.open(folder / "0003.png")))
    assert found.captions[3] == (folder / "0003.txt").read_text().strip()
    as_metadata(folder, tmp_path / "metadata")
    other = read_caption_folder(tmp_path / "metadata")
    assert (other.names, other.captions) == (found.names, found.captions)
    assert other.digest() == found.digest()
    with pytest.raises(FileExistsError, match="not empty"):
        export_style(folder, "tiny", 1)


def test_pictures_of_another_size_are_cropped_around_their_middle(tmp_path: Path) -> None:
    wide = Image.new("RGB", (256, 128), "red")
    wide.paste("blue", (64, 0, 192, 128))
    wide.save(tmp_path / "wide.webp", lossless=True)
    glass = Image.new("RGBA", (10, 30), (0, 0, 0, 0))
    glass.save(tmp_path / "glass.PNG")
    Image.new("L", (64, 64), 100).save(tmp_path / "gray.jpg")
    (tmp_path / "sub").mkdir()
    for name in ("wide", "glass", "gray"):
        (tmp_path / f"{name}.txt").write_text(" two\n lines ", encoding="utf-8-sig")
    caption(tmp_path / "sub", "deep.jpeg", "a red picture")
    (tmp_path / ".hidden.png").write_bytes(b"")
    found = read_caption_folder(tmp_path)
    assert found.names == ["glass.PNG", "gray.jpg", "sub/deep.jpeg", "wide.webp"]
    assert found.captions == ["two lines", "two lines", "a red picture", "two lines"]
    assert {p.shape for p in found.pictures} == {(64, 64, 3)}
    assert np.all(found.pictures[0] == 255)
    assert np.abs(found.pictures[1].astype(int) - 100).max() <= 2
    assert np.all(found.pictures[3][:, 4:-4] == (0, 0, 255))
    assert np.all(found.pictures[3][..., 2] > 200)


def _without_caption(folder: Path) -> None:
    (folder / "b.txt").unlink()


def _unreadable_picture(folder: Path) -> None:
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:60])


def _no_picture_at_all(folder: Path) -> None:
    (folder / "b.png").write_bytes(b"something else")


def _metadata(*lines: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for text in folder.glob("*.txt"):
            text.unlink()
        rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "metadata.jsonl").write_text("\n".join(rows))

    return write


A, B = {"file_name": "a.png", "text": "x"}, {"file_name": "b.png", "text": "y"}
BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (_without_caption, "b.png has no caption"),
    (lambda folder: (folder / "b.txt").write_text(" \n"), "b.png: the caption is empty"),
    (lambda folder: (folder / "b.txt").write_bytes(b"\xff\xfe\xff"), "b.txt can't be read"),
    (_unreadable_picture, "b.png can't be read"),
    (_no_picture_at_all, "b.png can't be read"),
    (lambda folder: (folder / "c.txt").write_text("x"), "c.txt belongs to no picture"),
    (lambda folder: (folder / "c.bmp").write_bytes(b"BM"), "c.bmp: pictures must be .png"),
    (lambda folder: (folder / "metadata.jsonl").touch(), "b.txt: captions are in metadata.jsonl"),
    (_metadata(A), "b.png has no caption"),
    (_metadata(A, {"file_name": "b.png", "text": ""}), "b.png: the caption is empty"),
    (_metadata(A, "{"), "metadata.jsonl:2: no JSON"),
    (_metadata(A, ["b.png"]), 'metadata.jsonl:2: "file_name" and "text" must both be text'),
    (_metadata(A, {"file_name": "b.png"}), 'metadata.jsonl:2: "file_name" and "text" must both'),
    (_metadata(A, B, B), "metadata.jsonl:3: b.png has a caption already"),
    (_metadata(A, {**B, "file_name": "../b.png"}), "metadata.jsonl:2: there is no picture ../b"),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_a_broken_folder_is_refused_by_the_files_name(
    tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    caption(tmp_path, "a.png", "a red picture")
    caption(tmp_path, "b.png", "another red picture")
    assert len(read_caption_folder(tmp_path).names) == 2
    break_it(tmp_path)
    with pytest.raises(ConfigError) as refused:
        read_caption_folder(tmp_path)
    assert message in refused.value.message


def test_folders_without_pictures_are_refused_and_long_lists_of_problems_shortened(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_caption_folder(tmp_path / "missing")
    with pytest.raises(ConfigError, match="it holds no pictures"):
        read_caption_folder(tmp_path)
    for number in range(8):
        caption(tmp_path, f"{number}.png", "")
    with pytest.raises(ConfigError, match=r"0\.png: .* 4\.png: the caption is empty; and 3 more"):
        read_caption_folder(tmp_path)


# Training


def mean_loss(pipeline: Any, data: CaptionedPictures) -> float:
    """The loss over all pictures, at noise and noise levels that don't change between calls."""
    config = pipeline.vae.config
    mean, std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    latents = normalize(torch.cat(list(encode_batches(pipeline.vae, data.pictures))), mean, std)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        states, mask = text_states(
            pipeline.text_encoder, tokenize(pipeline.tokenizer, data.captions)
        )
        losses = [
            flow_loss(pipeline.transformer, states, mask, latents, generator) for _ in range(4)
        ]
    return float(torch.stack(losses).mean())


def test_the_adapter_loads_in_plain_diffusers_at_its_strength_and_has_learnt(
    data: CaptionedPictures, tmp_path: Path
) -> None:
    recipe = AdapterRecipe(rank=4, alpha=12, steps=40, batch_size=8)
    out = tmp_path / "new" / "silhouette.safetensors"
    trained = train_lora(data, out, MODEL_DIR, recipe)
    assert trained.path == out
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    with safe_open(out, framework="pt") as file:
        metadata = file.metadata()
        dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert dtypes == {"F16"}
    told = {key: metadata[key] for key in ("rank", "alpha", "steps", "pictures", "captions")}
    expected = {"rank": "4", "alpha": "12", "steps": "40", "pictures": "24"}
    assert told == {**expected, "captions": str(len(set(data.captions)))}
    assert metadata["base_model_digest"] == model_digest(MODEL_DIR)
    pipeline = load_pipeline(adapter=out)
    layers = [m for m in pipeline.transformer.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 2 + 4 * 8
    assert {layer.scaling["style"] for layer in layers} == {3.0}
    with_adapter = mean_loss(pipeline, data)
    pipeline.disable_lora()
    assert with_adapter < 0.8 * mean_loss(pipeline, data)


def test_a_resumed_training_ends_where_an_unbroken_one_does(
    data: CaptionedPictures, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    interrupted(data, out)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_path(out).name]
    train_lora(data, out, MODEL_DIR, SHORT, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert_same(out, unbroken)


def test_a_training_stopped_before_its_first_step_keeps_nothing(
    data: CaptionedPictures, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    with pytest.raises(TrainingStopped) as stopped:
        train_lora(data, out, MODEL_DIR, SHORT, stop=lambda: True)
    assert stopped.value.step == 0
    assert not list(tmp_path.iterdir())


def test_another_seed_makes_another_adapter(
    data: CaptionedPictures, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    train_lora(data, out, MODEL_DIR, replace(SHORT, seed=14, steps=2))
    one, other = load_file(unbroken), load_file(out)
    assert one.keys() == other.keys()
    assert not any(torch.equal(one[key], other[key]) for key in one)


def test_checkpoints_of_other_trainings_are_refused_by_what_differs(
    data: CaptionedPictures, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    interrupted(data, out)
    begun = checkpoint_path(out).read_bytes()
    with pytest.raises(ConfigError, match=r"checkpoint of an earlier training.*--resume"):
        train_lora(data, out, MODEL_DIR, SHORT)
    changes: dict[str, tuple[CaptionedPictures, AdapterRecipe]] = {
        "rank": (data, replace(SHORT, rank=2)),
        "targets": (data, replace(SHORT, targets=("to_q",))),
        "batch_size": (data, replace(SHORT, batch_size=3)),
        "steps": (data, replace(SHORT, steps=2)),
        "data_digest": (replace(data, captions=["x", *data.captions[1:]]), SHORT),
    }
    for field, (learnt, recipe) in changes.items():
        with pytest.raises(ConfigError) as refused:
            train_lora(learnt, out, MODEL_DIR, recipe, resume=True)
        assert refused.value.field == field
    assert checkpoint_path(out).read_bytes() == begun
    checkpoint_path(out).write_bytes(begun[:1000])
    with pytest.raises(ConfigError, match="can't be read"):
        train_lora(data, out, MODEL_DIR, SHORT, resume=True)
    assert not out.exists()


def test_layers_that_the_transformer_lacks_are_refused_by_name(
    data: CaptionedPictures, tmp_path: Path
) -> None:
    recipe = replace(SHORT, targets=("to_q", "add_k_pro"))
    with pytest.raises(ConfigError) as refused:
        train_lora(data, tmp_path / "adapter.safetensors", MODEL_DIR, recipe)
    error = refused.value
    assert (error.field, error.value) == ("target_modules", "add_k_pro")
    assert error.hint == "did you mean add_k_proj?"
    assert "img_mlp.net.0.proj" in str(error.expected)


def test_captions_beyond_the_text_encoder_are_refused_by_name(
    data: CaptionedPictures, tmp_path: Path
) -> None:
    long = replace(data, captions=[*data.captions[:-1], "red " * 600])
    with pytest.raises(ConfigError, match=r"caption of 0023\.png is too long .* tokens"):
        train_lora(long, tmp_path / "adapter.safetensors", MODEL_DIR, SHORT)


def _other_model(folder: Path, part: str, changes: dict[str, object]) -> None:
    for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
        content = json.loads((MODEL_DIR / name).read_text())
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content | (changes if name == part else {})))


def test_models_of_another_kind_are_refused(tmp_path: Path) -> None:
    check_model(MODEL_DIR)
    with pytest.raises(ConfigError, match="no diffusers folder"):
        check_model(tmp_path)
    _other_model(tmp_path, "", {})
    check_model(tmp_path)
    _other_model(tmp_path, "model_index.json", {"_class_name": "FluxPipeline"})
    with pytest.raises(ConfigError, match=r"holds a FluxPipeline.*bundled model"):
        check_model(tmp_path)
    _other_model(tmp_path, "transformer/config.json", {"num_layers": 60})
    with pytest.raises(ConfigError, match="transformer with num_layers 60, not 4"):
        check_model(tmp_path)
    _other_model(tmp_path, "vae/config.json", {"z_dim": 4})
    with pytest.raises(ConfigError, match="vae with z_dim 4, not 16"):
        check_model(tmp_path)


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_half_one(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "adapter.safetensors"
    out.write_bytes(b"the old one")

    def save_half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "save_file", save_half)
    with pytest.raises(KeyboardInterrupt):
        write_adapter(out, load_file(unbroken), SHORT, {})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"the old one"]


def test_an_adapter_that_is_no_numbers_is_not_written(tmp_path: Path) -> None:
    too_large = {"proj_out.lora_A.weight": torch.tensor([1e6])}
    with pytest.raises(ModelError, match=r"no numbers, in transformer\.proj_out"):
        write_adapter(tmp_path / "adapter.safetensors", too_large, SHORT, {})
    assert not list(tmp_path.iterdir())


# The command


def options(folder: Path, out: Path, steps: int) -> list[str]:
    return [
        COMMAND, "train-lora", "--data", str(folder), "--out", str(out), "--steps", str(steps),
        "--batch-size", "4", "--rank", "4", "--alpha", "12", "--target-modules", "to_q, to_v",
    ]  # fmt: skip


def test_ctrl_c_leaves_a_checkpoint_from_which_the_command_resumes(
    folder: Path, data: CaptionedPictures, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    process = subprocess.Popen(
        options(folder, out, 100_000), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("24 pictures, 24 different captions; rank 4")
    assert process.stdout.readline().startswith("adapter step 1/100000 loss ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped after step" in errors
    assert "--resume" in errors
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_path(out).name]
    begun = int(training.load_metadata(checkpoint_path(out))["step"])
    assert begun >= 1
    again = subprocess.run(
        [*options(folder, out, begun + 2), "--resume"], capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 0, again.stderr
    assert f"adapter step {begun + 1}/{begun + 2} " in again.stdout
    assert again.stdout.endswith(f"written: {out}\n")
    assert again.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_commands_result_is_the_functions(
    folder: Path, data: CaptionedPictures, unbroken: Path, tmp_path: Path
) -> None:
    out = tmp_path / "adapter.safetensors"
    done = subprocess.run(options(folder, out, SHORT.steps), capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert_same(out, unbroken)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere", "--out", "x.safetensors"], "there is no such folder"),
        (["--data", "{data}", "--out", "x.bin"], "must be a safetensors file"),
        (["--data", "{data}", "--out", "x.safetensors", "--model", "."], "is no diffusers folder"),
        (["--data", "{data}", "--out", "x.safetensors", "--rank", "0"], "--rank"),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(
    folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = [argument.replace("{data}", str(folder)) for argument in arguments]
    done = subprocess.run(
        [COMMAND, "train-lora", *given], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
