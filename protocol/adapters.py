"""Adapters as engine, workers and clients speak of them: registered files, and what applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_engine.protocol.sampling import canonical_scale

ADAPTER_CHECK, ADAPTER_PREFETCH, ADAPTER_PIN, ADAPTER_DROP = (
    "adapter_check",
    "adapter_prefetch",
    "adapter_pin",
    "adapter_drop",
)
"""Engine to worker: check a file, load adapters, the pinned ones, forget some."""

ADAPTER_CHECKED, ADAPTERS_HELD = "adapter_checked", "adapters_held"
"""Worker to engine: what a check found, and which adapters are in memory."""

AdapterIdentity = tuple[tuple[str, float], ...]
"""(content digest, canonical scale) of each adapter, sorted: equal exactly if the effect is."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered LoRA adapter: where its file is and what it holds.

    Args:
        name: the name requests use.
        path: the safetensors file.
        digest: SHA-256 of the file, hex; the adapter's identity together with a scale.
        default_scale: scale of requests that name none.
    """

    name: str
    path: str
    digest: str
    default_scale: float = 1.0

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Adapter:
        """Rebuild from ``dataclasses.asdict``'s dict."""
        return cls(**wire)


@dataclass(frozen=True, slots=True)
class AdapterActivation:
    """What a request runs under: one adapter or several, each at its scale; see ``compose``.

    Args:
        adapters: sorted by digest, each content once.
        scales: one per adapter: canonical, not 0.
    """

    adapters: tuple[Adapter, ...]
    scales: tuple[float, ...]

    @property
    def identity(self) -> AdapterIdentity:
        """Digests and scales: equal exactly when the effect is equal."""
        return tuple(zip(self.digests, self.scales, strict=True))

    @property
    def digests(self) -> tuple[str, ...]:
        """The contents, sorted."""
        return tuple(adapter.digest for adapter in self.adapters)

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict."""
        adapters = [dataclasses.asdict(adapter) for adapter in self.adapters]
        return {"adapters": adapters, "scales": list(self.scales)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> AdapterActivation:
        """Rebuild from ``to_wire``'s dict."""
        adapters = tuple(Adapter.from_wire(adapter) for adapter in wire["adapters"])
        return cls(adapters, tuple(wire["scales"]))


def compose(parts: Iterable[tuple[Adapter, float]]) -> AdapterActivation | None:
    """Return the canonical form of several adapters at scales; None if nothing is left.

    Sorted by digest; the scales of equal contents, whatever their names, are summed; what comes to
    a scale of 0 is left out.
    """
    first: dict[str, Adapter] = {}
    sums: dict[str, float] = {}
    for adapter, scale in parts:
        first.setdefault(adapter.digest, adapter)
        sums[adapter.digest] = sums.get(adapter.digest, 0.0) + scale
    kept = [d for d in sorted(sums) if canonical_scale(sums[d]) != 0]
    if not kept:
        return None
    return AdapterActivation(
        tuple(first[d] for d in kept), tuple(canonical_scale(sums[d]) for d in kept)
    )


def shared_activation(
    activations: Iterable[AdapterActivation | None],
) -> tuple[AdapterActivation | None] | None:
    """Return the one thing that all run under, whatever the adapters' names; None if they differ.

    Returns:
        A tuple that holds it, since it may be None, the bare model.
    """
    by_identity = {None if one is None else one.identity: one for one in activations}
    return (next(iter(by_identity.values())),) if len(by_identity) == 1 else None


def activations_to_wire(activations: Sequence[AdapterActivation | None]) -> dict[str, Any]:
    """Return the activations of a plan's requests as a msgpack-able dict, each one once."""
    distinct = list(dict.fromkeys(activations))
    return {
        "distinct": [None if one is None else one.to_wire() for one in distinct],
        "of_request": [distinct.index(one) for one in activations],
    }


def activations_from_wire(wire: Mapping[str, Any]) -> tuple[AdapterActivation | None, ...]:
    """Rebuild from ``activations_to_wire``'s dict."""
    distinct = [
        None if one is None else AdapterActivation.from_wire(one) for one in wire["distinct"]
    ]
    return tuple(distinct[index] for index in wire["of_request"])


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What a file holds, found when it was registered.

    Attributes:
        digest: SHA-256 of the file, hex.
        format: "peft", "diffusers" or "kohya".
        layers: layers of the model that it changes, by component ("transformer", ...).
        ranks: the ranks that occur, sorted.
        modules: the kinds of layers, such as "to_q", sorted.
        num_bytes: of its weights in memory.
    """

    digest: str
    format: str
    layers: dict[str, int]
    ranks: list[int]
    modules: list[str]
    num_bytes: int

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict; ``asdict`` would copy every list of every adapter shown."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> AdapterReport:
        """Rebuild from ``to_wire``'s dict."""
        return cls(**wire)


@dataclass(frozen=True, slots=True)
class AdaptersHeld:
    """What a worker has in memory and what its adapters cost so far; sent when it changes.

    Attributes:
        device: digests of those on the device, the least recently used first.
        host: digests of those in host memory.
        device_bytes: their weights on the device.
        host_bytes: their weights in host memory.
        activations: forwards (in step mode ticks' forwards) that ran under other adapters than the
            forward before.
        activation_ms: milliseconds that switching took together.
        device_hits: adapters that were on the device when a request needed them.
        host_hits: those that were in host memory.
        loads: those that were read from disk, prefetched ones included.
        load_ms: milliseconds that reading took together; forwards go on meanwhile.
        wait_ms: milliseconds that forwards had to wait for adapters.
        evictions: adapters that left the device for others.
    """

    device: list[str]
    host: list[str]
    device_bytes: int = 0
    host_bytes: int = 0
    activations: int = 0
    activation_ms: float = 0.0
    device_hits: int = 0
    host_hits: int = 0
    loads: int = 0
    load_ms: float = 0.0
    wait_ms: float = 0.0
    evictions: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``."""
        return {"type": ADAPTERS_HELD, **dataclasses.asdict(self)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> AdaptersHeld:
        """Rebuild from a decoded message."""
        return cls(**{f.name: wire[f.name] for f in dataclasses.fields(cls)})
