"""Which adapters workers load while they still run something else, so that nobody waits for them.

Pure: no sockets, no clock; messages to workers leave through a callback.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omni_engine.protocol.adapters import ADAPTER_PREFETCH, Adapter, AdaptersHeld

RETELL_S = 1.0
"""After how long a worker that still hasn't loaded an adapter is told again."""

MAX_AHEAD = 64
"""Groups of waiting requests that are looked at in one go."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker that can be told to load adapters.

    Args:
        worker_id: its id.
        running: requests that it runs.
        needed: contents that these need.
    """

    worker_id: str
    running: int
    needed: frozenset[str]


class Prefetch:
    """Tells workers what to load next, each adapter to the one that will likely run it.

    Args:
        places: adapters on a worker's device at most.
        send: sends a message to a worker by its id.
    """

    def __init__(self, places: int, send: Callable[[str, dict[str, Any]], None]) -> None:
        self._places = places
        self._send = send
        self._device: dict[str, frozenset[str]] = {}
        self._host: dict[str, frozenset[str]] = {}
        self._told: dict[str, dict[str, float]] = {}

    def tell(self, worker_id: str, adapters: Collection[Adapter], now: float) -> None:
        """Tell a worker to load adapters, whatever it runs."""
        if not adapters:
            return
        self._told.setdefault(worker_id, {}).update({a.digest: now for a in adapters})
        wire = [dataclasses.asdict(adapter) for adapter in adapters]
        self._send(worker_id, {"type": ADAPTER_PREFETCH, "adapters": wire})

    def note_held(self, worker_id: str, held: AdaptersHeld) -> None:
        """Take note of what a worker has in memory."""
        self._device[worker_id] = frozenset(held.device)
        self._host[worker_id] = frozenset(held.host)
        for digest in held.device:
            self._told.get(worker_id, {}).pop(digest, None)

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone."""
        for of_worker in (self._device, self._host, self._told):
            of_worker.pop(worker_id, None)

    def plan(
        self,
        upcoming: Iterable[tuple[str, ...]],
        workers: Sequence[WorkerLoad],
        pinned: frozenset[str],
        adapter_of: Callable[[str], Adapter],
        now: float,
    ) -> None:
        """Tell workers what the next requests need and nobody has.

        No worker is told more than fits beside what it runs, what is pinned and what it was told.

        Args:
            upcoming: the contents that the next batches need, the most urgent first.
            workers: those that are ready.
            pinned: contents that every worker keeps.
            adapter_of: returns the adapter of a content that is needed.
            now: seconds, monotonic.
        """
        taken = {w.worker_id: pinned | w.needed | self._loading(w.worker_id, now) for w in workers}
        chosen: Counter[str] = Counter()
        for weights in upcoming:
            wanted = frozenset(weights)
            worker = self._choose(wanted, workers, taken, chosen)
            if worker is None:
                continue
            worker_id = worker.worker_id
            taken[worker_id] |= wanted
            chosen[worker_id] += 1
            has = self._has(worker_id)
            self.tell(worker_id, [adapter_of(d) for d in weights if d not in has], now)

    def _choose(
        self,
        wanted: frozenset[str],
        workers: Sequence[WorkerLoad],
        taken: dict[str, frozenset[str]],
        chosen: Counter[str],
    ) -> WorkerLoad | None:
        """Return who is to have some adapters, or has them; None if there is no room for them."""
        holders = [worker for worker in workers if wanted <= self._has(worker.worker_id)]
        roomy = [
            worker
            for worker in holders or workers
            if len(taken[worker.worker_id] | wanted) <= self._places
        ]

        def suits(worker: WorkerLoad) -> tuple[int, ...]:
            worker_id = worker.worker_id
            loaded = len(wanted & self._has(worker_id))
            near = len(wanted & self._host.get(worker_id, frozenset()))
            busy = (chosen[worker_id], worker.running, len(taken[worker_id]))
            return loaded, near, *(-n for n in busy)

        return max(roomy, key=suits, default=None)

    def _has(self, worker_id: str) -> frozenset[str]:
        """Return what a worker has on its device, or was told to load."""
        told = self._told.get(worker_id, {})
        return self._device.get(worker_id, frozenset()) | told.keys()

    def _loading(self, worker_id: str, now: float) -> frozenset[str]:
        """Return what a worker was told and hasn't loaded; what is overdue may be told again."""
        told = self._told.get(worker_id, {})
        for digest in [digest for digest, at in told.items() if now - at >= RETELL_S]:
            del told[digest]
        return frozenset(told)
