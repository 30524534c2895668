"""Trains a low-rank adapter of the transformer and writes it; the one loop of every adapter."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from torch import nn

from omni_engine.protocol.errors import ConfigError, ModelError, nearest

from .denoiser_training import choose_variants, flow_loss, text_states, tokenize_variants
from .recipe import AdapterRecipe
from .training import (
    PROGRESS_SECONDS,
    Progress,
    TrainingState,
    learning_rate,
    load_metadata,
    save_tensors,
    step_generator,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .latents import LatentSet

_WARM_UP: Final = 20
_STEP: Final = "step"


class TrainingStopped(Exception):  # noqa: N818 (nothing went wrong)
    """Somebody asked a training to stop; its checkpoint holds every step that was made."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


@dataclass(frozen=True)
class Run:
    """What surrounds a training.

    Attributes:
        checkpoint: The file to go on from, if it is there, and to save to.
        about: What the result depends on besides the recipe, such as digests, by name. A checkpoint
            of another model or other data is refused by it.
        stop: Asked after every step; True saves the checkpoint and ends the training.
        progress_seconds: How often a line tells the progress.
    """

    checkpoint: Path
    about: Mapping[str, str]
    stop: Callable[[], bool] = lambda: False
    progress_seconds: float = PROGRESS_SECONDS


def train_layers(
    pipeline: Any, data: LatentSet, recipe: AdapterRecipe, run: Run
) -> dict[str, Tensor]:
    """Trains an adapter, or goes on from the checkpoint; the pipeline carries it afterwards.

    Args:
        pipeline: A loaded QwenImagePipeline, float32, without adapters.
        data: Captions and latents.
        recipe: What to train, and how.
        run: Checkpoint, progress and stop.

    Returns:
        The adapter's tensors, float32, by the names that PEFT gives them.

    Raises:
        ConfigError: The recipe doesn't fit the model, or the checkpoint is of another training.
        ModelError: The loss is no number any more.
        TrainingStopped: `run.stop` said so.
    """
    transformer = pipeline.transformer.requires_grad_(False)
    check_targets(transformer, recipe.targets)
    torch.manual_seed(recipe.seed)
    config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, target_modules=list(recipe.targets))
    transformer.add_adapter(config)
    trained = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    state = TrainingState(
        {"adapter": nn.ParameterList(trained)},
        optimizer,
        run.checkpoint,
        about=_identity(recipe, run.about),
    )
    _check_checkpoint(state, recipe.steps)
    state.restore()
    _fit(pipeline, data, recipe, state, run)
    layers: dict[str, Tensor] = get_peft_model_state_dict(transformer)
    return layers


def write_adapter(
    path: Path, layers: Mapping[str, Tensor], recipe: AdapterRecipe, about: Mapping[str, str]
) -> None:
    """Writes an adapter as diffusers' `load_lora_weights` reads it, never leaving half a file.

    Args:
        path: The safetensors file to write, float16.
        layers: The tensors, as `train_layers` returns them.
        recipe: What they were trained with.
        about: Further entries of the file's metadata.

    Raises:
        ModelError: A value is no number in float16.
    """
    tensors = {f"transformer.{key}": tensor.half() for key, tensor in layers.items()}
    if broken := [key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ModelError(
            f"the trained adapter holds values that are no numbers, in {broken[0]}",
            hint="train with a lower learning rate",
        )
    # Without it a loader takes alpha for the rank, and scale 1.0 would have another strength.
    config = {
        "transformer.r": recipe.rank,
        "transformer.lora_alpha": recipe.alpha,
        "transformer.target_modules": list(recipe.targets),
    }
    metadata = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(config, indent=2, sort_keys=True),
        "rank": str(recipe.rank),
        "alpha": str(recipe.alpha),
        "steps": str(recipe.steps),
    }
    save_tensors(path, tensors, {**metadata, **about})


def model_digest(folder: Path) -> str:
    """Gives the SHA-256 of a diffusers folder's configurations and weights, in hexadecimal."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".safetensors"))
    digest = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def check_targets(transformer: nn.Module, targets: tuple[str, ...]) -> None:
    """Checks that each target names linear layers of the transformer.

    Raises:
        ConfigError: One doesn't; the message names it and the nearest that does.
    """
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = {_without_block(name) for name in linear}
            close = nearest(target, known)
            raise ConfigError(
                "the transformer has no linear layer of that name",
                field="target_modules",
                value=target,
                expected=", ".join(sorted(known)),
                hint=f"did you mean {close}?" if close else None,
            )


def _without_block(name: str) -> str:
    # transformer_blocks.0.attn.to_q: the blocks are alike, so a target leaves out which one.
    parts = name.split(".")
    if parts[0] != "transformer_blocks":
        return name
    return ".".join(parts[3:] if parts[2] == "attn" else parts[2:])


def _identity(recipe: AdapterRecipe, about: Mapping[str, str]) -> dict[str, str]:
    """Names all that must stay the same from a checkpoint on; the number of steps may change."""
    settings = {name: value for name, value in vars(recipe).items() if name != "steps"}
    return {**{name: json.dumps(value) for name, value in settings.items()}, **about}


def _check_checkpoint(state: TrainingState, steps: int) -> None:
    if not state.path.exists():
        return
    try:
        saved = load_metadata(state.path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"the checkpoint {state.path} can't be read: {error}", hint="remove it to start anew"
        ) from None
    for name, value in state.about.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"the checkpoint {state.path} is of a training with another {name}",
                field=name,
                value=value,
                expected=saved.get(name),
                hint="go on with what it was begun with, or remove the checkpoint to start anew",
            )
    if int(saved[_STEP]) > steps:
        raise ConfigError(
            f"the checkpoint {state.path} has made {saved[_STEP]} steps already",
            field="steps",
            value=steps,
            expected=f"at least {saved[_STEP]}",
        )


def _fit(
    pipeline: Any, data: LatentSet, recipe: AdapterRecipe, state: TrainingState, run: Run
) -> None:
    trained = list(state.networks["adapter"].parameters())
    captions = tokenize_variants(pipeline.tokenizer, data.captions)
    progress = Progress("adapter", state.step, recipe.steps, run.progress_seconds)
    while state.step < recipe.steps:
        if run.stop():
            state.save()
            raise TrainingStopped(state.step)
        state.set_rate(
            learning_rate(state.step, recipe.steps, recipe.learning_rate, _WARM_UP, floor=0.01)
        )
        generator = step_generator(recipe.seed, state.step)
        rows = torch.randint(len(data.captions), (recipe.batch_size,), generator=generator)
        chosen = captions.rows(choose_variants(rows, len(data.captions), generator))
        with torch.no_grad():
            states, mask = text_states(pipeline.text_encoder, chosen)
        loss = flow_loss(pipeline.transformer, states, mask, data.latents[rows], generator)
        if not math.isfinite(loss.item()):
            raise ModelError(
                f"the loss is no number any more at step {state.step + 1}",
                hint="train with a lower learning rate",
            )
        state.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained, 1.0)
        state.optimizer.step()
        state.step += 1
        progress.update(state.step, {"loss": loss.item()})
        state.save_if_due()
