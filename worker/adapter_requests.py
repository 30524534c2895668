"""What one request runs under."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from omni_engine.protocol.adapters import Adapter, AdapterActivation, AdapterIdentity
from omni_engine.worker.adapter_component import BASE
from omni_engine.worker.adapter_loader import Load


@dataclass(slots=True)
class AdaptedRequest:
    """A request and its adapters.

    Attributes:
        activation: its adapters; None for the bare model.
        loads: of those that weren't on the device, by digest.
    """

    activation: AdapterActivation | None
    loads: dict[str, Load] = field(default_factory=dict)
    _parts: dict[str, AdapterIdentity] = field(default_factory=dict)

    def part(
        self, component: str | None, components_of: Callable[[str], frozenset[str] | None]
    ) -> AdapterIdentity:
        """Return the part of the request's identity that may change a component.

        Args:
            component: None asks for all at once.
            components_of: returns the components that an adapter changes, None if not known: then
                it may change any.
        """
        if self.activation is None:
            return BASE
        identity = self.activation.identity
        if component is None:
            return identity
        if (part := self._parts.get(component)) is not None:
            return part
        changed = [components_of(digest) for digest, _ in identity]
        part = tuple(
            pair
            for pair, components in zip(identity, changed, strict=True)
            if components is None or component in components
        )
        if None not in changed:
            self._parts[component] = part
        return part


def adapters_of(requests: Iterable[AdaptedRequest]) -> dict[str, Adapter]:
    """Return the adapters of several requests by digest."""
    found = (one.activation.adapters for one in requests if one.activation is not None)
    return {adapter.digest: adapter for adapters in found for adapter in adapters}
