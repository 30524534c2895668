"""Merged copies of a component's linear layers, for an identity that has it to itself for long.

The layers' own weights are never written to: the copy is used instead while its identity is bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_engine.protocol.adapters import AdapterIdentity
from omni_engine.worker.lora_layers import (
    ComponentHooks,
    Forward,
    UniformUpdate,
    Updates,
)

logger = logging.getLogger(__name__)

MERGE_AFTER = 64
"""After how many forwards in a row under one identity a merged copy is made, or dropped."""

_MERGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class MergedUpdate:
    """A linear layer with adapters in its weight.

    Attributes:
        weight: (out, in).
        bias: the layer's.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return what the layer makes of its input with the merged weight."""
        return functional.linear(args[0] if args else kwargs["input"], self.weight, self.bias)


class MergedAdapter:
    """Keeps one merged identity of a component at most.

    Args:
        hooks: the component's.
    """

    def __init__(self, hooks: ComponentHooks) -> None:
        self._hooks = hooks
        self._last: Hashable = None
        self._times = 0
        self._merged: tuple[AdapterIdentity, Updates] | None = None
        self._out_of_memory = False

    @property
    def identity(self) -> AdapterIdentity | None:
        """Whose merged copy there is."""
        merged = self._merged  # read once: ``forget`` may come from another thread
        return None if merged is None else merged[0]

    def note(self, key: Hashable) -> None:
        """Note what a forward runs under: an identity, or something else for others."""
        self._times = self._times + 1 if key == self._last else 1
        self._last = key
        if self._times >= MERGE_AFTER and key != self.identity:
            self.drop()

    def updates(self, identity: AdapterIdentity, unmerged: Mapping[str, UniformUpdate]) -> Updates:
        """Return what to bind for an identity that was just noted."""
        merged = self._merged
        if merged is not None and merged[0] == identity:
            return merged[1]
        if self._times < MERGE_AFTER or self._out_of_memory:
            return unmerged
        updates = self._with_merged(unmerged)
        self._merged = (identity, updates)
        return updates

    def forget(self, digest: str) -> None:
        """Drop the copy if this adapter is part of it; from any thread."""
        identity = self.identity
        if identity is not None and any(d == digest for d, _ in identity):
            self.drop()

    def drop(self) -> None:
        """Let go of the copy."""
        self._merged = None

    def _with_merged(self, unmerged: Mapping[str, UniformUpdate]) -> Updates:
        updates: dict[str, Any] = dict(unmerged)
        started = time.perf_counter()
        try:
            for path, update in unmerged.items():
                layer = update.layer
                if isinstance(layer, nn.Linear) and self._is_plain(path, layer):
                    updates[path] = MergedUpdate(_merged_weight(layer, update), layer.bias)
        except torch.OutOfMemoryError:
            logger.warning("there is no memory for a merged adapter; none is merged from here on")
            self._out_of_memory = True
            return unmerged
        merged = sum(isinstance(update, MergedUpdate) for update in updates.values())
        milliseconds = (time.perf_counter() - started) * 1000
        logger.info("adapters merged into copies of %d layers in %.0f ms", merged, milliseconds)
        return updates

    def _is_plain(self, path: str, layer: nn.Linear) -> bool:
        """Whether a layer has ordinary weights and nothing else wraps it."""
        is_bare = getattr(self._hooks.original(path), "__func__", None) is nn.Linear.forward
        is_ordinary = type(layer.weight) is nn.Parameter and layer.weight.dtype in _MERGED_DTYPES
        return is_bare and is_ordinary


def _merged_weight(layer: nn.Linear, update: UniformUpdate) -> Tensor:
    """Return the layer's weight with adapters added, computed in float32 at least."""
    exact = torch.promote_types(layer.weight.dtype, torch.float32)
    weight = layer.weight.detach().to(exact, copy=True)
    for part in update.parts:
        weight.addmm_(part.up.to(exact), part.down.to(exact), alpha=part.factor)
    return weight.to(layer.weight.dtype)
