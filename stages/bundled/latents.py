"""The denoiser's training data: captions, and the normalized latents of their pictures."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import pictures
from .architecture import single_frame_convolutions
from .training import load_tensors, save_tensors
from .vae_training import as_batch, encode_mean

if TYPE_CHECKING:
    from pathlib import Path

_BATCH = 32


@dataclass(frozen=True)
class LatentSet:
    """Captions with their pictures' latents.

    Attributes:
        captions: One sentence per picture.
        latents: float32, (count, 16, 8, 8), zero mean and unit deviation by channel over the
            pictures that `mean` and `std` were taken from.
        mean: Latent mean by channel, (16,).
        std: Latent standard deviation by channel, (16,).
    """

    captions: list[str]
    latents: Tensor
    mean: Tensor
    std: Tensor


def make_latents(
    vae: Any,
    count: int,
    seed: int,
    style: pictures.Style = "plain",
    statistics: tuple[Tensor, Tensor] | None = None,
) -> LatentSet:
    """Draws training pictures and encodes them.

    Args:
        vae: The trained autoencoder.
        count: How many pictures.
        seed: Decides sentences and jitter.
        style: How the pictures are drawn.
        statistics: Latent mean and standard deviation by channel; taken from the data if None.
    """
    scenes = pictures.sample_scenes(count, seed, held_out=False)
    rng = random.Random(seed + 1)
    encoded = []
    with torch.no_grad(), single_frame_convolutions():
        for start in range(0, count, _BATCH):
            drawn = [pictures.draw(s, rng, style) for s in scenes[start : start + _BATCH]]
            encoded.append(encode_mean(vae, as_batch(drawn)).squeeze(2))
            if start % (100 * _BATCH) == 0:
                print(f"latents {start}/{count}", flush=True)
    raw = torch.cat(encoded)
    mean, std = statistics or (raw.mean(dim=(0, 2, 3)), raw.std(dim=(0, 2, 3)))
    normalized = (raw - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    return LatentSet([pictures.caption(scene) for scene in scenes], normalized, mean, std)


def load_or_make_latents(path: Path, vae: Any, count: int, seed: int) -> LatentSet:
    """Reads the plain pictures' latents from a file, or makes them and the file."""
    if not path.exists():
        made = make_latents(vae, count, seed)
        tensors = {"latents": made.latents, "mean": made.mean, "std": made.std}
        save_tensors(path, tensors, {"captions": "\n".join(made.captions)})
    tensors, metadata = load_tensors(path)
    captions = metadata["captions"].split("\n")
    return LatentSet(captions, tensors["latents"], tensors["mean"], tensors["std"])
