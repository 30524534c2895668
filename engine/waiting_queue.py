"""Requests that wait: one FIFO per group, the arrival order over all, and indexes for policies.

A group holds the waiting requests with one key and one adapter; only they can share a batch.
Nothing here costs time in proportion to the number of requests that wait: a group is a linked
list, and what must be found by age is kept in heaps over the groups' heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from omni_engine.engine.batching import BatchFill, BatchLimits, QueuedRequest, RequestGroup

GroupId = tuple[Hashable, Hashable | None]

_HEAP_SLACK = 32
_IN_WAIT = 0


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

    def second_seq(self) -> int | None:
        """Return the ``seq`` of the second oldest head."""
        self._drop_removed()
        if len(self._groups) < 2:
            return None
        first = heappop(self._heap)
        # A seq that left and came back may be in the heap twice.
        while self._heap[0] == first:
            heappop(self._heap)
        self._drop_removed()
        second = self._heap[0]
        heappush(self._heap, first)
        return second

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0] not in self._groups:
            heappop(self._heap)


class FillIndex:
    """Groups by how well they fill a batch, those in their admission wait kept apart.

    A group's level is the number of requests in the batch it makes; a full one, whatever filled
    it, has the top level.

    Args:
        top: the level of a full group.
        max_wait_s: how long the head of a group that isn't full waits from its arrival, seconds.
    """

    def __init__(self, top: int, max_wait_s: float) -> None:
        self._top = top
        self._max_wait_s = max_wait_s
        self._now = -inf
        self._places: dict[RequestGroup, tuple[int, int]] = {}
        self._levels: dict[int, HeadIndex] = {}
        self._by_adapter: dict[tuple[int, Hashable | None], HeadIndex] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, group: object) -> bool:
        return group in self._places

    def update(self, group: RequestGroup) -> None:
        """Refile ``group`` after its head or its fill changed."""
        old, new = self._places.get(group), self._place(group)
        if new == old:
            return
        if new is None:
            del self._places[group]
        else:
            self._places[group] = new
            self._put(new, group)
        if old is not None:
            self._remove(old, group)

    def remove(self, group: RequestGroup) -> None:
        """Forget ``group``, if it is filed, until its next update."""
        if (place := self._places.pop(group, None)) is not None:
            self._remove(place, group)

    def advance(self, now: float) -> None:
        """End the admission waits that are over at ``now``, in seconds."""
        self._now = now
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            group = self.first(_IN_WAIT)
            assert group is not None
            self.update(group)

    def next_deadline(self) -> float | None:
        """Return when the next admission wait ends, in seconds; None if no group is in one."""
        group = self.first(_IN_WAIT)
        if group is None or group.head is None:
            return None
        return group.head.arrival + self._max_wait_s

    def top_level(self) -> int | None:
        """Return the highest level that has a group; None if no group may go now."""
        return max(self._levels, default=_IN_WAIT) or None

    def oldest(self) -> RequestGroup | None:
        """Return the group with the oldest head, whatever its level."""
        firsts = filter(None, map(self.first, self._levels))
        return min(firsts, key=lambda group: self._places[group][1], default=None)

    def first(self, level: int) -> RequestGroup | None:
        """Return the group at ``level`` with the oldest head."""
        index = self._levels.get(level)
        return None if index is None else index.first()

    def first_of(self, level: int, adapters: Iterable[Hashable | None]) -> RequestGroup | None:
        """Like ``first``, of the groups with one of ``adapters`` only."""
        oldest: RequestGroup | None = None
        for adapter in adapters:
            index = self._by_adapter.get((level, adapter))
            group = None if index is None else index.first()
            if group and (oldest is None or self._places[group] < self._places[oldest]):
                oldest = group
        return oldest

    def _place(self, group: RequestGroup) -> tuple[int, int] | None:
        head = group.head
        if head is None:
            return None
        if group.fill.full:
            return self._top, head.seq
        if self._max_wait_s and head.arrival + self._max_wait_s > self._now:
            return _IN_WAIT, head.seq
        return group.fill.count, head.seq

    def _put(self, place: tuple[int, int], group: RequestGroup) -> None:
        level, seq = place
        if (index := self._levels.get(level)) is None:
            index = self._levels[level] = HeadIndex()
        index.put(seq, group)
        adapted = (level, group.adapter)
        if (index := self._by_adapter.get(adapted)) is None:
            index = self._by_adapter[adapted] = HeadIndex()
        index.put(seq, group)

    def _remove(self, place: tuple[int, int], group: RequestGroup) -> None:
        level, seq = place
        self._levels[level].remove(seq)
        if not self._levels[level]:
            del self._levels[level]
        adapted = (level, group.adapter)
        self._by_adapter[adapted].remove(seq)
        if not self._by_adapter[adapted]:
            del self._by_adapter[adapted]


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

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[QueuedRequest]:
        waiting = [request for group in self._groups.values() for request in group]
        return iter(sorted(waiting, key=lambda request: request.seq))

    def groups(self) -> Iterable[RequestGroup]:
        """Return the groups, none of them empty."""
        return self._groups.values()

    def group(self, group_id: GroupId) -> RequestGroup | None:
        """Return the group of one key and adapter; None if nothing of it waits."""
        return self._groups.get(group_id)

    def oldest(self) -> RequestGroup | None:
        """Return the group of the oldest request of all."""
        return self._heads.first()

    def oldest_run(self) -> tuple[RequestGroup, BatchFill] | None:
        """Return the oldest group and the batch it makes up to the first of another group."""
        group = self._heads.first()
        if group is None:
            return None
        other = self._heads.second_seq()
        return group, group.measure(inf if other is None else other)

    def push(self, request: QueuedRequest) -> None:
        """Add ``request``, the youngest of all; TypeError if its key or adapter can't be hashed."""
        group = self._group_of(request)
        self._size += 1
        if group.append(request):
            self._file(group)

    def put_back(self, requests: Iterable[QueuedRequest]) -> None:
        """Add ``requests`` that were taken before, each at its old place in the arrival order."""
        touched: dict[RequestGroup, None] = {}
        # Youngest first: each is then linked before the one linked last, without a walk.
        for request in sorted(requests, key=lambda request: request.seq, reverse=True):
            group = self._group_of(request)
            group.insert(request)
            self._size += 1
            touched[group] = None
        for group in touched:
            self._file(group)

    def take(self, group: RequestGroup, count: int) -> list[QueuedRequest]:
        """Remove and return the ``count`` oldest requests of ``group``."""
        taken = group.cut(count)
        self._size -= len(taken)
        self._file(group)
        return taken

    def remove(self, request: QueuedRequest) -> None:
        """Take out one waiting request."""
        group = self._groups[request.key, request.adapter]
        self._size -= 1
        if group.unlink(request):
            self._file(group)

    def drain(self) -> list[QueuedRequest]:
        """Remove all requests and return them in arrival order."""
        drained = list(self)
        for group in list(self._groups.values()):
            self.take(group, group.size)
        return drained

    def _group_of(self, request: QueuedRequest) -> RequestGroup:
        group_id = (request.key, request.adapter)
        group = self._groups.get(group_id)
        if group is None:
            group = RequestGroup(request.key, request.adapter, self._limits)
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
