"""Adapters in the forward: hooks on layers, and the updates that they add to what a layer returns.

A hook costs an attribute lookup while nothing is bound and then calls the layer unchanged, so that
the bare model stays what it is, bit for bit. Binding is one assignment of a dict: what each layer
adds, by its path in the component.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

Forward = Callable[..., Any]

_ALIGNMENT = 64
"""Bytes: how torch aligns what it allocates; results may depend on it by a bit."""


class MixedRowsError(RuntimeError):
    """A forward can't be shared by requests under different adapters; each can run alone."""


class Update(Protocol):
    """What a hooked layer does instead of its own forward."""

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer makes of the arguments, changed by adapters."""


Updates = Mapping[str, Update]
"""By the path of the layer in its component."""


class Part(NamedTuple):
    """One adapter's update of one layer at one scale: ``up(down(x)) * factor``.

    Attributes:
        down: (rank, in) of a linear layer, (rank, in, height, width) of a convolution.
        up: (out, rank) or (out, rank, 1, 1).
        factor: the adapter's own scaling times the request's scale.
    """

    down: Tensor
    up: Tensor
    factor: float


Parts = tuple[Part, ...]
"""What an identity adds to a layer: one part for each adapter, in canonical order."""


class ComponentHooks:
    """The hooked layers of one component and what is bound to them.

    Used by the main thread only.

    Args:
        module: the component.

    Attributes:
        updates: what is bound: None is the bare model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks: dict[str, Forward] = {}
        self.updates: Updates | None = None

    def layer(self, path: str) -> nn.Module:
        """Return a layer; raises ``AttributeError`` if there is none at this path."""
        return self._module.get_submodule(path)

    def original(self, path: str) -> Forward:
        """Return a layer's forward as it is without a hook."""
        hook = self._hooks.get(path)
        return self.layer(path).forward if hook is None else hook.__wrapped__  # type: ignore[attr-defined]

    def install(self, paths: Iterable[str]) -> None:
        """Hook these layers, if they aren't yet. Hooks stay until ``remove``."""
        for path in paths:
            if path not in self._hooks:
                layer = self.layer(path)
                self._hooks[path] = layer.forward = self._hook(path, layer.forward)

    def remove(self) -> None:
        """Restore the layers, but for those that something else has wrapped since."""
        self.updates = None
        for path, hook in self._hooks.items():
            layer = self.layer(path)
            if vars(layer).get("forward") is hook:
                original = hook.__wrapped__
                if getattr(original, "__func__", None) is type(layer).forward:
                    del layer.forward
                else:
                    layer.forward = original
        self._hooks.clear()

    def _hook(self, path: str, original: Forward) -> Forward:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            updates = self.updates
            if updates is None:
                return original(*args, **kwargs)
            update = updates.get(path)
            if update is None:
                return original(*args, **kwargs)
            return update(original, args, kwargs)

        return forward


@dataclass(frozen=True, slots=True)
class UniformUpdate:
    """The same adapters for every row: PEFT's arithmetic in PEFT's order, to the bit.

    Attributes:
        layer: the layer.
        parts: what is added.
    """

    layer: nn.Module
    parts: Parts

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the layer's result with the parts added."""
        result: Tensor = original(*args, **kwargs)
        return _add(self.layer, self.parts, _input(args, kwargs), result)


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
        x = _input(args, kwargs)
        number = len(self.blocks)
        if x.ndim == 0 or x.shape[0] % (number * self.rows_per_block):
            if all(parts is self.blocks[0] for parts in self.blocks):
                return _add(self.layer, self.blocks[0], x, result)  # an input that rows share
            raise _not_rows(x, number * self.rows_per_block)
        length = x.shape[0] // number
        pieces: list[Tensor] = []
        for first, last, parts in self._runs():
            rows = slice(first * length, last * length)
            piece = result[rows]
            pieces.append(_add(self.layer, parts, self._own(x[rows]), piece) if parts else piece)
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
    """

    def __init__(self, blocks: Sequence[Parts], rows_per_block: int) -> None:
        self._number, self._rows = len(blocks), len(blocks) * rows_per_block
        changed = [index for index, parts in enumerate(blocks) if parts]
        rank = max(_rank_of(blocks[index]) for index in changed)
        stacked = [_stack(blocks[index], rank) for index in changed]
        self._down = torch.stack([down for down, _ in stacked])  # (changed, rank, in)
        self._up = torch.stack([up for _, up in stacked])  # (changed, rank, out)
        whole = len(changed) == len(blocks)
        self._changed = None if whole else torch.tensor(changed, device=self._down.device)

    def __call__(self, original: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the layer's result, with each block's update added to its rows.

        Raises:
            MixedRowsError: if the input doesn't consist of the forward's rows.
        """
        result: Tensor = original(*args, **kwargs)
        x = _input(args, kwargs)
        if x.ndim < 2 or x.shape[0] % self._rows:
            raise _not_rows(x, self._rows)
        blocks = x.reshape(self._number, -1, x.shape[-1]).to(self._down.dtype)
        base = result.reshape(self._number, -1, result.shape[-1])
        if self._changed is not None:
            blocks = blocks.index_select(0, self._changed)
        hidden = torch.bmm(blocks, self._down.mT)
        if self._changed is None and hidden.dtype == self._up.dtype == base.dtype:
            return base.baddbmm_(hidden, self._up).reshape(result.shape)
        update = torch.bmm(hidden, self._up).to(base.dtype)
        if self._changed is None:
            return (base + update).reshape(result.shape)
        return base.index_add(0, self._changed, update).reshape(result.shape)


def stacked_bytes(blocks: Sequence[Parts]) -> int:
    """Return how much memory a ``StackedUpdate`` of these blocks takes."""
    changed = [parts for parts in blocks if parts]
    rank = max(map(_rank_of, changed), default=0)
    if not rank:
        return 0
    down, up, _ = changed[0][0]
    return len(changed) * rank * (down.shape[1] + up.shape[0]) * down.element_size()


def is_convolution(parts: Parts) -> bool:
    """Whether parts belong to a convolution; else to a linear layer."""
    return parts[0].down.ndim > 2


def _add(layer: nn.Module, parts: Parts, x: Tensor, result: Tensor) -> Tensor:
    """Return ``result`` with the parts' updates of ``x`` added, in its dtype."""
    dtype = result.dtype
    for part in parts:
        x = x.to(part.down.dtype)
        update = _low_rank(layer, part, x).mul_(part.factor)
        # The sum goes where the update was: its terms commute, and memory is what large layers cost
        result = update.add_(result) if update.dtype == result.dtype else result + update
    return result.to(dtype)


def _low_rank(layer: nn.Module, part: Part, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        hidden = functional.conv2d(x, part.down, None, layer.stride, layer.padding)
        return functional.conv2d(hidden, part.up, groups=layer.groups)
    return functional.linear(functional.linear(x, part.down), part.up)


def _rank_of(parts: Parts) -> int:
    return sum(part.down.shape[0] for part in parts)


def _stack(parts: Parts, rank: int) -> tuple[Tensor, Tensor]:
    """Return down (rank, in) and up with its factors (rank, out), filled up with zeros."""
    down = torch.cat([part.down for part in parts])
    up = torch.cat([part.up * part.factor for part in parts], dim=1).T
    missing = rank - down.shape[0]
    return tuple(functional.pad(t, (0, 0, 0, missing)) for t in (down, up))  # type: ignore[return-value]


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a layer's one input, however it was passed."""
    found: Tensor = args[0] if args else kwargs["input"]
    return found


def _not_rows(x: Tensor, rows: int) -> MixedRowsError:
    return MixedRowsError(
        f"a layer's input of shape {tuple(x.shape)} doesn't consist of the forward's {rows} rows"
    )


def common_rows(numbers: Iterable[int]) -> int:
    """Return the most rows that a block can have so that every call consists of blocks."""
    return math.gcd(*numbers)
