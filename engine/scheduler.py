"""The request-mode scheduler: who runs next, with whom, on which worker.

One scheduler serves one stage and all its workers; a batch is a whole generation. It is pure: no
I/O, no threads, no clock. The caller passes the time, in seconds on a clock that never goes back,
and acts on what it gets back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from omni_engine.engine.batching import (
    PolicyName,
    QueuedRequest,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)
from omni_engine.engine.placement import Need, claim, place
from omni_engine.engine.scheduler_base import SchedulerBase

__all__ = [
    "Assignment",
    "PolicyName",
    "RequestScheduler",
    "RequestStatus",
    "SchedulerConfig",
    "WorkerSlot",
]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A batch for a worker to run.

    Args:
        batch_id: counts a scheduler's batches, from 0.
        worker_id: the worker it is for.
        key: the key all its requests share.
        adapter: the identity all its requests share, None for the base model and for mixed ones.
        request_ids: its requests, oldest first.
        rows: the requests' rows together.
    """

    batch_id: int
    worker_id: str
    key: Hashable
    adapter: Hashable | None
    request_ids: tuple[str, ...]
    rows: int


class RequestScheduler(SchedulerBase):
    """Keeps a stage's waiting and running requests and puts waiting ones together into batches.

    Every method takes ``now``, in seconds, never less than at an earlier call.

    Args:
        config: the limits of a batch and the policy.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config, config.request_batch_max_wait_ms)
        self._next_batch_id = 0

    def schedule(self, idle: Sequence[WorkerSlot], now: float) -> list[Assignment]:
        """Start at most one batch on each idle worker.

        Args:
            idle: the workers that can take a batch, each once.
            now: the time, in seconds.

        Returns:
            The batches, in the order they were picked; their requests are RUNNING from here on.
        """
        self._policy.advance(now)
        batches: list[list[QueuedRequest]] = []
        needs: list[Need] = []
        unclaimed = list(idle)
        for _ in idle:
            pick = self._policy.pick(self._queue, unclaimed)
            if pick is None:
                break
            group, size, weights = pick
            need = Need(group.adapter, weights)
            needs.append(need)
            claim(unclaimed, need)
            batches.append(self._queue.take(group, size))
        slots = place(needs, idle)
        return [self._start(batch, slot) for batch, slot in zip(batches, slots, strict=True)]

    def _start(self, batch: list[QueuedRequest], slot: WorkerSlot) -> Assignment:
        for request in batch:
            request.status, request.worker_id = RequestStatus.RUNNING, slot.worker_id
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        return Assignment(
            batch_id=batch_id,
            worker_id=slot.worker_id,
            key=batch[0].key,
            adapter=batch[0].adapter,
            request_ids=tuple([request.request_id for request in batch]),
            rows=sum([request.rows for request in batch]),
        )
