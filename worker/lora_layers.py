"""Adapters in the forward: hooks on layers, and the updates that they add to what a layer returns.

A hook costs an attribute lookup while nothing is bound and then calls the layer unchanged, so that
the bare model stays what it is, bit for bit. Binding is one assignment of a dict: what each layer
adds, by its path in the component.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional

Forward = Callable[..., Any]


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
        self._layers: dict[str, nn.Module] = {}
        self._hooks: dict[str, Forward] = {}
        self.updates: Updates | None = None

    def layer(self, path: str) -> nn.Module:
        """Return a layer; raises ``AttributeError`` if there is none at this path."""
        layer = self._layers.get(path)
        if layer is None:
            layer = self._layers[path] = self._module.get_submodule(path)
        return layer

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
        return add_parts(self.layer, self.parts, input_of(args, kwargs), result)


def is_convolution(parts: Parts) -> bool:
    """Whether parts belong to a convolution; else to a linear layer."""
    return parts[0].down.ndim > 2


def add_parts(layer: nn.Module, parts: Parts, x: Tensor, result: Tensor) -> Tensor:
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


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a layer's one input, however it was passed."""
    found: Tensor = args[0] if args else kwargs["input"]
    return found
