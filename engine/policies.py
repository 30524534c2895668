"""Which requests go next.

A policy looks at the waiting queue and picks one group at a time, and how many of its oldest
requests. It never looks at a request that its group's order would not let go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

from omni_engine.engine.batching import SchedulerConfig, Weights, WorkerSlot
from omni_engine.engine.fill_index import IN_WAIT, FillIndex
from omni_engine.engine.request_group import BatchFill, RequestGroup
from omni_engine.engine.waiting_queue import WaitingQueue


class Pick(NamedTuple):
    """The ``size`` oldest requests of ``group``: the next batch; ``weights`` is what they need."""

    group: RequestGroup
    size: int
    weights: Weights


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

    def upcoming(self, queue: WaitingQueue, count: int) -> list[RequestGroup]:
        """Return up to ``count`` groups, each once, those first that are likely to go first."""

    def next_deadline(self, queue: WaitingQueue) -> float | None:
        """Return when, in seconds, time alone may next let a batch go; None if it can't."""


class GroupedPolicy:
    """The fullest batch first, but nobody is passed over for longer than ``max_skip_s``.

    A batch whose adapters are not all on one of the idle workers is passed over while there is
    one, however full, whose adapters are: they are loaded meanwhile if the caller has
    ``upcoming`` ones fetched. The base model's batches have nothing to load. Among equally full
    batches one goes first whose identity is active on an idle worker, then the one with the
    oldest head. Once the oldest request of all has waited ``max_skip_s``, its group goes before
    all others, loaded or not.

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
        # Groups that would have gone but for what they must load, and have not gone since.
        self._passed_over: dict[RequestGroup, None] = {}

    def on_change(self, group: RequestGroup) -> None:
        """Refile ``group``."""
        self._index.update(group)
        if group.head is None:
            self._passed_over.pop(group, None)

    def set_aside(self, group: RequestGroup) -> None:
        """Take ``group`` out of the index."""
        self._index.remove(group)
        self._passed_over.pop(group, None)

    def advance(self, now: float) -> None:
        """Let the admission waits that have ended by ``now``, in seconds, end."""
        self._now = now
        self._index.advance(now)

    def pick(self, queue: WaitingQueue, slots: Sequence[WorkerSlot]) -> Pick | None:
        """Return the oldest request's batch if it is overdue, the best batch otherwise.

        An overdue group cuts its own admission wait short only if another would go before it.
        """
        levels = self._index.levels()
        if not levels:
            return None
        group = self.overdue(queue) or self._best(levels, slots)
        self._passed_over.pop(group, None)
        return Pick(group, group.fill.count, group.fill.weights)

    def overdue(self, queue: WaitingQueue) -> RequestGroup | None:
        """Return the group with the oldest head, if that has waited ``max_skip_s``."""
        group = queue.oldest()
        if not self._is_overdue(group):
            return None
        if group not in self._index:  # it was set aside: the oldest of the others counts
            group = self._index.oldest()
        return group if self._is_overdue(group) else None

    def upcoming(self, queue: WaitingQueue, count: int) -> list[RequestGroup]:
        """Return groups passed over, then those soon overdue, then others by fill and age.

        Soon is within half of ``max_skip_s``: what they need can be there when their time comes.
        """
        found = dict.fromkeys(sorted(islice(self._passed_over, count), key=_head_seq))
        if self._is_soon_overdue(queue.oldest()):
            found |= dict.fromkeys(filter(self._is_soon_overdue, queue.oldest_groups(count)))
        for level in (*self._index.levels(), IN_WAIT):
            if len(found) >= count:
                break
            found |= dict.fromkeys(self._index.oldest_at(level, count))
        return list(islice(found, count))

    def next_deadline(self, queue: WaitingQueue) -> float | None:
        """Return when the next admission wait ends, in seconds."""
        return self._index.next_deadline()

    def _is_overdue(self, group: RequestGroup | None) -> bool:
        return self._waited(group, self._max_skip_s)

    def _is_soon_overdue(self, group: RequestGroup | None) -> bool:
        return self._waited(group, self._max_skip_s / 2)

    def _waited(self, group: RequestGroup | None, seconds: float) -> bool:
        if group is None or group.head is None:
            return False
        return group.head.arrival + seconds <= self._now

    def _best(self, levels: Sequence[int], slots: Sequence[WorkerSlot]) -> RequestGroup:
        index = self._index
        warm = index.warm_on(slots)
        active = {slot.active_adapter for slot in slots}
        first = index.first(levels[0])
        assert first is not None  # it has a group at each of its levels
        for level in levels:
            group = index.first_active(level, active, warm) or index.first_warm(level, warm)
            if group is not None:
                if first.fill.weights not in warm:
                    self._passed_over[first] = None
                return group
        return first


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
        return Pick(group, fill.count, fill.weights)

    def overdue(self, queue: WaitingQueue) -> RequestGroup | None:
        """Return None: nobody is ever passed over."""
        return None

    def upcoming(self, queue: WaitingQueue, count: int) -> list[RequestGroup]:
        """Return the groups of the oldest heads."""
        return queue.oldest_groups(count)

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


def _head_seq(group: RequestGroup) -> int:
    assert group.head is not None  # the queue keeps no empty group
    return group.head.seq
