"""Waiting requests that can share a batch, and the batch that the oldest of them make."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf

from omni_engine.engine.batching import NO_WEIGHTS, BatchLimits, QueuedRequest, Weights


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
