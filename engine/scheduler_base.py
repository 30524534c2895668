"""What the schedulers of both modes share: the requests a stage keeps, and how each may end.

Pure, as the schedulers are: no I/O, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice

from omni_engine.engine.batching import (
    QueuedRequest,
    RequestStatus,
    SchedulerConfig,
    Suspect,
)
from omni_engine.engine.policies import make_policy
from omni_engine.engine.request_group import RequestGroup
from omni_engine.engine.waiting_queue import GroupId, WaitingQueue

_LOOK_FURTHER = 32


class SchedulerBase:
    """Keeps a stage's waiting and running requests; which of them start is up to the subclass.

    Every method takes ``now``, in seconds, never less than at an earlier call.

    Args:
        config: the limits of a batch and the policy.
        max_wait_ms: how long, from its arrival, a request may wait for others, in milliseconds.
    """

    def __init__(self, config: SchedulerConfig, max_wait_ms: float) -> None:
        self._config = config
        self._policy = make_policy(config, max_wait_ms / 1000)
        self._queue = WaitingQueue(config.limits, self._on_change)
        self._live: dict[str, QueuedRequest] = {}
        self._next_seq = 0

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """How many requests run, those whose abort was requested included."""
        return len(self._live) - self.num_waiting

    def held(self) -> dict[str, int]:
        """Return how much is kept of what requests bring with them; all 0 when none is live."""
        return {"scheduled": len(self._live), "waiting_groups": len(list(self._queue.groups()))}

    def status_of(self, request_id: str) -> RequestStatus | None:
        """Return WAITING or RUNNING; None if the request has ended or was never added."""
        request = self._live.get(request_id)
        return None if request is None else request.status

    def waiting_ids(self) -> list[str]:
        """Return the waiting requests' ids in arrival order; costs a sort of all of them."""
        return [request.request_id for request in self._queue]

    def waiting_by_key(self) -> dict[GroupId, int]:
        """Return how many requests wait, per (key, adapter) that has any."""
        return {(group.key, group.adapter): group.size for group in self._queue.groups()}

    def add(
        self,
        request_id: str,
        *,
        key: Hashable,
        adapter: Hashable | None,
        weights: tuple[str, ...] = (),
        rows: int = 1,
        work: int = 1,
        now: float,
    ) -> None:
        """Queue a request.

        Args:
            request_id: its name; free again once the request has ended.
            key: what it must share with the other requests of its batch.
            adapter: the identity of the adapters it runs under, which they must share too; None
                for the base model, and for all requests of a stage that mixes adapters.
            weights: the digests it needs loaded, sorted, none twice; empty for the base model.
                Requests with one ``adapter``, if it isn't None, have the same.
            rows: its outputs, counted against ``max_batch_rows``.
            work: its work units, counted against ``max_batch_work``.
            now: its arrival, in seconds.

        Raises:
            ValueError: the id is in use, or the request would not fit even an empty batch, by its
                rows, its work or the number of its adapters.
            TypeError: ``key`` or ``adapter`` can't be hashed.
        """
        if request_id in self._live:
            raise ValueError(f"request_id = {request_id!r}: already waiting or running")
        _check_size("rows", rows, "max_batch_rows", self._config.max_batch_rows)
        _check_size("work", work, "max_batch_work", self._config.max_batch_work)
        most = self._config.max_mixed_adapters
        if most is not None and len(weights) > most:
            raise ValueError(
                f"{len(weights)} adapters: can't fit a batch, max_mixed_adapters is {most}"
            )
        request = QueuedRequest(request_id, key, adapter, rows, work, now, self._next_seq, weights)
        self._queue.push(request)
        self._next_seq += 1
        self._live[request_id] = request

    def upcoming(self, count: int) -> list[tuple[str, ...]]:
        """Return what to load while batches run: the weights of requests that go next.

        Those passed over for want of their adapters come first, then what the policy is likely to
        pick. Only so many groups are looked at, so that none may be found behind a long row of
        groups of the base model or of the same adapters.

        Args:
            count: how many to return at most; looks at 32 groups more if it takes them.

        Returns:
            The requests' ``weights``, different and not empty, the most urgent first.
        """
        if not self._queue.num_with_weights:
            return []
        found: dict[tuple[str, ...], None] = {}
        for most in (count, count + _LOOK_FURTHER):  # few groups suffice as a rule
            groups = self._policy.upcoming(self._queue, most)
            for group in groups:
                found |= dict.fromkeys(batch_weights(group))
            if len(found) >= count or len(groups) < most:
                break
        return list(islice(found, count))

    def next_deadline(self, now: float) -> float | None:
        """Return when to call ``schedule`` again if nothing else happens.

        Args:
            now: the time, in seconds.

        Returns:
            The end of the next admission wait, or ``now`` if one has ended since the last
            ``schedule``, in seconds; None if only an event (a new request, an idle worker) can
            let another batch start.
        """
        deadline = self._policy.next_deadline(self._queue)
        return None if deadline is None else max(deadline, now)

    def abort(self, request_id: str, now: float) -> RequestStatus | None:
        """End a waiting request at once; mark a running one, which then ends as aborted.

        Returns:
            FINISHED_ABORTED for a waiting request, which is forgotten; RUNNING for a running one,
            however often it is aborted; None if the request has ended or was never added.
        """
        request = self._live.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            request.abort_requested = True
            return RequestStatus.RUNNING
        self._withdraw(request)
        del self._live[request_id]
        return RequestStatus.FINISHED_ABORTED

    def finish(self, request_id: str, status: RequestStatus, now: float) -> RequestStatus | None:
        """Take note that a running request ended, and forget it.

        Args:
            request_id: which request.
            status: how its worker says it ended.
            now: the time, in seconds.

        Returns:
            How it ended: FINISHED_ABORTED if an abort was requested before, else ``status``. None,
            and nothing changes, if it isn't running: it has ended, or it was put back and a late
            report of a lost worker is about a run that no longer counts.

        Raises:
            ValueError: ``status`` isn't final.
        """
        if not status.is_finished:
            raise ValueError(f"status = {status}: must be one of the FINISHED states")
        request = self._live.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return None
        del self._live[request_id]
        self._release(request)
        return RequestStatus.FINISHED_ABORTED if request.abort_requested else status

    def requeue(self, request_ids: Iterable[str], now: float, *, alone: bool = False) -> list[str]:
        """Let running requests wait again, because their worker is lost.

        Each returns to its old place in the arrival order, before all that never ran, and its
        waiting time still counts from its arrival. Ids that aren't running are passed over.

        Args:
            request_ids: the requests.
            now: the time, in seconds.
            alone: whether each is a suspect, which may be what its worker died of: it shares
                neither a batch nor a group from now on, nor a worker with another suspect.

        Returns:
            The ids, in arrival order, of those whose abort was requested: they are not queued
            but have ended as aborted.
        """
        known = (self._live.get(request_id) for request_id in dict.fromkeys(request_ids))
        lost = [r for r in known if r is not None and r.status is RequestStatus.RUNNING]
        for request in lost:
            self._release(request)
        aborted = sorted((r for r in lost if r.abort_requested), key=lambda r: r.seq)
        for request in aborted:
            del self._live[request.request_id]
        again = [request for request in lost if not request.abort_requested]
        for request in again:
            request.status, request.worker_id = RequestStatus.WAITING, None
            if alone and not request.is_suspect:
                request.key = Suspect(request.key, request.request_id)
        self._put_back(again)
        return [request.request_id for request in aborted]

    def drain_waiting(self) -> list[str]:
        """Forget all waiting requests and return their ids in arrival order."""
        drained = self._queue.drain()
        for request in drained:
            del self._live[request.request_id]
        return [request.request_id for request in drained]

    def _on_change(self, group: RequestGroup) -> None:
        """Tell the policy that the head or the fill of ``group`` may have changed."""
        self._policy.on_change(group)

    def _put_back(self, requests: list[QueuedRequest]) -> None:
        """Let requests wait at their old places."""
        self._queue.put_back(requests)

    def _withdraw(self, request: QueuedRequest) -> None:
        """Take out a request that has not started."""
        self._queue.remove(request)

    def _release(self, request: QueuedRequest) -> None:
        """Free what a running request held; it has ended, or waits again."""


def batch_weights(group: RequestGroup) -> list[tuple[str, ...]]:
    """Return the weights that each request of the group's next batch needs, if any."""
    # Requests with one identity need the same.
    size = group.fill.count if group.adapter is None else 1
    return [request.weights for request in islice(group, size) if request.weights]


def _check_size(name: str, value: int, limit_name: str, limit: int | None) -> None:
    if value < 1:
        raise ValueError(f"{name} = {value}: must be at least 1")
    if limit is not None and value > limit:
        raise ValueError(f"{name} = {value}: can't fit a batch, {limit_name} is {limit}")
