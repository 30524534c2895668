"""The vocabulary of batching: a queued request, the limits of a batch, a group, an idle worker."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

PolicyName = Literal["grouped", "fifo"]

Weights = frozenset[str]
"""Digests that must be on a device together."""

NO_WEIGHTS: Weights = frozenset()
"""What the base model needs."""


class RequestStatus(enum.Enum):
    """Where a request stands in its life: waiting, running, or ended in one of three ways."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_COMPLETED = "finished_completed"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"

    @property
    def is_finished(self) -> bool:
        """Whether the status is final."""
        return self not in (RequestStatus.WAITING, RequestStatus.RUNNING)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A live request as a scheduler keeps it; compared by identity.

    Args:
        request_id: the caller's name for it, unique among live requests.
        key: requests batch together only if their keys, and adapters, are equal; opaque.
        adapter: the identity of what it runs under, scales included, that it shares with its
            batch; None for the base model, and where adapters are mixed; opaque.
        rows: outputs it takes up in a batch.
        work: work units it takes up in a batch (rows x pixels x frames).
        arrival: when it was added, in seconds.
        seq: its place in the arrival order; unique, and kept when it is put back.
        weights: the digests that must be on the device for it, sorted; none for the base model.
        status: WAITING or RUNNING; a finished request is no longer kept.
        worker_id: the worker that runs it, None while it waits.
        abort_requested: whether it was aborted while running.
        prev: its neighbour towards the head of its group's queue.
        next: its neighbour towards the tail of its group's queue.
    """

    request_id: str
    key: Hashable
    adapter: Hashable | None
    rows: int
    work: int
    arrival: float
    seq: int
    weights: tuple[str, ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    worker_id: str | None = None
    abort_requested: bool = False
    prev: QueuedRequest | None = None
    next: QueuedRequest | None = None


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker that can take a batch now, as its pool sees it.

    Args:
        worker_id: the worker's name.
        active_adapter: the identity its last batch ran with; None is the base model.
        held_adapters: the digests of the weights on its device, active at little cost.
    """

    worker_id: str
    active_adapter: Hashable | None = None
    held_adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may hold.

    Args:
        max_num_seqs: requests.
        max_rows: rows, summed over the requests.
        max_work: work units, summed over the requests.
        max_adapters: different weights that its requests need together.
    """

    max_num_seqs: int
    max_rows: float = inf
    max_work: float = inf
    max_adapters: float = inf


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a stage's batches may hold and how they are picked.

    Args:
        max_num_seqs: requests per batch, at least 1.
        max_batch_rows: rows (outputs) per batch, at least 1; None for no limit.
        max_batch_work: work units per batch (rows x pixels x frames), at least 1; None for no
            limit.
        request_batch_max_wait_ms: how long, from its arrival, a request may wait for others to
            fill its batch, in milliseconds; 0 adds no wait.
        max_mixed_adapters: different weights per batch where adapters are mixed, at least 1; a
            composition counts each of its own. None for no limit, as where a batch has one adapter.
        policy: ``grouped`` or ``fifo``, see ``omni_engine.engine.policies``.
        max_skip_ms: after how long the oldest request goes before fuller batches, and before
            those whose adapters need not be loaded, in milliseconds; without effect under
            ``fifo``, which passes nobody over.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    max_num_seqs: int = 4
    max_batch_rows: int | None = None
    max_batch_work: int | None = None
    max_mixed_adapters: int | None = None
    request_batch_max_wait_ms: float = 0.0
    policy: PolicyName = "grouped"
    max_skip_ms: float = 1000.0

    def __post_init__(self) -> None:
        _check_count("max_num_seqs", self.max_num_seqs)
        for name in ("max_batch_rows", "max_batch_work", "max_mixed_adapters"):
            if (value := getattr(self, name)) is not None:
                _check_count(name, value)
        for name in ("request_batch_max_wait_ms", "max_skip_ms"):
            _check_duration(name, getattr(self, name))
        if self.policy not in get_args(PolicyName):
            raise ValueError(f"policy = {self.policy!r}: must be 'grouped' or 'fifo'")

    @property
    def limits(self) -> BatchLimits:
        """What one batch may hold."""
        others = (self.max_batch_rows, self.max_batch_work, self.max_mixed_adapters)
        return BatchLimits(self.max_num_seqs, *(inf if one is None else one for one in others))


class BatchFill:
    """How far requests, offered one after the other, fill a batch.

    Attributes:
        count: requests in it.
        rows: their rows together.
        work: their work units together.
        weights: the digests they need together.
        full: whether nothing more fits, or the last one offered didn't.
        last_seq: the ``seq`` of the last one offered, -1 before.
    """

    __slots__ = ("_limits", "count", "full", "last_seq", "rows", "weights", "work")

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self.count = 0
        self.rows = 0
        self.work = 0
        self.weights: Weights = NO_WEIGHTS
        self.full = False
        self.last_seq = -1

    def add(self, request: QueuedRequest) -> bool:
        """Count ``request`` in; return False, and be full from then on, if it doesn't fit."""
        limits = self._limits
        rows, work, weights = self.rows + request.rows, self.work + request.work, self.weights
        if request.weights and not weights.issuperset(request.weights):
            weights = weights.union(request.weights)
        self.last_seq = request.seq
        if (
            self.full
            or rows > limits.max_rows
            or work > limits.max_work
            or len(weights) > limits.max_adapters
        ):
            self.full = True
            return False
        self.count += 1
        self.rows, self.work, self.weights = rows, work, weights
        # At a limit nothing more can fit, whatever comes next: no reason to wait for it.
        self.full = (
            self.count >= limits.max_num_seqs or rows >= limits.max_rows or work >= limits.max_work
        )
        return True


class RequestGroup:
    """The waiting requests with one key and one adapter, oldest first.

    Attributes:
        key: the key its requests share.
        adapter: the adapter its requests share, None for the base model.
        head: its oldest request, None when it is empty.
        tail: its youngest request.
        size: how many requests it holds.
        indexed_seq: the head's ``seq`` under which the queue's arrival order holds it.
    """

    __slots__ = ("_fill", "_limits", "adapter", "head", "indexed_seq", "key", "size", "tail")

    def __init__(self, key: Hashable, adapter: Hashable | None, limits: BatchLimits) -> None:
        self._limits = limits
        self.key = key
        self.adapter = adapter
        self.head: QueuedRequest | None = None
        self.tail: QueuedRequest | None = None
        self.size = 0
        self._fill: BatchFill | None = None
        self.indexed_seq: int | None = None

    def __iter__(self) -> Iterator[QueuedRequest]:
        request = self.head
        while request is not None:
            yield request
            request = request.next

    @property
    def fill(self) -> BatchFill:
        """The batch its oldest requests make: the longest run from the head that fits."""
        if self._fill is None:
            self._fill = self.measure()
        return self._fill

    def measure(self, before_seq: float = inf) -> BatchFill:
        """Return the batch that the oldest requests with a ``seq`` below ``before_seq`` make."""
        fill = BatchFill(self._limits)
        request = self.head
        while request is not None and request.seq < before_seq and fill.add(request):
            request = request.next
        return fill

    def append(self, request: QueuedRequest) -> bool:
        """Link ``request``, the youngest of all; return whether head or fill may have changed."""
        self._link(self.tail, request, None)
        if self._fill is None:
            return True
        if self._fill.full:
            return False
        self._fill.add(request)
        return True

    def insert(self, request: QueuedRequest) -> None:
        """Link ``request`` at its place in the arrival order.

        The walk passes only requests that were put back as well: none that never ran is older
        than one that did.
        """
        before, after = None, self.head
        while after is not None and after.seq < request.seq:
            before, after = after, after.next
        self._link(before, request, after)
        self._fill = None

    def cut(self, count: int) -> list[QueuedRequest]:
        """Take out and return the ``count`` oldest requests, or all if there are fewer."""
        taken: list[QueuedRequest] = []
        request = self.head
        while request is not None and len(taken) < count:
            taken.append(request)
            after, request.next, request.prev = request.next, None, None
            request = after
        self.head = request
        if request is None:
            self.tail = None
        else:
            request.prev = None
        self.size -= len(taken)
        self._fill = None
        return taken

    def unlink(self, request: QueuedRequest) -> bool:
        """Take out ``request``; return whether head or fill may have changed."""
        before, after = request.prev, request.next
        if before is None:
            self.head = after
        else:
            before.next = after
        if after is None:
            self.tail = before
        else:
            after.prev = before
        request.prev = request.next = None
        self.size -= 1
        if self._fill is not None and request.seq > self._fill.last_seq:
            return False
        self._fill = None
        return True

    def _link(
        self, before: QueuedRequest | None, request: QueuedRequest, after: QueuedRequest | None
    ) -> None:
        request.prev, request.next = before, after
        if before is None:
            self.head = request
        else:
            before.next = request
        if after is None:
            self.tail = request
        else:
            after.prev = request
        self.size += 1


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")


def _check_duration(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number of milliseconds, at least 0")
