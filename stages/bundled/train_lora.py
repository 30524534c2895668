"""Trains an adapter on pictures with captions: what `omni-engine train-lora` runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omni_engine.protocol.errors import ConfigError, shorten

from . import architecture
from .adapter_training import Run, TrainingStopped, model_digest, train_layers, write_adapter
from .caption_folder import CaptionedPictures
from .latents import LatentSet, encode_batches, normalize
from .recipe import AdapterRecipe
from .score import load_pipeline
from .tokenizer import in_template

if TYPE_CHECKING:
    from torch import Tensor

_PIPELINE_CLASS = "QwenImagePipeline"
_PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Trained:
    """What a training made.

    Attributes:
        path: The adapter's file.
        layers: Its tensors in float32, by PEFT's names.
        about: What the file's metadata tells beside rank, alpha and steps.
    """

    path: Path
    layers: dict[str, Tensor]
    about: dict[str, str]


def checkpoint_path(out: Path) -> Path:
    """Gives the file in which a training that writes to `out` keeps its state."""
    return out.with_suffix(".checkpoint")


def train_lora(
    data: CaptionedPictures,
    out: Path,
    model: Path,
    recipe: AdapterRecipe,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Trains an adapter and writes it; an existing file is replaced at the end, in one go.

    Args:
        data: What to learn.
        out: The safetensors file to write. The checkpoint lies beside it until it is written.
        model: The folder of the bundled model, or of one that `train` made.
        recipe: What to train, and how.
        resume: Goes on from the checkpoint, if there is one.
        stop: Asked after every step; True saves the checkpoint and ends the training.

    Raises:
        ConfigError: The model is of another kind; a caption is too long for it; there is a
            checkpoint, but `resume` is False, or it is of another training.
        ModelError: The training diverged.
        TrainingStopped: `stop` said so.
    """
    checkpoint = checkpoint_path(out)
    _check_out(out)
    if checkpoint.exists() and not resume:
        raise ConfigError(
            f"there is a checkpoint of an earlier training, {checkpoint}",
            field="resume",
            hint="go on with it by --resume, or remove it to start anew",
        )
    check_model(model)
    about = {
        "base_model": model.resolve().name,
        "base_model_digest": model_digest(model),
        "data_digest": data.digest(),
        "pictures": str(len(data.pictures)),
        "captions": str(len(set(data.captions))),
    }
    pipeline = load_pipeline(model)
    _check_captions(pipeline, data)
    latents = _encoded(pipeline.vae, data, stop)
    layers = train_layers(
        pipeline, latents, recipe, Run(checkpoint, about, stop, _PROGRESS_SECONDS)
    )
    write_adapter(out, layers, recipe, about)
    checkpoint.unlink(missing_ok=True)
    return Trained(out, layers, about)


def check_model(folder: Path) -> None:
    """Checks that a folder holds a model of the bundled one's kind, from its configurations.

    Raises:
        ConfigError: It doesn't; the message says what it holds.
    """
    index = folder / "model_index.json"
    if not index.is_file():
        raise _model_error(folder, "is no diffusers folder: it has no model_index.json")
    if (name := _read(index, folder).get("_class_name")) != _PIPELINE_CLASS:
        raise _model_error(folder, f"holds a {shorten(name)}")
    for part, wanted in (
        ("transformer", architecture.TRANSFORMER),
        ("vae", architecture.VAE),
    ):
        config = _read(folder / part / "config.json", folder)
        for key, value in wanted.items():
            if (found := config.get(key)) != value:
                raise _model_error(folder, f"has a {part} with {key} {shorten(found)}, not {value}")


def _read(path: Path, folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _model_error(folder, f"has no readable {path.name}: {error}") from None
    if not isinstance(content, dict):
        raise _model_error(folder, f"has a {path.name} that is no JSON object")
    return content


def _model_error(folder: Path, said: str) -> ConfigError:
    return ConfigError(
        f"{folder} {said}",
        field="model",
        value=str(folder),
        expected="the bundled model, or a folder that omni_engine.stages.bundled.train made",
        hint="other models' adapters are trained with diffusers' training scripts; omni-engine "
        "serves them all the same",
    )


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors" or out.is_dir():
        raise ConfigError(
            "the result must be a safetensors file",
            field="out",
            value=str(out),
            expected="a path that ends with .safetensors",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe = out.with_name(f".{out.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"nothing can be written there: {error.strerror}", field="out", value=str(out)
        ) from None


def _check_captions(pipeline: Any, data: CaptionedPictures) -> None:
    longest = pipeline.text_encoder.config.text_config.max_position_embeddings
    for name, caption in zip(data.names, data.captions, strict=True):
        tokens = len(pipeline.tokenizer(in_template(caption)).input_ids)
        if tokens > longest:
            raise ConfigError(
                f"the caption of {name} is too long for the model: {tokens} tokens",
                field="data",
                value=caption,
                expected=f"at most {longest} tokens",
            )


def _encoded(vae: Any, data: CaptionedPictures, stop: Callable[[], bool]) -> LatentSet:
    batches = []
    for batch in encode_batches(vae, data.pictures):
        if stop():
            raise TrainingStopped(0)
        batches.append(batch)
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return LatentSet(data.captions, normalize(torch.cat(batches), mean, std), mean, std)
