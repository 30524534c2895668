"""Requests that wait: one FIFO per group, the arrival order over all, and indexes for policies.

A group holds the waiting requests with one key and one adapter; only they can share a batch.
Nothing here costs time in proportion to the number of requests that wait: a group is a linked
list, and what must be found by age is kept in heaps over the groups' heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf

from omni_engine.engine.batching import BatchLimits, QueuedRequest
from omni_engine.engine.request_group import BatchFill, RequestGroup

GroupId = tuple[Hashable, Hashable | None]

_HEAP_SLACK = 32


class HeadIndex:
    """Groups by the ``seq`` of their heads, oldest first.

    Removed entries stay in the heap until they surface or outnumber the others.
    """

    __slots__ = ("_groups", "_heap")

    def __init__(self) -> None:
        self._groups: dict[int, RequestGroup] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, seq: int, group: RequestGroup) -> None:
        """File ``group`` under ``seq``."""
        self._groups[seq] = group
        heappush(self._heap, seq)

    def remove(self, seq: int) -> None:
        """Forget the group filed under ``seq``; KeyError if there is none."""
        del self._groups[seq]
        if len(self._heap) > 2 * len(self._groups) + _HEAP_SLACK:
            self._heap = list(self._groups)
            heapify(self._heap)

    def first(self) -> RequestGroup | None:
        """Return the group with the oldest head."""
        self._drop_removed()
        return self._groups[self._heap[0]] if self._heap else None

    def oldest(self, count: int) -> list[RequestGroup]:
        """Return the ``count`` groups with the oldest heads, or all if there are fewer."""
        seqs: list[int] = []
        while self._heap and len(seqs) < count:
            seq = heappop(self._heap)
            # A seq that left and came back may be in the heap twice.
            if seq in self._groups and (not seqs or seqs[-1] != seq):
                seqs.append(seq)
        for seq in seqs:
            heappush(self._heap, seq)
        return [self._groups[seq] for seq in seqs]

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0] not in self._groups:
            heappop(self._heap)


class WaitingQueue:
    """All waiting requests, in groups; iterating sorts them into arrival order.

    Args:
        limits: what one batch may hold.
        on_change: called with a group whenever its head or its fill may have changed.
    """

    def __init__(self, limits: BatchLimits, on_change: Callable[[RequestGroup], None]) -> None:
        self._limits = limits
        self._on_change = on_change
        self._groups: dict[GroupId, RequestGroup] = {}
        self._heads = HeadIndex()
        self._size = 0
        self._with_weights = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueuedRequest]:
        waiting = [request for group in self._groups.values() for request in group]
        return iter(sorted(waiting, key=lambda request: request.seq))

    @property
    def num_with_weights(self) -> int:
        """How many of the requests need an adapter's weights."""
        return self._with_weights

    def groups(self) -> Iterable[RequestGroup]:
        """Return the groups, none of them empty."""
        return self._groups.values()

    def group(self, group_id: GroupId) -> RequestGroup | None:
        """Return the group of one key and adapter; None if nothing of it waits."""
        return self._groups.get(group_id)

    def oldest(self) -> RequestGroup | None:
        """Return the group of the oldest request of all."""
        return self._heads.first()

    def oldest_groups(self, count: int) -> list[RequestGroup]:
        """Return the groups of the ``count`` oldest heads, or all if there are fewer."""
        return self._heads.oldest(count)

    def oldest_run(self) -> tuple[RequestGroup, BatchFill] | None:
        """Return the oldest group and the batch it makes up to the first of another group."""
        heads = self._heads.oldest(2)
        if not heads:
            return None
        other = heads[1].indexed_seq if len(heads) > 1 else None
        return heads[0], heads[0].measure(inf if other is None else other)

    def push(self, request: QueuedRequest) -> None:
        """Add ``request``, the youngest of all; TypeError if its key or adapter can't be hashed."""
        group = self._group_of(request)
        self._count(request, 1)
        if group.append(request):
            self._file(group)

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Add ``requests`` that were taken before, each at its old place in the arrival order."""
        touched: dict[RequestGroup, None] = {}
        # Youngest first: each is then linked before the one linked last, without a walk.
        for request in sorted(requests, key=lambda request: request.seq, reverse=True):
            group = self._group_of(request)
            group.insert(request)
            self._count(request, 1)
            touched[group] = None
        for group in touched:
            self._file(group)

    def take(self, group: RequestGroup, count: int) -> list[QueuedRequest]:
        """Remove and return the ``count`` oldest requests of ``group``."""
        taken = group.cut(count)
        for request in taken:
            self._count(request, -1)
        self._file(group)
        return taken

    def remove(self, request: QueuedRequest) -> None:
        """Take out one waiting request."""
        group = self._groups[request.key, request.adapter]
        self._count(request, -1)
        if group.unlink(request):
            self._file(group)

    def drain(self) -> list[QueuedRequest]:
        """Remove all requests and return them in arrival order."""
        drained = list(self)
        for group in list(self._groups.values()):
            self.take(group, group.size)
        return drained

    def _count(self, request: QueuedRequest, sign: int) -> None:
        self._size += sign
        if request.weights:
            self._with_weights += sign

    def _group_of(self, request: QueuedRequest) -> RequestGroup:
        group_id = (request.key, request.adapter)
        group = self._groups.get(group_id)
        if group is None:
            limits = self._limits
            if request.is_suspect:
                limits = replace(limits, max_num_seqs=1)  # its batch is full: it waits for nobody
            group = RequestGroup(request.key, request.adapter, limits)
            self._groups[group_id] = group
        return group

    def _file(self, group: RequestGroup) -> None:
        """Bring the arrival order and the policy's index up to date with ``group``."""
        seq, old = None if group.head is None else group.head.seq, group.indexed_seq
        if seq != old:
            group.indexed_seq = seq
            if seq is None:
                del self._groups[group.key, group.adapter]
            else:
                self._heads.put(seq, group)
            if old is not None:
                self._heads.remove(old)
        self._on_change(group)
