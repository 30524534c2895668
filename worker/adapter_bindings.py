"""What can be bound to one component's layers; made once for each identity, then switched to."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from omni_engine.protocol.adapters import AdapterIdentity
from omni_engine.worker.adapter_weights import LayerWeights
from omni_engine.worker.lora_layers import (
    ComponentHooks,
    Part,
    Parts,
    UniformUpdate,
    Update,
    Updates,
    is_convolution,
)
from omni_engine.worker.mixed_rows import (
    BlockwiseUpdate,
    StackedUpdate,
    common_rows,
    stacked_bytes,
)

Calls = tuple[tuple[AdapterIdentity, int], ...]
"""What each call of a forward runs under, () for the bare model, and its number of rows."""

_MAX_IDENTITIES = 128
"""How many identities' bindings are kept; they refer to weights and copy none."""

_MAX_FORWARDS = 16
"""How many compositions of forwards are kept."""

_MAX_STACKED_BYTES = 512 * 2**20
"""Memory for copies of weights, of all compositions together. A forward that would need more goes
through its adapters one by one."""


@dataclass(frozen=True, slots=True)
class _Kept:
    updates: Updates
    digests: frozenset[str]
    num_bytes: int


class ComponentBindings:
    """Makes and keeps what is bound to a component's layers.

    Used by the main thread, but for ``forget``.

    Args:
        module: the component.
        layers_of: returns the layers of an adapter on the device that are the component's, by path.
        exact_rows: has each call's rows computed by themselves, so that no result depends by a bit
            on the calls beside it.

    Attributes:
        hooks: the component's hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        layers_of: Callable[[str], Mapping[str, LayerWeights]],
        exact_rows: bool,
    ) -> None:
        self.hooks = ComponentHooks(module)
        self._layers_of, self._exact_rows = layers_of, exact_rows
        self._identities: OrderedDict[AdapterIdentity, dict[str, UniformUpdate]] = OrderedDict()
        self._forwards: OrderedDict[Calls, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def of_identity(self, identity: AdapterIdentity) -> Mapping[str, UniformUpdate]:
        """Return what to bind where everything runs under one identity."""
        with self._lock:
            if (found := self._identities.get(identity)) is not None:
                self._identities.move_to_end(identity)
                return found
        parts: dict[str, Parts] = {}
        for digest, scale in identity:
            for path, layer in self._layers_of(digest).items():
                part = Part(layer.down, layer.up, layer.scaling * scale)
                parts[path] = (*parts.get(path, ()), part)
        updates = {path: UniformUpdate(self.hooks.layer(path), ps) for path, ps in parts.items()}
        self.hooks.install(updates)
        with self._lock:
            self._identities[identity] = updates
            if len(self._identities) > _MAX_IDENTITIES:
                self._identities.popitem(last=False)
        return updates

    def of_calls(self, calls: Calls) -> Updates:
        """Return what to bind for a forward of these calls, one under adapters at least."""
        if len(set(calls)) == 1 and (len(calls) == 1 or not self._exact_rows):
            return self.of_identity(calls[0][0])
        with self._lock:
            if (found := self._forwards.get(calls)) is not None:
                self._forwards.move_to_end(calls)
                return found.updates
        rows_per_block = common_rows(rows for _, rows in calls)
        identities = [one for one, rows in calls for _ in range(rows // rows_per_block)]
        blocks = self._blocks(identities)
        needed = 0 if self._exact_rows else sum(map(_copied_bytes, blocks.values()))
        stacks = 0 < needed <= _MAX_STACKED_BYTES
        self._make_room(needed if stacks else 0)
        shared: dict[Hashable, Tensor] = {}
        updates: dict[str, Update] = {}
        for path, each in blocks.items():
            if stacks and _copied_bytes(each):
                updates[path] = StackedUpdate(each, rows_per_block, shared)
            else:
                layer = self.hooks.layer(path)
                updates[path] = BlockwiseUpdate(layer, each, rows_per_block, self._exact_rows)
        digests = frozenset(digest for one in identities for digest, _ in one)
        with self._lock:
            self._forwards[calls] = _Kept(updates, digests, needed if stacks else 0)
        return updates

    def forget(self, digest: str) -> None:
        """Let go of an adapter's weights; nothing that is bound uses them."""
        with self._lock:
            for one in [one for one in self._identities if any(d == digest for d, _ in one)]:
                del self._identities[one]
            for calls in [key for key, kept in self._forwards.items() if digest in kept.digests]:
                del self._forwards[calls]

    def clear(self) -> None:
        """Restore the component's layers and let go of everything."""
        self.hooks.remove()
        with self._lock:
            self._identities.clear()
            self._forwards.clear()

    def _blocks(self, identities: Sequence[AdapterIdentity]) -> dict[str, tuple[Parts, ...]]:
        """Return what is added to each block of rows, by path; equal identities' are one object."""
        updates = {one: self.of_identity(one) for one in dict.fromkeys(identities)}
        paths = dict.fromkeys(path for each in updates.values() for path in each)
        return {
            path: tuple(
                update.parts if (update := updates[one].get(path)) is not None else ()
                for one in identities
            )
            for path in paths
        }

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            kept = sum(forward.num_bytes for forward in self._forwards.values())
            while self._forwards and (
                kept + num_bytes > _MAX_STACKED_BYTES or len(self._forwards) >= _MAX_FORWARDS
            ):
                kept -= self._forwards.popitem(last=False)[1].num_bytes


def _copied_bytes(blocks: Sequence[Parts]) -> int:
    """Return how much memory copies of the weights take; 0 where none are made."""
    changed = next(parts for parts in blocks if parts)
    return 0 if is_convolution(changed) else stacked_bytes(blocks)
