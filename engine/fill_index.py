"""Waiting groups by how well they fill a batch, by their adapters, and by age; for policies."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from math import inf
from typing import TypeVar

from omni_engine.engine.batching import Weights, WorkerSlot
from omni_engine.engine.request_group import RequestGroup
from omni_engine.engine.waiting_queue import HeadIndex
from omni_engine.engine.warmth import WarmSets

IN_WAIT = 0
"""The level of groups that may not go yet."""


_Under = TypeVar("_Under", bound=Hashable)


_Place = tuple[int, int, Weights]  # level, the head's seq, what the batch needs


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
        self._places: dict[RequestGroup, _Place] = {}
        self._levels: dict[int, HeadIndex] = {}
        self._by_adapter: dict[tuple[int, Hashable | None], HeadIndex] = {}
        self._by_weights: dict[tuple[int, Weights], HeadIndex] = {}
        self._warmth = WarmSets()

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
            self.remove(group)
            return
        self._places[group] = new
        if old is None:
            self._put(new, group)
        elif old[:2] == new[:2]:
            self._put_weights(new, group)
            self._remove_weights(old)
        else:
            self._put(new, group)
            self._remove(old, group)

    def remove(self, group: RequestGroup) -> None:
        """Forget ``group``, if it is filed, until its next update."""
        if (place := self._places.pop(group, None)) is not None:
            self._remove(place, group)

    def advance(self, now: float) -> None:
        """End the admission waits that are over at ``now``, in seconds."""
        self._now = now
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            group = self.first(IN_WAIT)
            assert group is not None
            self.update(group)

    def next_deadline(self) -> float | None:
        """Return when the next admission wait ends, in seconds; None if no group is in one."""
        group = self.first(IN_WAIT)
        if group is None or group.head is None:
            return None
        return group.head.arrival + self._max_wait_s

    def oldest(self) -> RequestGroup | None:
        """Return the group with the oldest head, whatever its level."""
        return self._oldest_of(filter(None, map(self.first, self._levels)))

    def first(self, level: int) -> RequestGroup | None:
        """Return the group at ``level`` with the oldest head."""
        index = self._levels.get(level)
        return None if index is None else index.first()

    def levels(self) -> list[int]:
        """Return the levels that have a group that may go, the highest first."""
        return sorted([level for level in self._levels if level != IN_WAIT], reverse=True)

    def oldest_at(self, level: int, count: int) -> list[RequestGroup]:
        """Return the ``count`` groups at ``level`` with the oldest heads."""
        index = self._levels.get(level)
        return [] if index is None else index.oldest(count)

    def warm_on(self, slots: Sequence[WorkerSlot]) -> Collection[Weights]:
        """Return the sets of weights that a group needs and that are wholly on one of ``slots``."""
        return self._warmth.on(slots)

    def first_active(
        self, level: int, adapters: Iterable[Hashable | None], warm: Collection[Weights]
    ) -> RequestGroup | None:
        """Like ``first``, of the groups with one of ``adapters`` and weights in ``warm``.

        The groups with one adapter have the same weights, or else those behind the oldest of them
        are not looked at.
        """
        indexes = (self._by_adapter.get((level, adapter)) for adapter in adapters)
        return self._oldest_of(
            group
            for index in indexes
            if index and (group := index.first()) and self._places[group][2] in warm
        )

    def first_warm(self, level: int, warm: Collection[Weights]) -> RequestGroup | None:
        """Like ``first``, of the groups whose weights are in ``warm``."""
        indexes = (self._by_weights.get((level, weights)) for weights in warm)
        return self._oldest_of(group for index in indexes if index and (group := index.first()))

    def _oldest_of(self, groups: Iterable[RequestGroup]) -> RequestGroup | None:
        return min(groups, key=lambda group: self._places[group][1], default=None)

    def _place(self, group: RequestGroup) -> _Place | None:
        head = group.head
        if head is None:
            return None
        fill = group.fill
        if fill.full:
            level = self._top
        elif self._max_wait_s and head.arrival + self._max_wait_s > self._now:
            level = IN_WAIT
        else:
            level = fill.count
        return level, head.seq, fill.weights

    def _put(self, place: _Place, group: RequestGroup) -> None:
        level, seq, _ = place
        _file(self._levels, level, seq, group)
        _file(self._by_adapter, (level, group.adapter), seq, group)
        self._put_weights(place, group)

    def _put_weights(self, place: _Place, group: RequestGroup) -> None:
        level, seq, weights = place
        _file(self._by_weights, (level, weights), seq, group)
        self._warmth.add(weights)

    def _remove(self, place: _Place, group: RequestGroup) -> None:
        level, seq, _ = place
        _unfile(self._levels, level, seq)
        _unfile(self._by_adapter, (level, group.adapter), seq)
        self._remove_weights(place)

    def _remove_weights(self, place: _Place) -> None:
        level, seq, weights = place
        _unfile(self._by_weights, (level, weights), seq)
        self._warmth.remove(weights)


def _file(indexes: dict[_Under, HeadIndex], under: _Under, seq: int, group: RequestGroup) -> None:
    if (index := indexes.get(under)) is None:
        index = indexes[under] = HeadIndex()
    index.put(seq, group)


def _unfile(indexes: dict[_Under, HeadIndex], under: _Under, seq: int) -> None:
    index = indexes[under]
    index.remove(seq)
    if not index:
        del indexes[under]
