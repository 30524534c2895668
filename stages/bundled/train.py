"""Makes the bundled model from nothing: `python -m omni_engine.stages.bundled.train --out DIR`.

Every stage resumes from its checkpoint in DIR/checkpoints; the diffusers folder is DIR/model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .denoiser_training import train_denoiser
from .export import export_pipeline
from .latents import load_or_make_latents
from .tokenizer import build_tokenizer
from .vae_training import train_vae

STAGES = ("all", "vae", "latents", "model")
_LATENT_SEED = 21


def train(
    out: Path,
    stage: str = "all",
    steps_vae: int = 3000,
    steps_model: int = 3900,
    pictures: int = 24_000,
    batch_size: int = 64,
) -> Path:
    """Trains what is not trained yet, up to and including a stage.

    Args:
        out: Folder for checkpoints and the result.
        stage: One of STAGES; "all" and "model" end with the written diffusers folder.
        steps_vae: The autoencoder's training steps.
        steps_model: The text encoder's and transformer's training steps.
        pictures: How many pictures the denoiser learns from.
        batch_size: The denoiser's rows a step.

    Returns:
        The diffusers folder (written when the stage is "all" or "model").
    """
    checkpoints = out / "checkpoints"
    folder = out / "model"
    vae = train_vae(checkpoints / "vae.safetensors", steps_vae)
    if stage == "vae":
        return folder
    # Named by what they depend on: a longer trained autoencoder has other latents.
    latents = checkpoints / f"latents-{steps_vae}-{pictures}.safetensors"
    data = load_or_make_latents(latents, vae, pictures, _LATENT_SEED)
    if stage == "latents":
        return folder
    tokenizer = build_tokenizer()
    text_encoder, denoiser = train_denoiser(
        checkpoints / "model.safetensors", data, tokenizer, steps_model, batch_size
    )
    export_pipeline(folder, vae, (data.mean, data.std), (tokenizer, text_encoder), denoiser)
    print(f"written: {folder}", flush=True)
    return folder


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Makes the bundled model from nothing.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and model")
    parser.add_argument("--stage", choices=STAGES, default="all")
    parser.add_argument("--steps-vae", type=int, default=3000)
    parser.add_argument("--steps-model", type=int, default=3900)
    parser.add_argument("--pictures", type=int, default=24_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(
        options.out,
        options.stage,
        options.steps_vae,
        options.steps_model,
        options.pictures,
        options.batch_size,
    )


if __name__ == "__main__":
    main()
