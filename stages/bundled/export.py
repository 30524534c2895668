"""Writes the trained parts as a diffusers folder in half precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers import QwenImagePipeline

from .architecture import build_scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def export_pipeline(
    folder: Path, vae: Any, statistics: tuple[Tensor, Tensor], text: tuple[Any, Any], denoiser: Any
) -> None:
    """Writes a complete QwenImagePipeline folder, float16 safetensors.

    Args:
        folder: Where to write.
        vae: The autoencoder.
        statistics: Latent mean and standard deviation by channel, stored in its config.
        text: Tokenizer and text encoder.
        denoiser: The transformer.
    """
    mean, std = statistics
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    tokenizer, text_encoder = text
    pipeline = QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=denoiser,
    )
    pipeline.to(torch.float16)
    pipeline.save_pretrained(folder)
    # Nothing is generated from the text encoder, and its defaults need no file.
    (folder / "text_encoder" / "generation_config.json").unlink(missing_ok=True)
    for weights in folder.glob("*/*.safetensors"):
        weights.chmod(0o644)
