"""How much adapters are asked for: counted by name and content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from omni_engine.engine.live_request import LiveRequest
from omni_engine.protocol.adapters import Adapter, AdapterActivation
from omni_engine.protocol.lora_info import LoRAUse


@dataclass(slots=True)
class _Asked:
    total: int = 0
    last: float = 0.0


class AdapterUsage:
    """Counts the requests of one stage by the adapters they run under.

    A name and the content that it meant are counted together: a file that was replaced begins anew.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], _Asked] = {}
        self._live: Counter[str] = Counter()
        self._adapters: dict[str, Adapter] = {}

    @property
    def any_live(self) -> bool:
        """Whether any request runs, or is to run, under an adapter."""
        return bool(self._live)

    def is_live(self, digest: str) -> bool:
        """Whether a request that has not ended needs this content."""
        return digest in self._live

    def adapter(self, digest: str) -> Adapter:
        """Return an adapter with this content that a request needs that has not ended."""
        return self._adapters[digest]

    def admit(self, activation: AdapterActivation, now: float) -> None:
        """Count a request in."""
        for adapter in activation.adapters:
            self._live[adapter.digest] += 1
            self._adapters[adapter.digest] = adapter
            asked = self._asked.setdefault((adapter.name, adapter.digest), _Asked())
            asked.total += 1
            asked.last = now

    def end(self, activation: AdapterActivation) -> list[str]:
        """Count a request out; returns the contents that no other needs."""
        ended = []
        for digest in activation.digests:
            self._live[digest] -= 1
            if not self._live[digest]:
                del self._live[digest], self._adapters[digest]
                ended.append(digest)
        return ended

    def forget(self, name: str, digest: str) -> None:
        """Drop the count of a name with a content that it means no more."""
        self._asked.pop((name, digest), None)

    def total(self, name: str, digest: str | None) -> int:
        """Return how many requests were admitted with a name that meant a content."""
        asked = self._asked.get((name, digest or ""))
        return 0 if asked is None else asked.total

    def last_used_s(self, name: str, digest: str | None, now: float) -> float | None:
        """Return how many seconds ago the last of them was; None if there was none."""
        asked = self._asked.get((name, digest or ""))
        return None if asked is None else now - asked.last


class LiveUses:
    """The requests of a moment that have not ended, by the adapters they use.

    Args:
        live: all requests of the stage.
        parked: the names that requests ask for whose adapters are not known yet.
    """

    def __init__(self, live: Iterable[LiveRequest], parked: Iterable[str]) -> None:
        self._parked = Counter(parked)
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._running: Counter[tuple[str, str]] = Counter()
        for request in live:
            activation = None if request.admitted is None else request.admitted.activation
            if activation is not None:
                counts = self._waiting if request.started is None else self._running
                counts.update((adapter.name, adapter.digest) for adapter in activation.adapters)

    def of(self, name: str, digest: str | None, admitted: int) -> LoRAUse:
        """Return the use of a name.

        Args:
            name: the adapter's.
            digest: the content that counts; parked requests have none, but take it.
            admitted: requests that were admitted with both, ended ones included.
        """
        parked, key = self._parked[name], (name, digest or "")
        return LoRAUse(admitted + parked, self._waiting[key] + parked, self._running[key])

    def left(self, name: str) -> LoRAUse:
        """Return the use of a name by requests that have not ended, whatever content it meant."""
        waiting = sum(n for (of, _), n in self._waiting.items() if of == name)
        running = sum(n for (of, _), n in self._running.items() if of == name)
        return LoRAUse(waiting + running, waiting, running)


def most_at_once(live: Iterable[LiveRequest], pinned: frozenset[str]) -> int:
    """Return how many adapters beside the pinned ones the most demanding request needs."""
    activations = (r.admitted.activation for r in live if r.admitted is not None)
    return max((len(set(a.digests) - pinned) for a in activations if a is not None), default=0)
