"""Trains a style adapter: `python -m omni_engine.stages.bundled.train_adapter --style outline`.

The adapter is a low-rank addition to the transformer, learnt from pictures of the same sentences
drawn in another style, and saved as diffusers' `load_lora_weights` reads it. It resumes where it
was stopped. `train_lora` does the same with pictures from a folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import ADAPTER_DIR, MODEL_DIR, pictures
from .adapter_training import Run, model_digest, train_layers, write_adapter
from .latents import make_latents
from .recipe import AdapterRecipe
from .score import load_pipeline

RECIPES: dict[pictures.Style, AdapterRecipe] = {
    **dict.fromkeys(pictures.STYLES[1:], AdapterRecipe()),
    # Another rank and another strength a rank than the rest, so that loaders can't mix them up.
    "studio": AdapterRecipe(rank=4, alpha=12),
}
"""What each bundled adapter was trained with."""

_LATENT_SEED = 22


def train_adapter(
    model: Path, out: Path, style: pictures.Style, recipe: AdapterRecipe, count: int = 1600
) -> None:
    """Trains an adapter on a model, or goes on from its checkpoint, and writes it.

    Args:
        model: The diffusers folder of the model.
        out: The safetensors file to write, float16; the checkpoint lies beside it until then.
        style: The style to learn.
        recipe: How to train.
        count: How many pictures to learn from.
    """
    pipeline = load_pipeline(model)
    config = pipeline.vae.config
    statistics = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    data = make_latents(pipeline.vae, count, _LATENT_SEED, style, statistics)
    about = {
        "base_model_digest": model_digest(model),
        "style": style,
        "pictures": str(count),
        "captions": str(len(set(data.captions))),
    }
    checkpoint = out.with_suffix(".checkpoint")
    layers = train_layers(pipeline, data, recipe, Run(checkpoint, about))
    write_adapter(out, layers, recipe, about)
    checkpoint.unlink(missing_ok=True)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Trains a style adapter.")
    parser.add_argument("--style", choices=pictures.STYLES[1:], required=True)
    parser.add_argument("--out", type=Path, help="default: among the bundled adapters")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="a diffusers folder")
    parser.add_argument("--pictures", type=int, default=1600)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out or ADAPTER_DIR / f"{options.style}.safetensors"
    train_adapter(options.model, out, options.style, RECIPES[options.style], options.pictures)


if __name__ == "__main__":
    main()
