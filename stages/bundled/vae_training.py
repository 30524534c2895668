"""Trains the picture autoencoder."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from . import pictures
from .architecture import LATENT_CHANNELS, build_vae, single_frame_convolutions
from .training import Progress, TrainingState, learning_rate, step_generator

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module

_SEED = 11
_BATCH = 8
_PEAK_RATE = 2e-3
_LATENT_NOISE = 0.1
# The other styles' pictures are made of the colours and lines of these.
_STYLE_SHARES: dict[pictures.Style, float] = {"plain": 0.8, "outline": 0.1, "night": 0.1}
_OBJECT_WEIGHT = 4.0


def train_vae(checkpoint: Path, steps: int) -> Any:
    """Trains the autoencoder, or goes on from the checkpoint.

    Args:
        checkpoint: The safetensors file to resume from and save to.
        steps: The length of the whole training in steps.

    Returns:
        The trained AutoencoderKLQwenImage, float32.
    """
    torch.manual_seed(_SEED)
    vae = build_vae()
    optimizer = torch.optim.Adam(vae.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.99))
    state = TrainingState({"vae": vae}, optimizer, checkpoint)
    state.restore()
    progress = Progress("vae", state.step, steps)
    with single_frame_convolutions():
        while state.step < steps:
            state.set_rate(learning_rate(state.step, steps, _PEAK_RATE, warm_up=50, floor=0.02))
            figures = _train_step(vae, optimizer, state.step)
            state.step += 1
            progress.update(state.step, figures)
            state.save_if_due()
    state.save()
    return vae


def encode_mean(vae: Any, batch: Tensor) -> Tensor:
    """Encodes pictures to latent means; to be used within `single_frame_convolutions`.

    Args:
        vae: The autoencoder.
        batch: Pictures, float32, shape (batch, 3, 1, height, width), range -1 to 1.

    Returns:
        Latents of shape (batch, 16, 1, height / 8, width / 8).
    """
    moments: Tensor = vae.quant_conv(vae.encoder(batch))
    return moments[:, :LATENT_CHANNELS]


def as_batch(drawn: list[pictures.Picture]) -> Tensor:
    """Stacks uint8 pictures to float32 of shape (batch, 3, 1, height, width), range -1 to 1."""
    stacked = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2).unsqueeze(2)
    return stacked.float() / 127.5 - 1.0


def _train_step(vae: Any, optimizer: torch.optim.Optimizer, step: int) -> dict[str, float]:
    target = _draw_batch(step)
    latents = encode_mean(vae, target)
    noise = torch.randn(latents.shape, generator=step_generator(_SEED, step))
    # Not vae.decode: its clamp to the picture's range has no gradient where it saturates.
    output = vae.decoder(vae.post_quant_conv(latents + _LATENT_NOISE * noise))
    loss = _reconstruction_loss(output, target) + 1e-4 * latents.square().mean()
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    _clip(vae)
    optimizer.step()
    return {"loss": loss.item(), "L1": (output.detach().clamp(-1, 1) - target).abs().mean().item()}


def _reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    difference = output - target
    # Objects cover a small part of a picture: unweighted, their colours are learnt last.
    ground = target[..., :1, :1]
    weight = 1 + _OBJECT_WEIGHT * ((target - ground).abs().amax(dim=1, keepdim=True) > 0.05)
    across = difference[..., 1:] - difference[..., :-1]
    down = difference[..., 1:, :] - difference[..., :-1, :]
    edges = across.abs().mean() + down.abs().mean()
    distance = (weight * (difference.square() + 0.5 * difference.abs())).mean()
    return distance + 0.25 * edges


def _clip(network: Module) -> None:
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)


def _draw_batch(step: int) -> Tensor:
    rng = random.Random(_SEED * 1_000_003 + step)
    drawn: list[pictures.Picture] = []
    while len(drawn) < _BATCH:
        scene = pictures.sample_scene(rng)
        if not pictures.is_held_out(scene):
            (style,) = rng.choices(tuple(_STYLE_SHARES), tuple(_STYLE_SHARES.values()))
            drawn.append(pictures.draw(scene, rng, style))
    return as_batch(drawn)
