"""Requests that may be what their worker died of: each runs with nobody beside it.

Pure, as the schedulers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from omni_engine.engine.batching import QueuedRequest, Suspect
from omni_engine.engine.residency import Residency, ResidentWorker
from omni_engine.engine.residency_table import ResidencyTable
from omni_engine.engine.waiting_queue import GroupId


class HeldSuspects:
    """The suspects of step mode, held until a worker has nobody else.

    Args:
        table: the stage's workers with their resident groups.
        take_in: gives a suspect its place in a group of its own.
        refile: told of a group that may have begun or ceased to let requests join.
    """

    def __init__(
        self,
        table: ResidencyTable,
        take_in: Callable[[QueuedRequest, Residency], None],
        refile: Callable[[GroupId], None],
    ) -> None:
        self._table = table
        self._take_in, self._refile = take_in, refile
        self._by_seq: dict[int, QueuedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._by_seq.values())

    def hold(self, suspects: Iterable[QueuedRequest]) -> None:
        """Let suspects wait."""
        self._by_seq |= {one.seq: one for one in suspects}

    def discard(self, request: QueuedRequest) -> bool:
        """Let a request go if it is here; returns whether it was."""
        return self._by_seq.pop(request.seq, None) is not None

    def drain(self) -> list[QueuedRequest]:
        """Let all go, and return them."""
        drained = list(self)
        self._by_seq.clear()
        return drained

    def settle(self, *, awaited: bool) -> None:
        """Give suspects, the oldest first, workers that have nobody else.

        If there is none, the least loaded one takes in nobody from now on.

        Args:
            awaited: whether another worker is on its way; none is taken from others meanwhile.
        """
        for worker in self._table.workers.values():
            worker.reserved &= bool(worker.groups)
        for worker in self._table.ready:
            if self._by_seq and not worker.groups:
                suspect = self._by_seq.pop(min(self._by_seq))
                worker.reserved = True
                self._take_in(suspect, self._table.open(worker, suspect))
        reserved = [worker for worker in self._table.ready if worker.reserved]
        if not self._by_seq:
            for worker in reserved:
                if not any(isinstance(home.key, Suspect) for home in worker.groups.values()):
                    self._reserve(worker, False)
        elif not reserved and not awaited and (least := self._table.least_loaded()):
            self._reserve(least, True)

    def _reserve(self, worker: ResidentWorker, reserved: bool) -> None:
        worker.reserved = reserved
        for key_and_adapter in worker.groups:
            self._refile(key_and_adapter)
