"""Trains a style adapter: `python -m omni_engine.stages.bundled.train_adapter --style outline`.

The adapter is a low-rank addition to the transformer, learnt from pictures of the same sentences
drawn in another style, and saved as diffusers' `load_lora_weights` reads it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImagePipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch import nn

from . import ADAPTER_DIR, MODEL_DIR, pictures
from .denoiser_training import choose_variants, flow_loss, text_states, tokenize_variants
from .latents import LatentSet, make_latents
from .training import Progress, learning_rate, step_generator

if TYPE_CHECKING:
    from torch import Tensor

RANK = 8
ALPHA = 16
TARGETS = (
    "img_in",
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_k_proj",
    "add_v_proj",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "proj_out",
)

_SEED = 13
_LATENT_SEED = 22
_BATCH = 32
_PEAK_RATE = 3e-3
_WARM_UP = 20


def train_adapter(
    model: Path, out: Path, style: pictures.Style, steps: int = 1000, count: int = 1600
) -> None:
    """Trains an adapter on a model and writes it.

    Args:
        model: The diffusers folder of the model.
        out: The safetensors file to write, float16.
        style: The style to learn.
        steps: Training steps.
        count: How many pictures to learn from.
    """
    pipeline = QwenImagePipeline.from_pretrained(model, dtype=torch.float32)
    data = make_latents(pipeline.vae, count, _LATENT_SEED, style, _statistics(pipeline.vae))
    torch.manual_seed(_SEED)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
    transformer = pipeline.transformer.requires_grad_(False)
    transformer.add_adapter(config)
    _fit(pipeline, data, steps)
    layers = get_peft_model_state_dict(transformer)
    QwenImagePipeline.save_lora_weights(
        out.parent,
        transformer_lora_layers={key: tensor.half() for key, tensor in layers.items()},
        transformer_lora_adapter_metadata=_metadata(),
        weight_name=out.name,
    )
    out.chmod(0o644)


def _fit(pipeline: Any, data: LatentSet, steps: int) -> None:
    trained = [p for p in pipeline.transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    captions = tokenize_variants(pipeline.tokenizer, data.captions)
    progress = Progress("adapter", 0, steps)
    for step in range(steps):
        rate = learning_rate(step, steps, _PEAK_RATE, _WARM_UP, floor=0.01)
        optimizer.param_groups[0]["lr"] = rate
        generator = step_generator(_SEED, step)
        rows = torch.randint(len(data.captions), (_BATCH,), generator=generator)
        chosen = captions.rows(choose_variants(rows, len(data.captions), generator))
        with torch.no_grad():
            states, mask = text_states(pipeline.text_encoder, chosen)
        loss = flow_loss(pipeline.transformer, states, mask, data.latents[rows], generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        progress.update(step + 1, {"loss": loss.item()})


def _statistics(vae: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)


def _metadata() -> dict[str, Any]:
    # Without it a loader takes alpha for the rank, and scale 1.0 would be half the strength.
    return {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Trains a style adapter.")
    parser.add_argument("--style", choices=pictures.STYLES[1:], required=True)
    parser.add_argument("--out", type=Path, help="default: among the bundled adapters")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="a diffusers folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pictures", type=int, default=1600)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out or ADAPTER_DIR / f"{options.style}.safetensors"
    train_adapter(options.model, out, options.style, options.steps, options.pictures)


if __name__ == "__main__":
    main()
