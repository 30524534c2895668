"""The vocabulary of batching: a queued request, the limits of a batch, an idle worker."""

from __future__ import annotations

import enum
from collections.abc import Hashable
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


@dataclass(frozen=True, slots=True)
class Suspect:
    """The key of a request that may be what its worker died of: no other has it.

    Args:
        key: the request's own.
        request_id: the request.
    """

    key: Hashable
    request_id: str


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

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what its worker died of."""
        return isinstance(self.key, Suspect)


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


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")


def _check_duration(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"{name} = {value!r}: must be a finite number of milliseconds, at least 0")
