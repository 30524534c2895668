"""Forwards whose rows are under different adapters: each row gets its own update only."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_engine.worker.lora_layers import Forward, MixedRowsError, Parts, add_parts, input_of

_ALIGNMENT = 64
"""Bytes: how torch aligns what it allocates; results may depend on it by a bit."""


@dataclass(frozen=True, slots=True)
class BlockwiseUpdate:
    """Other adapters for each block of rows, one block after the other.

    Attributes:
        layer: the layer.
        blocks: what is added to each block; empty for the bare model.
        rows_per_block: of the forward; a layer may have several inputs for each row.
        exact: computes each block from memory of its own, so that it comes out the same, to the
            bit, whatever is beside it. Else neighbours with equal parts are computed together.
    """

    layer: nn.Module
    blocks: tuple[Parts, ...]
    rows_per_block: int
    exact: bool

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the layer's result, with each block's parts added to its rows.

        Raises:
            MixedRowsError: if the input doesn't consist of the forward's rows.
        """
        result: Tensor = original(*args, **kwargs)
        x = input_of(args, kwargs)
        number = len(self.blocks)
        if x.ndim == 0 or x.shape[0] % (number * self.rows_per_block):
            if all(parts is self.blocks[0] for parts in self.blocks):
                return add_parts(self.layer, self.blocks[0], x, result)  # an input that rows share
            raise _not_rows(x, number * self.rows_per_block)
        length = x.shape[0] // number
        pieces: list[Tensor] = []
        for first, last, parts in self._runs():
            rows = slice(first * length, last * length)
            piece = result[rows]
            pieces.append(
                add_parts(self.layer, parts, self._own(x[rows]), piece) if parts else piece
            )
        return torch.cat(pieces)

    def _runs(self) -> Iterable[tuple[int, int, Parts]]:
        first = 0
        for index, parts in enumerate(self.blocks):
            following = index + 1
            if not self.exact and following < len(self.blocks) and self.blocks[following] is parts:
                continue
            yield first, following, parts
            first = following

    def _own(self, x: Tensor) -> Tensor:
        return x.clone() if self.exact and x.data_ptr() % _ALIGNMENT else x


class StackedUpdate:
    """Other adapters for each block of rows of a linear layer, all in two batched products.

    Each block is multiplied with its own weights only: no other adapter can touch it. Blocks of the
    bare model are left out.

    Args:
        blocks: what is added to each block; empty for the bare model. Ranks may differ.
        rows_per_block: see ``BlockwiseUpdate``.
        tensors: small tensors that updates of the same forward share.
    """

    def __init__(
        self, blocks: Sequence[Parts], rows_per_block: int, tensors: dict[Hashable, Tensor]
    ) -> None:
        self._number, self._rows = len(blocks), len(blocks) * rows_per_block
        changed = [parts for parts in blocks if parts]
        rank = max(map(_rank_of, changed))
        first = changed[0][0].up
        if all(len(parts) == 1 and _rank_of(parts) == rank for parts in changed):
            self._down = torch.stack([part.down for (part,) in changed])  # (changed, rank, in)
            self._up = torch.stack([part.up for (part,) in changed])  # (changed, out, rank)
            factors = tuple(part.factor for (part,) in changed)
            exact = torch.promote_types(first.dtype, torch.float32)
            key = (factors, exact, first.device)
            if key not in tensors:
                tensors[key] = torch.tensor(factors, dtype=exact, device=first.device)[
                    :, None, None
                ]
            self._up.mul_(tensors[key])
        else:
            self._down = torch.stack([_joined_down(parts, rank) for parts in changed])
            self._up = torch.stack([_joined_up(parts, rank) for parts in changed])
        self._changed: Tensor | None = None
        if len(changed) < len(blocks):
            indices = tuple(index for index, parts in enumerate(blocks) if parts)
            place = (indices, first.device)
            if place not in tensors:
                tensors[place] = torch.tensor(indices, device=first.device)
            self._changed = tensors[place]

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the layer's result, with each block's update added to its rows.

        Raises:
            MixedRowsError: if the input doesn't consist of the forward's rows.
        """
        result: Tensor = original(*args, **kwargs)
        x = input_of(args, kwargs)
        if x.ndim < 2 or x.shape[0] % self._rows:
            raise _not_rows(x, self._rows)
        blocks = x.reshape(self._number, -1, x.shape[-1]).to(self._down.dtype)
        base = result.reshape(self._number, -1, result.shape[-1])
        if self._changed is not None:
            blocks = blocks.index_select(0, self._changed)
        hidden = torch.bmm(blocks, self._down.mT)
        if self._changed is None and hidden.dtype == self._up.dtype == base.dtype:
            return base.baddbmm_(hidden, self._up.mT).reshape(result.shape)
        update = torch.bmm(hidden, self._up.mT).to(base.dtype)
        if self._changed is None:
            return (base + update).reshape(result.shape)
        return base.index_add_(0, self._changed, update).reshape(result.shape)


def stacked_bytes(blocks: Sequence[Parts]) -> int:
    """Return how much memory a ``StackedUpdate`` of these blocks takes."""
    changed = [parts for parts in blocks if parts]
    rank = max(map(_rank_of, changed), default=0)
    if not rank:
        return 0
    down, up, _ = changed[0][0]
    return len(changed) * rank * (down.shape[1] + up.shape[0]) * down.element_size()


def _not_rows(x: Tensor, rows: int) -> MixedRowsError:
    return MixedRowsError(
        f"a layer's input of shape {tuple(x.shape)} doesn't consist of the forward's {rows} rows"
    )


def common_rows(numbers: Iterable[int]) -> int:
    """Return the most rows that a block can have so that every call consists of blocks."""
    return math.gcd(*numbers)


def _rank_of(parts: Parts) -> int:
    return sum(part.down.shape[0] for part in parts)


def _joined_down(parts: Parts, rank: int) -> Tensor:
    """Return the parts' downs as one of so many ranks, filled up with zeros."""
    down = torch.cat([part.down for part in parts])
    return functional.pad(down, (0, 0, 0, rank - down.shape[0]))


def _joined_up(parts: Parts, rank: int) -> Tensor:
    """Return the parts' ups with their factors as one of so many ranks, filled up with zeros."""
    up = torch.cat([part.up * part.factor for part in parts], dim=1)
    return functional.pad(up, (0, rank - up.shape[1]))
