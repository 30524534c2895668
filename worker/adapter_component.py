"""A pipeline's components under adapters: what their forwards are bound to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from omni_engine.protocol.adapters import AdapterIdentity
from omni_engine.worker.adapter_bindings import Calls, ComponentBindings
from omni_engine.worker.adapter_placement import PlacedAdapter
from omni_engine.worker.adapter_weights import LayerWeights
from omni_engine.worker.lora_layers import Updates
from omni_engine.worker.merged_adapter import MergedAdapter

BASE: AdapterIdentity = ()
"""The bare model's identity."""


class AdaptedComponent:
    """What is bound to one component's layers.

    Args:
        module: the component.
        layers_of: see ``ComponentBindings``.
        exact_rows: see ``ComponentBindings``.
        merge: see ``MergedAdapter``; not with ``exact_rows``.

    Attributes:
        bindings: makes what is bound.
        hooks: where it is bound.
        merged: keeps a merged copy, if one is wanted.
    """

    def __init__(
        self,
        module: nn.Module,
        layers_of: Callable[[str], Mapping[str, LayerWeights]],
        exact_rows: bool,
        merge: bool,
    ) -> None:
        self.bindings = ComponentBindings(module, layers_of, exact_rows)
        self.hooks = self.bindings.hooks
        self.merged = MergedAdapter(self.hooks) if merge and not exact_rows else None
        self._last = frozenset([BASE])

    def updates(self, calls: Calls) -> Updates | None:
        """Return what to bind for a forward of these calls; their adapters are on the device."""
        identities = {identity for identity, _ in calls}
        identity = identities.pop() if len(identities) == 1 else None
        if self.merged is not None:
            self.merged.note(calls if identity is None else identity)
        if identity == BASE:
            return None
        if identity is not None and self.merged is not None:
            return self.merged.updates(identity, self.bindings.of_identity(identity))
        return self.bindings.of_calls(calls)

    def is_switch(self, calls: Calls) -> bool:
        """Whether a forward of these calls runs under other adapters than the one before it."""
        before, self._last = self._last, frozenset(identity for identity, _ in calls)
        return before != self._last

    def forget(self, digest: str) -> None:
        """Let go of an adapter that leaves the device."""
        self.bindings.forget(digest)
        if self.merged is not None:
            self.merged.forget(digest)

    def clear(self) -> None:
        """Restore the module."""
        self.bindings.clear()
        if self.merged is not None:
            self.merged.drop()


class AdaptedPipeline:
    """The components of a pipeline.

    Args:
        pipe: the pipeline.
        placed: returns an adapter that is on the device.
        exact_rows: see ``ComponentBindings``.
        merge: see ``AdaptedComponent``.

    Attributes:
        modules: the components that are modules, by name.
    """

    def __init__(
        self,
        pipe: Any,
        placed: Callable[[str], PlacedAdapter | None],
        exact_rows: bool,
        merge: bool,
    ) -> None:
        self._placed = placed
        self.modules: dict[str, nn.Module] = {
            name: value for name, value in pipe.components.items() if isinstance(value, nn.Module)
        }
        self._components = {
            name: AdaptedComponent(module, self._layers_of(name), exact_rows, merge)
            for name, module in self.modules.items()
        }

    @contextlib.contextmanager
    def bound(self, calls: Mapping[str, Calls]) -> Iterator[bool]:
        """Bind components, each to what its calls run under; restores what was bound before.

        Yields:
            Whether one of them runs under other adapters than in the forward before.
        """
        components = [(self._components[name], each) for name, each in calls.items()]
        before = [(component.hooks, component.hooks.updates) for component, _ in components]
        try:
            for component, each in components:
                component.hooks.updates = component.updates(each)
            switched = [component.is_switch(each) for component, each in components]
            yield any(switched)
        finally:
            for hooks, updates in before:
                hooks.updates = updates

    def forget(self, digest: str) -> None:
        """Let go of an adapter that leaves the device; from any thread."""
        for component in self._components.values():
            component.forget(digest)

    def clear(self) -> None:
        """Restore all components."""
        for component in self._components.values():
            component.clear()

    def _layers_of(self, component: str) -> Callable[[str], Mapping[str, LayerWeights]]:
        def layers_of(digest: str) -> Mapping[str, LayerWeights]:
            placed = self._placed(digest)
            assert placed is not None, "bound while it isn't on the device"
            return placed.layers.get(component, {})

        return layers_of
