"""Which contents the names of a registry mean, and which of them are pinned."""

from __future__ import annotations

from collections import Counter

from omni_engine.engine.registered_adapter import RegisteredAdapter


class ContentsInForce:
    """Counts names by content: several names may mean one.

    Attributes:
        pinned: the contents that a pinned name means.
    """

    def __init__(self) -> None:
        self.pinned: frozenset[str] = frozenset()
        self._names: Counter[str] = Counter()
        self._pins: Counter[str] = Counter()

    def __contains__(self, digest: object) -> bool:
        return digest in self._names

    def add(self, entry: RegisteredAdapter) -> None:
        """Count a name in; call ``remove`` before its content or its pin changes."""
        if (digest := entry.digest) is None:
            return
        self._names[digest] += 1
        if entry.pin:
            self._pins[digest] += 1
            self.pinned = frozenset(self._pins)

    def remove(self, entry: RegisteredAdapter) -> None:
        """Count a name out, as it was counted in."""
        if (digest := entry.digest) is None:
            return
        _decrement(self._names, digest)
        if entry.pin:
            _decrement(self._pins, digest)
            self.pinned = frozenset(self._pins)


def _decrement(counts: Counter[str], digest: str) -> None:
    counts[digest] -= 1
    if not counts[digest]:
        del counts[digest]
