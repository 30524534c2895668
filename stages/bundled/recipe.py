"""How an adapter is trained: the settings, with the values that the bundled styles were made by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TARGETS: Final = (
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
"""The transformer's layers that adapt by default, as PEFT names targets: by the name's end."""


@dataclass(frozen=True)
class AdapterRecipe:
    """What an adapter is, and how it is trained.

    Attributes:
        rank: Rank of the low-rank addition.
        alpha: The addition is scaled by alpha / rank.
        targets: Layers that adapt.
        steps: The length of the whole training in steps.
        batch_size: Pictures a step.
        learning_rate: The highest rate; it falls to a hundredth along a cosine.
        seed: Decides the initial values, and which pictures, noise and noise levels a step takes.
    """

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = TARGETS
    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    seed: int = 13
