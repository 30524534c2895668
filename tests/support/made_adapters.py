"""Adapters made up in memory for tests of the runtime, and a library that hands them out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from omni_engine.protocol.adapters import Adapter, AdapterActivation, AdapterReport, compose
from omni_engine.protocol.errors import AdapterError
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights

_WAIT_S = 60.0


def adapter(name: str) -> Adapter:
    """An adapter whose content is known by its name."""
    return Adapter(name, f"{name}.safetensors", name)


def activation(*parts: tuple[str, float]) -> AdapterActivation:
    """Adapters by name, at scales."""
    found = compose((adapter(name), scale) for name, scale in parts)
    assert found is not None
    return found


def made_weights(
    modules: Mapping[str, nn.Module],
    name: str,
    rank: int = 4,
    *,
    seed: int = 0,
    strength: float = 0.5,
    dtype: torch.dtype | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
) -> AdapterWeights:
    """Random weights for the linear and convolution layers of modules, in the layers' dtypes."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for component, module in modules.items():
        for path, layer in module.named_modules():
            if not isinstance(layer, nn.Linear | nn.Conv2d) or not wanted(f"{component}.{path}"):
                continue
            out, *inner = layer.weight.shape
            fan_in = torch.Size(inner).numel()
            down = torch.randn((rank, *inner), generator=generator) / fan_in**0.5
            up = torch.randn((out, rank, *(1 for _ in inner[1:])), generator=generator)
            up *= strength / rank**0.5
            kept = dtype or layer.weight.dtype
            layers[f"{component}.{path}"] = LayerWeights(down.to(kept), up.to(kept), 1.5)
    return AdapterWeights(name, layers)


def weights_of_file(path: Path, digest: str, scaling: float) -> AdapterWeights:
    """The weights of a file in the PEFT format whose names are the pipeline's."""
    tensors = load_file(path)
    stems = [key.removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key]
    layers = {
        stem: LayerWeights(
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"], scaling
        )
        for stem in stems
    }
    return AdapterWeights(digest, layers)


class MadeLibrary:
    """Hands out adapters by digest; makes those it doesn't have, if told how.

    Attributes:
        log: what was asked for, in order: names, and "check NAME".
        gate: what ``fetch`` and ``check`` wait for; open at first.
        entered: set when one of them was called.
        broken: names that can't be had, for now.
    """

    def __init__(
        self,
        ready: Iterable[AdapterWeights] = (),
        make: Callable[[str], AdapterWeights] | None = None,
    ) -> None:
        self._ready = {weights.digest: weights for weights in ready}
        self._make = make
        self.log: list[str] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.broken: set[str] = set()

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        self._enter(adapter.name)
        if adapter.name in self.broken:
            raise AdapterError(f"{adapter.name} is broken", value=adapter.name)
        if adapter.digest not in self._ready and self._make is not None:
            return self._make(adapter.digest)
        return self._ready[adapter.digest]

    def check(self, name: str, path: str) -> AdapterReport:
        self._enter(f"check {name}")
        if name in self.broken:
            raise AdapterError(f"{path} is broken", value=name)
        return AdapterReport(name, "peft", {"transformer": 1}, [4], ["0"], 4)

    def _enter(self, what: str) -> None:
        self.log.append(what)
        self.entered.set()
        assert self.gate.wait(_WAIT_S), "the gate stayed shut"


def small_pipe(dtype: torch.dtype = torch.float32) -> Any:
    """Two components: a "transformer" of linear layers over 8 numbers, and a "text_encoder"."""
    torch.manual_seed(0)
    transformer = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
    components = {"transformer": transformer, "text_encoder": nn.Sequential(nn.Linear(8, 8))}
    for module in components.values():
        module.to(dtype).requires_grad_(False)
    return SimpleNamespace(components={**components, "tokenizer": None}, **components)
