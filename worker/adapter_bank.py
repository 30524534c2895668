"""Which adapters are in memory: on the device and on the host, least recently used ones first.

Limits are hard. Pinned adapters stay, and so do those of the forward that runs. The loader thread
puts adapters in, the main thread uses them; every method may be called from any thread.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass

from omni_engine.protocol.adapters import AdaptersHeld
from omni_engine.worker.adapter_placement import PlacedAdapter
from omni_engine.worker.adapter_weights import AdapterWeights

logger = logging.getLogger(__name__)

_MAX_KNOWN = 65_536
"""Of how many adapters is remembered which components they change, in memory or not."""


class Urgency(enum.IntEnum):
    """Why an adapter is loaded: the more urgent first, and what it may displace."""

    WAITED_FOR = 0
    """A forward waits: it displaces adapters of requests that don't run at this moment, too."""
    NEEDED = 1
    """An assigned request's: waits until there's room beside the adapters of other requests."""
    EXPECTED = 2
    """A planned request's: goes to host memory if there is no room on the device."""
    PREFETCHED = 3
    """A waiting request's: the same."""


@dataclass(slots=True)
class Counters:
    """What adapters cost so far; see ``AdaptersHeld``."""

    activations: int = 0
    activation_ms: float = 0.0
    device_hits: int = 0
    host_hits: int = 0
    loads: int = 0
    load_ms: float = 0.0
    wait_ms: float = 0.0
    evictions: int = 0


class AdapterBank:
    """Adapters in memory.

    Args:
        max_loras: most adapters on the device, >= 1.
        max_cpu_loras: most in host memory. Where both are the same memory and dtype they share it.
        on_evicted: told the digest of each adapter that leaves the device; called with the lock
            held, and must not use the bank.

    Attributes:
        changed: the lock, notified when something happens that others may wait for.
    """

    def __init__(
        self, max_loras: int, max_cpu_loras: int, on_evicted: Callable[[str], None]
    ) -> None:
        self.changed = threading.Condition()
        self.max_loras, self._max_host = max_loras, max_cpu_loras
        self._on_evicted = on_evicted
        self._device: OrderedDict[str, PlacedAdapter] = OrderedDict()
        self._host: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._components: dict[str, frozenset[str]] = {}
        self._pinned: frozenset[str] = frozenset()
        self._assigned: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._doomed: set[str] = set()
        self._counters = Counters()
        self._unreported = False

    # -- what is there

    def device(self, digest: str) -> PlacedAdapter | None:
        """Return an adapter on the device."""
        return self._device.get(digest)

    def on_device(self, digests: Iterable[str]) -> bool:
        """Whether all of them are on the device."""
        return all(digest in self._device for digest in digests)

    def host(self, digest: str) -> AdapterWeights | None:
        """Return an adapter in host memory, which counts as using it."""
        with self.changed:
            found = self._host.get(digest)
            if found is not None:
                self._host.move_to_end(digest)
            return found

    def touch(self, digest: str) -> bool:
        """Whether an adapter is on the device; if so this counts as using it."""
        with self.changed:
            if digest in self._device:
                self._device.move_to_end(digest)
            return digest in self._device

    def components(self, digest: str) -> frozenset[str] | None:
        """Return the components that an adapter changes; None if that isn't known."""
        return self._components.get(digest)

    def held(self) -> AdaptersHeld:
        """Return what is in memory, and the counters."""
        with self.changed:
            return AdaptersHeld(
                device=list(self._device),
                host=list(self._host),
                device_bytes=sum(placed.num_bytes for placed in self._device.values()),
                host_bytes=sum(weights.num_bytes for weights in self._host.values()),
                **asdict(self._counters),
            )

    # -- putting in

    def learn(self, digest: str, components: Iterable[str]) -> None:
        """Remember which components an adapter changes."""
        with self.changed:
            self._components[digest] = frozenset(components)
            if len(self._components) > _MAX_KNOWN:
                del self._components[next(iter(self._components))]

    def put_in_host(self, weights: AdapterWeights) -> None:
        """Keep an adapter in host memory, unless pinned ones fill it."""
        self.learn(weights.digest, weights.components)
        with self.changed:
            self._host[weights.digest] = weights
            self._host.move_to_end(weights.digest)
            while len(self._host) > self._max_host:
                others = (d for d in self._host if d not in self._pinned and d != weights.digest)
                del self._host[next(others, weights.digest)]
            self._note_change()

    def has_room(self, urgency: Urgency) -> bool:
        """Whether an adapter could be put on the device now."""
        with self.changed:
            return len(self._device) < self.max_loras or self._victim(urgency) is not None

    def put_on_device(self, placed: PlacedAdapter, urgency: Urgency) -> bool:
        """Put an adapter on the device, in another one's place if it's full.

        Returns:
            False if none of the others may go.
        """
        with self.changed:
            if placed.digest not in self._device and len(self._device) >= self.max_loras:
                victim = self._victim(urgency)
                if victim is None:
                    return False
                self._leave_device(victim)
                self._counters.evictions += 1
            self._device[placed.digest] = placed
            self._device.move_to_end(placed.digest)
            self._note_change()
            return True

    def fits(self, digests: Collection[str]) -> bool:
        """Whether these could be on the device together, beside pinned ones and running ones."""
        with self.changed:
            staying = {d for d in self._device if d in self._pinned or d in self._running}
            return len(staying | set(digests)) <= self.max_loras

    def _victim(self, urgency: Urgency) -> str | None:
        free = [d for d in self._device if d not in self._pinned and d not in self._running]
        unused = next((d for d in free if d not in self._assigned), None)
        if unused is None and urgency is Urgency.WAITED_FOR:
            return next(iter(free), None)
        return unused

    def _leave_device(self, digest: str) -> None:
        if self._device.pop(digest, None) is not None:
            self._on_evicted(digest)

    # -- using

    def assign(self, digests: Iterable[str]) -> None:
        """Note that a request needs them until ``unassign``."""
        with self.changed:
            for digest in digests:
                self._assigned[digest] += 1
                self._doomed.discard(digest)
                self._counters.device_hits += digest in self._device
                self._counters.host_hits += digest not in self._device and digest in self._host
                self._note_change()

    def is_assigned(self, digest: str) -> bool:
        """Whether a request needs it."""
        return digest in self._assigned

    def unassign(self, digests: Iterable[str]) -> None:
        """Note that a request doesn't need them any more."""
        with self.changed:
            self._decrease(self._assigned, digests)

    def hold(self, digests: Collection[str]) -> bool:
        """Keep these from leaving the device until ``let_go``, whether they are there yet or not.

        Returns:
            Whether all are there.
        """
        with self.changed:
            for digest in digests:
                self._running[digest] += 1
                if digest in self._device:
                    self._device.move_to_end(digest)
            return self.on_device(digests)

    def let_go(self, digests: Collection[str]) -> None:
        """End ``hold``."""
        with self.changed:
            self._decrease(self._running, digests)

    def pin(self, digests: Iterable[str]) -> None:
        """Let exactly these stay in memory, once they are there."""
        with self.changed:
            self._pinned = frozenset(digests)
            if len(self._pinned) >= self.max_loras:
                logger.error(
                    "%d adapters are pinned, of %d that fit on the device: no other can be loaded",
                    len(self._pinned), self.max_loras,
                )  # fmt: skip

    def drop(self, digests: Iterable[str]) -> None:
        """Forget these; those that a request still needs when its last one ends."""
        with self.changed:
            self._pinned -= frozenset(digests)
            self._doomed.update(digests)
            self._bury(digests)

    def _decrease(self, uses: Counter[str], digests: Iterable[str]) -> None:
        for digest in digests:
            uses[digest] -= 1
            if uses[digest] <= 0:
                del uses[digest]
        self._bury(digests)

    def _bury(self, digests: Iterable[str]) -> None:
        for digest in digests:
            used = digest in self._assigned or digest in self._running
            if digest in self._doomed and not used:
                self._doomed.discard(digest)
                self._host.pop(digest, None)
                self._leave_device(digest)
                self._note_change()

    # -- counting

    def count_activation(self, seconds: float) -> None:
        """Count a switch to other adapters than the last forward's."""
        with self.changed:
            self._counters.activations += 1
            self._counters.activation_ms += seconds * 1000
            self._note_change()

    def count_load(self, seconds: float) -> None:
        """Count an adapter that was read from disk."""
        with self.changed:
            self._counters.loads += 1
            self._counters.load_ms += seconds * 1000
            self._note_change()

    def count_wait(self, seconds: float) -> None:
        """Count the time that a forward waited for adapters."""
        with self.changed:
            self._counters.wait_ms += seconds * 1000
            self._note_change()

    def _note_change(self) -> None:
        """Wake the loader thread, which sends what ``held`` returns."""
        if not self._unreported:
            self._unreported = True
            self.changed.notify_all()

    def take_unreported(self) -> bool:
        """Return whether ``held`` differs from what it was at the last call."""
        with self.changed:
            unreported, self._unreported = self._unreported, False
            return unreported

    @property
    def unreported(self) -> bool:
        """Whether ``held`` differs from what it was at the last ``take_unreported``."""
        return self._unreported
