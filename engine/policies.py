"""Which requests go next, and to which of the idle workers.

A policy looks at the waiting queue and picks one group at a time, and how many of its oldest
requests. It never looks at a request that its group's order would not let go first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from omni_engine.engine.batching import BatchFill, RequestGroup, SchedulerConfig, WorkerSlot
from omni_engine.engine.waiting_queue import FillIndex, WaitingQueue

_Suits = Callable[[WorkerSlot, Hashable | None], bool]


class Pick(NamedTuple):
    """The ``size`` oldest requests of ``group``: the next batch."""

    group: RequestGroup
    size: int


class BatchPolicy(Protocol):
    """Picks batches from a waiting queue whose changes it is told of.

    Attributes:
        in_order: whether nobody may go before an older request, of whatever group.
    """

    in_order: bool

    def on_change(self, group: RequestGroup) -> None:
        """Take note that the head or the fill of ``group`` may have changed."""

    def set_aside(self, group: RequestGroup) -> None:
        """Leave ``group`` out of account until ``on_change`` is called with it."""

    def advance(self, now: float) -> None:
        """Let time pass: picks are made as of ``now``, in seconds, until the next call."""

    def pick(self, queue: WaitingQueue, slots: Sequence[WorkerSlot]) -> Pick | None:
        """Return the next batch, for one of ``slots``; None if nothing may go yet."""

    def overdue(self, queue: WaitingQueue) -> RequestGroup | None:
        """Return the oldest request's group if it must go before all others."""

    def next_deadline(self, queue: WaitingQueue) -> float | None:
        """Return when, in seconds, time alone may next let a batch go; None if it can't."""


class GroupedPolicy:
    """The fullest batch first, but nobody is passed over for longer than ``max_skip_s``.

    Among equally full batches one goes first whose adapter is active on an idle worker, then one
    whose adapter such a worker holds, then the one with the oldest head. Once the oldest request
    of all has waited ``max_skip_s``, its group goes before all others.

    Args:
        max_num_seqs: requests a batch may hold at most.
        max_wait_s: how long the head of a group that isn't full waits for more, in seconds.
        max_skip_s: how long the oldest request may be passed over, in seconds.
    """

    in_order = False

    def __init__(self, max_num_seqs: int, max_wait_s: float, max_skip_s: float) -> None:
        self._index = FillIndex(max_num_seqs, max_wait_s)
        self._max_skip_s = max_skip_s
        self._now = -inf

    def on_change(self, group: RequestGroup) -> None:
        """Refile ``group``."""
        self._index.update(group)

    def set_aside(self, group: RequestGroup) -> None:
        """Take ``group`` out of the index."""
        self._index.remove(group)

    def advance(self, now: float) -> None:
        """Let the admission waits that have ended by ``now``, in seconds, end."""
        self._now = now
        self._index.advance(now)

    def pick(self, queue: WaitingQueue, slots: Sequence[WorkerSlot]) -> Pick | None:
        """Return the oldest request's batch if it is overdue, the best batch otherwise.

        An overdue group cuts its own admission wait short only if another would go before it.
        """
        level = self._index.top_level()
        if level is None:
            return None
        group = self.overdue(queue) or self._best(level, slots)
        return None if group is None else Pick(group, group.fill.count)

    def overdue(self, queue: WaitingQueue) -> RequestGroup | None:
        """Return the group with the oldest head, if that has waited ``max_skip_s``."""
        group = queue.oldest()
        if not self._is_overdue(group):
            return None
        if group not in self._index:  # it was set aside: the oldest of the others counts
            group = self._index.oldest()
        return group if self._is_overdue(group) else None

    def next_deadline(self, queue: WaitingQueue) -> float | None:
        """Return when the next admission wait ends, in seconds."""
        return self._index.next_deadline()

    def _is_overdue(self, group: RequestGroup | None) -> bool:
        if group is None or group.head is None:
            return False
        return group.head.arrival + self._max_skip_s <= self._now

    def _best(self, level: int, slots: Sequence[WorkerSlot]) -> RequestGroup | None:
        index = self._index
        return (
            index.first_of(level, [slot.active_adapter for slot in slots])
            or index.first_of(level, chain.from_iterable([slot.held_adapters for slot in slots]))
            or index.first(level)
        )


class FifoPolicy:
    """Strict arrival order: the oldest request and those that follow it without a break.

    The first request of another group ends the batch, and the oldest request's admission wait
    holds up everything behind it.

    Args:
        max_wait_s: how long the oldest request waits for a full batch, in seconds.
    """

    in_order = True

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._now = -inf

    def on_change(self, group: RequestGroup) -> None:
        """Do nothing: the arrival order alone decides."""

    def set_aside(self, group: RequestGroup) -> None:
        """Do nothing: nobody leaves the arrival order."""

    def advance(self, now: float) -> None:
        """Take note of the time, in seconds."""
        self._now = now

    def pick(self, queue: WaitingQueue, slots: Sequence[WorkerSlot]) -> Pick | None:
        """Return the oldest requests up to the first of another group."""
        run = queue.oldest_run()
        if run is None or self._wait_end(*run) is not None:
            return None
        group, fill = run
        return Pick(group, fill.count)

    def overdue(self, queue: WaitingQueue) -> RequestGroup | None:
        """Return None: nobody is ever passed over."""
        return None

    def next_deadline(self, queue: WaitingQueue) -> float | None:
        """Return when the oldest request's admission wait ends, in seconds."""
        run = queue.oldest_run()
        return None if run is None else self._wait_end(*run)

    def _wait_end(self, group: RequestGroup, fill: BatchFill) -> float | None:
        if not self._max_wait_s or fill.full or group.head is None:
            return None
        deadline = group.head.arrival + self._max_wait_s
        return deadline if deadline > self._now else None


def make_policy(config: SchedulerConfig, max_wait_s: float) -> BatchPolicy:
    """Return the policy that ``config`` names, with an admission wait of ``max_wait_s`` seconds."""
    if config.policy == "fifo":
        return FifoPolicy(max_wait_s)
    return GroupedPolicy(config.max_num_seqs, max_wait_s, config.max_skip_ms / 1000)


def place(adapters: Sequence[Hashable | None], slots: Sequence[WorkerSlot]) -> list[WorkerSlot]:
    """Give each batch a worker of its own, avoiding adapter switches.

    A batch goes to a worker on which its adapter is active, else to one that holds it, else to
    any; a worker is never taken from a batch it suits better. Equals are served in order.

    Args:
        adapters: the batches' adapters.
        slots: the idle workers, at least as many.

    Returns:
        One slot per batch, in the batches' order.
    """
    if len(slots) == 1:
        return list(slots[: len(adapters)])
    free = list(slots)
    placed: dict[int, WorkerSlot] = {}
    for suits in (_is_active, _is_held, _is_any):
        for number, adapter in enumerate(adapters):
            if number not in placed and (slot := _find(free, suits, adapter)):
                placed[number] = slot
                free.remove(slot)
    return [placed[number] for number in range(len(adapters))]


def _find(free: list[WorkerSlot], suits: _Suits, adapter: Hashable | None) -> WorkerSlot | None:
    return next((slot for slot in free if suits(slot, adapter)), None)


def _is_active(slot: WorkerSlot, adapter: Hashable | None) -> bool:
    return slot.active_adapter == adapter


def _is_held(slot: WorkerSlot, adapter: Hashable | None) -> bool:
    return adapter in slot.held_adapters


def _is_any(slot: WorkerSlot, adapter: Hashable | None) -> bool:
    return True
