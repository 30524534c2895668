"""Which of the adapters that waiting groups need are wholly on which worker's device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from omni_engine.engine.batching import NO_WEIGHTS, Weights, WorkerSlot


@dataclass(slots=True)
class _Device:
    held: Weights
    warm: dict[Weights, None] = field(default_factory=dict)


class WarmSets:
    """The sets of weights that wait, and those of them that each worker holds.

    Kept up to date set by set and digest by digest: a look costs nothing beyond what is found
    unless what the worker holds changed, and then the sets that need the digests that changed.
    """

    __slots__ = ("_devices", "_needing", "_users")

    def __init__(self) -> None:
        self._users: dict[Weights, int] = {}
        self._needing: dict[str, dict[Weights, None]] = {}
        self._devices: dict[str, _Device] = {}

    def __len__(self) -> int:
        return len(self._users)

    def add(self, weights: Weights) -> None:
        """Note that one more group needs ``weights``."""
        if not weights:
            return
        users = self._users.get(weights, 0)
        self._users[weights] = users + 1
        if users:
            return
        for digest in weights:
            self._needing.setdefault(digest, {})[weights] = None
        for device in self._devices.values():
            if weights <= device.held:
                device.warm[weights] = None

    def remove(self, weights: Weights) -> None:
        """Note that one group less needs ``weights``."""
        if not weights:
            return
        self._users[weights] -= 1
        if self._users[weights]:
            return
        del self._users[weights]
        for digest in weights:
            needing = self._needing[digest]
            del needing[weights]
            if not needing:
                del self._needing[digest]
        for device in self._devices.values():
            device.warm.pop(weights, None)

    def on(self, slots: Sequence[WorkerSlot]) -> Collection[Weights]:
        """Return the sets that are wholly on one of ``slots``; the base model's empty one is."""
        found = {NO_WEIGHTS: None}
        for slot in slots:
            found |= self._seen(slot).warm
        return found.keys()

    def _seen(self, slot: WorkerSlot) -> _Device:
        device = self._devices.get(slot.worker_id)
        if device is None:
            device = self._devices[slot.worker_id] = _Device(NO_WEIGHTS)
        if device.held != slot.held_adapters:
            changed = device.held ^ slot.held_adapters
            device.held = slot.held_adapters
            for digest in changed:
                for weights in self._needing.get(digest, ()):
                    if weights <= device.held:
                        device.warm[weights] = None
                    else:
                        device.warm.pop(weights, None)
        return device
