"""Copies of a pipeline that have its modules without their weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def without_weights(pipe: Any) -> Any:
    """Return a copy of a pipeline whose modules have no weights; the rest is shared."""
    memo: dict[int, Any] = {}
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    for module in modules.values():
        for tensor in _tensors_of(module):
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            memo[id(tensor)] = (
                nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
            )
    return shallow_copy(pipe, **{name: copy.deepcopy(m, memo) for name, m in modules.items()})


def fresh_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without weights that may be changed; what is empty is shared."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in _tensors_of(module)})


def shallow_copy(pipe: Any, **modules: nn.Module) -> Any:
    """Return a copy of a pipeline that may be given other modules; everything else is shared."""
    copied = object.__new__(type(pipe))
    copied.__dict__ = {**vars(pipe), **modules}
    copied.__dict__.pop("_lora_scale", None)  # left by a call
    return copied


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers and tensors that are plain attributes."""
    for part in module.modules():
        yield from (p for p in part._parameters.values() if p is not None)
        yield from (b for b in part._buffers.values() if b is not None)
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))
