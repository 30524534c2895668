"""Which groups are resident on which of a stage's workers, and where a request fits best."""

from __future__ import annotations

from collections.abc import Sequence

from omni_engine.engine.batching import BatchLimits, QueuedRequest, WorkerSlot
from omni_engine.engine.placement import Need, affinity
from omni_engine.engine.residency import Residency, ResidentWorker
from omni_engine.engine.waiting_queue import GroupId

_Rank = tuple[int, int, bool, tuple[int, int]]


class ResidencyTable:
    """All workers of a stage with their resident groups.

    Args:
        limits: what one resident group may hold.
        max_groups: groups a worker keeps at most.

    Attributes:
        workers: every worker seen and not removed, by id.
        ready: those that are ready, in the order of the pool.
    """

    def __init__(self, limits: BatchLimits, max_groups: int) -> None:
        self._limits = limits
        self._max_groups = max_groups
        self._homes: dict[GroupId, list[Residency]] = {}
        self._next_group_id = 0
        self.workers: dict[str, ResidentWorker] = {}
        self.ready: list[ResidentWorker] = []

    @property
    def free_places(self) -> int:
        """How many more groups the ready workers could keep."""
        return sum([self._free_places_of(worker) for worker in self.ready])

    def slots_with_place(self) -> list[WorkerSlot]:
        """Return the ready workers that could keep another group."""
        return [worker.slot for worker in self.ready if self._free_places_of(worker)]

    def resident(self) -> list[GroupId]:
        """Return what is resident anywhere, that which is there longest first."""
        return list(self._homes)

    def admits(self, group: GroupId) -> bool:
        """Whether any residency of ``group`` lets requests join when it has room."""
        return any(home.admits for home in self._homes.get(group, ()))

    def longest_admitting(self) -> Residency | None:
        """Return the residency that is the oldest of those that let requests join."""
        homes = [h for worker in self.ready for h in worker.groups.values() if h.admits]
        return min(homes, key=lambda home: home.group_id, default=None)

    def see(self, slots: Sequence[WorkerSlot]) -> list[ResidentWorker]:
        """Take note of which workers are ready; return those that just became so or ceased to."""
        for slot in slots:
            worker = self.workers.get(slot.worker_id)
            if worker is None:
                worker = self.workers[slot.worker_id] = ResidentWorker(slot)
            worker.slot = slot
        self.ready = [self.workers[slot.worker_id] for slot in slots]
        ready_ids = {slot.worker_id for slot in slots}
        changed = [w for w in self.workers.values() if w.ready != (w.worker_id in ready_ids)]
        for worker in changed:
            worker.ready = not worker.ready
        return changed

    def find(
        self, group: GroupId, request: QueuedRequest, may_open: bool
    ) -> tuple[ResidentWorker, Residency | None] | None:
        """Find the least loaded worker on which ``request`` fits.

        Among equals one goes first that keeps the group already, then one where its identity is
        active, then one that holds all its weights, then the most of them, then the pool's order
        decides.

        Args:
            group: the request's group.
            request: what must fit.
            may_open: whether a worker that doesn't keep the group may start to.

        Returns:
            The worker, and its residency of the group, None if it is to be opened; None if the
            request fits nowhere.
        """
        need = Need(request.adapter, frozenset(request.weights))
        best: tuple[_Rank, ResidentWorker, Residency | None] | None = None
        for worker in self.ready:
            home = worker.groups.get(group)
            if home is None:
                if not may_open or not self._free_places_of(worker):
                    continue
            elif not home.admits or not home.has_room(request):
                continue
            rank = (worker.work, worker.rows, home is None, affinity(worker.slot, need))
            if best is None or rank < best[0]:
                best = (rank, worker, home)
        return None if best is None else best[1:]

    def open(self, worker: ResidentWorker, request: QueuedRequest) -> Residency:
        """Make the group of ``request`` resident on a worker that doesn't keep it."""
        home = Residency(self._next_group_id, worker, request.key, request.adapter, self._limits)
        self._next_group_id += 1
        worker.groups[home.key_and_adapter] = home
        self._homes.setdefault(home.key_and_adapter, []).append(home)
        return home

    def close(self, home: Residency) -> None:
        """Let a residency end and its place be free."""
        home.worker.remove(home)
        homes = self._homes[home.key_and_adapter]
        homes.remove(home)
        if not homes:
            del self._homes[home.key_and_adapter]

    def least_loaded(self) -> ResidentWorker | None:
        """Return the ready worker with the least to do."""
        return min(self.ready, key=lambda worker: (worker.work, worker.rows), default=None)

    def _free_places_of(self, worker: ResidentWorker) -> int:
        return 0 if worker.reserved else self._max_groups - len(worker.groups)

    def remove_worker(self, worker: ResidentWorker) -> None:
        """Forget a lost worker; its groups are closed."""
        del self.workers[worker.worker_id]
        if worker.ready:
            self.ready.remove(worker)
            worker.ready = False
        for home in list(worker.groups.values()):
            self.close(home)
