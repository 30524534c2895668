"""Puts an adapter's weights where the layers that they change compute, in their dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from omni_engine.protocol.errors import AdapterError
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights

_COMPUTED_IN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What layers compute in. Weights may be stored in others, such as float8 or packed integers."""


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """An adapter on the device.

    Attributes:
        digest: its content.
        layers: by component, then by path in it.
        num_bytes: of its weights.
    """

    digest: str
    layers: Mapping[str, Mapping[str, LayerWeights]]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    device: torch.device
    dtype: torch.dtype


class AdapterPlacer:
    """Places adapters of one pipeline; used by the loader thread only.

    Args:
        modules: the pipeline's components that are modules, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: dict[str, _Place] = {}

    def place(self, weights: AdapterWeights) -> PlacedAdapter:
        """Return the adapter on the device; what is there already, in its dtype, isn't copied.

        Raises:
            AdapterError: if the model lacks one of its layers, or its weights overflow in a layer's
                dtype.
        """
        placed: dict[str, dict[str, LayerWeights]] = {}
        narrowed: list[tuple[str, LayerWeights]] = []
        for path, layer in weights.layers.items():
            component, _, inner = path.partition(".")
            place = self._place_of(path)
            moved = layer.to(place.device, place.dtype)
            placed.setdefault(component, {})[inner] = moved
            if torch.finfo(place.dtype).max < torch.finfo(layer.down.dtype).max:
                narrowed.append((path, moved))
        for path, moved in narrowed:
            if not (moved.down.isfinite().all() and moved.up.isfinite().all()):
                raise AdapterError(
                    f"the adapter's weights of {path} overflow in {_name(moved.down.dtype)}",
                    expected="weights that fit into the dtype that the model computes in",
                    hint="Serve the model in bfloat16 or float32.",
                )
        layers = [layer for component in placed.values() for layer in component.values()]
        return PlacedAdapter(weights.digest, placed, sum(layer.num_bytes for layer in layers))

    def _place_of(self, path: str) -> _Place:
        place = self._places.get(path)
        if place is None:
            place = self._places[path] = self._find(path)
        return place

    def _find(self, path: str) -> _Place:
        component, _, inner = path.partition(".")
        module = self._modules.get(component)
        if module is None:
            raise AdapterError(
                f"the model has no component {component!r}, which the adapter changes"
            )
        try:
            weight = module.get_submodule(inner).weight
        except AttributeError:
            raise AdapterError(
                f"the model has no layer {path}, which the adapter changes"
            ) from None
        dtype = weight.dtype if weight.dtype in _COMPUTED_IN else _dtype_of(module)
        return _Place(weight.device, dtype)  # type: ignore[arg-type]


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return what a module with packed weights computes in, as its other parameters tell."""
    found = (p.dtype for p in module.parameters() if p.dtype in _COMPUTED_IN)
    return next(found, torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
