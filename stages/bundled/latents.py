"""The denoiser's training data: captions, and the normalized latents of their pictures."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
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
    drawn = (pictures.draw(scene, rng, style) for scene in scenes)
    encoded: list[Tensor] = []
    for batch in encode_batches(vae, drawn):
        if len(encoded) % 100 == 0:
            print(f"latents {len(encoded) * _BATCH}/{count}", flush=True)
        encoded.append(batch)
    raw = torch.cat(encoded)
    mean, std = statistics or (raw.mean(dim=(0, 2, 3)), raw.std(dim=(0, 2, 3)))
    captions = [pictures.caption(scene) for scene in scenes]
    return LatentSet(captions, normalize(raw, mean, std), mean, std)


@torch.no_grad()
def encode_batches(vae: Any, drawn: Iterable[pictures.Picture]) -> Iterator[Tensor]:
    """Encodes pictures (uint8, (64, 64, 3)) to latent means, (batch, 16, 8, 8), as they come."""
    remaining = iter(drawn)
    while batch := list(islice(remaining, _BATCH)):
        with single_frame_convolutions():
            encoded = encode_mean(vae, as_batch(batch)).squeeze(2)
        yield encoded


def normalize(latents: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Brings latents (batch, 16, height, width) to zero mean and unit deviation by channel."""
    return (latents - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)


def load_or_make_latents(path: Path, vae: Any, count: int, seed: int) -> LatentSet:
    """Reads the plain pictures' latents from a file, or makes them and the file."""
    if not path.exists():
        made = make_latents(vae, count, seed)
        tensors = {"latents": made.latents, "mean": made.mean, "std": made.std}
        save_tensors(path, tensors, {"captions": "\n".join(made.captions)})
    tensors, metadata = load_tensors(path)
    captions = metadata["captions"].split("\n")
    return LatentSet(captions, tensors["latents"], tensors["mean"], tensors["std"])
