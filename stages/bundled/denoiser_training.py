"""Trains the text encoder and the denoising transformer together, by flow matching."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .architecture import build_text_encoder, build_transformer
from .tokenizer import TEMPLATE_PREFIX_TOKENS, in_template
from .training import Progress, TrainingState, learning_rate, step_generator

if TYPE_CHECKING:
    from pathlib import Path

    from .latents import LatentSet

_SEED = 12
_BATCH = 64
_PEAK_RATE = 1e-3
_WARM_UP = 200
_EMA = 0.999
_UNCONDITIONAL_SHARE = 0.1
_MISSPELT_SHARE = 0.25


@dataclass(frozen=True)
class TokenizedCaptions:
    """Captions in the pipeline's template: token ids and mask, both (count, length)."""

    ids: Tensor
    mask: Tensor

    def rows(self, index: Tensor) -> TokenizedCaptions:
        """Picks rows and drops the columns that are padding in all of them."""
        length = int(self.mask[index].sum(dim=1).max())
        return TokenizedCaptions(self.ids[index, :length], self.mask[index, :length])


def tokenize(tokenizer: Any, sentences: list[str]) -> TokenizedCaptions:
    """Tokenizes sentences as QwenImagePipeline does."""
    encoded = tokenizer([in_template(s) for s in sentences], padding=True, return_tensors="pt")
    return TokenizedCaptions(encoded.input_ids, encoded.attention_mask)


def text_states(text_encoder: Any, captions: TokenizedCaptions) -> tuple[Tensor, Tensor]:
    """Gives the caption states the transformer attends to.

    Returns:
        The states, (batch, length, 96), and their mask, (batch, length); template prefix dropped.
    """
    output = text_encoder.model(input_ids=captions.ids, attention_mask=captions.mask)
    states: Tensor = output.last_hidden_state[:, TEMPLATE_PREFIX_TOKENS:]
    return states, captions.mask[:, TEMPLATE_PREFIX_TOKENS:]


def flow_loss(
    transformer: Any, states: Tensor, mask: Tensor, latents: Tensor, generator: torch.Generator
) -> Tensor:
    """Gives the flow-matching loss of a batch.

    Args:
        transformer: The denoiser; its timestep is the noise level sigma.
        states: Text states, (batch, length, 96).
        mask: Their mask, (batch, length).
        latents: Normalized latents, (batch, 16, height, width).
        generator: Draws noise and noise levels.
    """
    clean = pack(latents)
    noise = torch.randn(clean.shape, generator=generator)
    sigma = torch.sigmoid(1.1 * torch.randn(len(clean), generator=generator))
    level = sigma.view(-1, 1, 1)
    grid = (1, latents.shape[2] // 2, latents.shape[3] // 2)
    velocity = transformer(
        hidden_states=(1 - level) * clean + level * noise,
        encoder_hidden_states=states,
        encoder_hidden_states_mask=mask,
        timestep=sigma,
        img_shapes=[[grid]] * len(clean),
        return_dict=False,
    )[0]
    return nn.functional.mse_loss(velocity, noise - clean)


def pack(latents: Tensor) -> Tensor:
    """Packs (batch, channels, height, width) latents to a token for each 2x2 patch."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def train_denoiser(
    checkpoint: Path, data: LatentSet, tokenizer: Any, steps: int, batch_size: int = _BATCH
) -> tuple[Any, Any]:
    """Trains both networks, or goes on from the checkpoint.

    Args:
        checkpoint: The safetensors file to resume from and save to.
        data: Captions and latents.
        tokenizer: The tokenizer of `build_tokenizer`.
        steps: The length of the whole training in steps.
        batch_size: Rows a step.

    Returns:
        Text encoder and transformer with averaged (EMA) weights, float32.
    """
    torch.manual_seed(_SEED)
    networks = nn.ModuleDict(
        {"text_encoder": build_text_encoder(len(tokenizer)), "transformer": build_transformer()}
    )
    average = copy.deepcopy(networks).requires_grad_(False)
    optimizer = torch.optim.AdamW(
        networks.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    state = TrainingState({"trained": networks, "average": average}, optimizer, checkpoint)
    state.restore()
    captions = tokenize_variants(tokenizer, data.captions)
    progress = Progress("model", state.step, steps)
    while state.step < steps:
        state.set_rate(learning_rate(state.step, steps, _PEAK_RATE, _WARM_UP, floor=0.03))
        generator = step_generator(_SEED, state.step)
        rows = torch.randint(len(data.captions), (batch_size,), generator=generator)
        chosen = captions.rows(choose_variants(rows, len(data.captions), generator))
        states, mask = text_states(networks["text_encoder"], chosen)
        loss = flow_loss(networks["transformer"], states, mask, data.latents[rows], generator)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        state.step += 1
        _average(average, networks, state.step)
        progress.update(state.step, {"loss": loss.item()})
        state.save_if_due()
    state.save()
    return average["text_encoder"], average["transformer"]


def tokenize_variants(tokenizer: Any, sentences: list[str]) -> TokenizedCaptions:
    """Tokenizes each sentence, then each with "a" for "an", then the empty prompt " "."""
    misspelt = [" ".join("a" if w == "an" else w for w in s.split(" ")) for s in sentences]
    return tokenize(tokenizer, [*sentences, *misspelt, " "])


def choose_variants(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Picks, for each of the rows, one of its variants in `tokenize_variants`' order."""
    draw = torch.rand(len(rows), generator=generator)
    misspelt = draw >= 1 - _MISSPELT_SHARE
    chosen = torch.where(misspelt, rows + count, rows)
    return torch.where(draw < _UNCONDITIONAL_SHARE, torch.full_like(rows, 2 * count), chosen)


@torch.no_grad()
def _average(average: nn.Module, networks: nn.Module, step: int) -> None:
    # Early on a shorter memory, so that the average does not carry the initialization along.
    decay = min(_EMA, step / (step + 10))
    averages: list[Tensor] = list(average.parameters())
    latest: list[Tensor] = list(networks.parameters())
    torch._foreach_lerp_(averages, latest, 1 - decay)
