"""What a client has asked for and not heard the end of, and when to ask for it again.

Pure but for its lock: the time is passed in, and nothing is sent from here.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from omni_engine.engine.handles import RequestHandle
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    OmniError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
)
from omni_engine.protocol.requests import DiffusionRequest

MAX_ATTEMPTS = 3
"""How often a request is submitted again because the engine had forgotten this client."""

_AT_ONCE = 256
_PAUSE_S = 0.1
"""So many refused requests are submitted again together, and then none for so long."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request without an end.

    Attributes:
        request: as the user asked for it.
        handle: what the user holds.
        since: when it was submitted first: seconds, monotonic.
        waits_for_room: whether it is submitted again when the engine's queue was full.
        attempts: how often it was submitted again after the engine had forgotten this client.
        known: whether the engine has taken it in: until then its id may be another's.
        aborted: whether the user wants it to end.
        deferred: whether the engine does not have it, and it waits to be submitted again.
        message_id: of the message that submitted it last.
    """

    request: DiffusionRequest
    handle: RequestHandle
    since: float
    waits_for_room: bool = False
    attempts: int = 0
    known: bool = False
    aborted: bool = False
    deferred: bool = False
    message_id: int = 0

    def again(self, now: float) -> DiffusionRequest | OmniError:
        """Return the request to submit again, with the time that is left, or why it ends."""
        if self.aborted:
            return RequestAbortedError("the request was aborted")
        timeout_s = self.request.timeout_s
        if timeout_s is None:
            return self.request
        left_s = self.since + timeout_s - now
        if left_s < 0.001:
            return RequestTimeoutError(
                f"the request did not end within {timeout_s:g} s",
                field="timeout_s",
                value=timeout_s,
            )
        return dataclasses.replace(self.request, timeout_s=left_s)


class PendingRequests:
    """The requests of one connection by id; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[str, PendingRequest] = {}
        self._deferred: collections.deque[PendingRequest] = collections.deque()
        self._not_before = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, pending: PendingRequest) -> bool:
        """Note a request; False if another one has its id."""
        with self._lock:
            return self._requests.setdefault(pending.request.request_id, pending) is pending

    def note_sent(self, request_ids: Iterable[str], message_id: int) -> None:
        """Note which message submits requests."""
        with self._lock:
            for request_id in request_ids:
                if (pending := self._requests.get(request_id)) is not None:
                    pending.message_id = message_id

    def sent_in(self, message_id: int | None) -> list[str]:
        """Return the requests that a message submitted."""
        with self._lock:
            return [i for i, pending in self._requests.items() if pending.message_id == message_id]

    def handle(self, request_id: str) -> RequestHandle | None:
        """Return what the user holds of a request; None if it is not pending."""
        pending = self._requests.get(request_id)
        return None if pending is None else pending.handle

    def take(self, request_id: str) -> PendingRequest | None:
        """Return a request that ends, and forget it; None if it is not pending."""
        with self._lock:
            return self._requests.pop(request_id, None)

    def take_all(self) -> list[PendingRequest]:
        """Return all requests, and forget them."""
        with self._lock:
            taken = list(self._requests.values())
            self._requests.clear()
            self._deferred.clear()
            return taken

    def abort(
        self, request_ids: Iterable[str], *, own: bool = False
    ) -> tuple[list[PendingRequest], list[str]]:
        """Note that requests are to end.

        Args:
            request_ids: the requests.
            own: whether only requests of this client are meant; else any client's.

        Returns:
            Those that the engine hasn't got; they are forgotten. The ids to tell the engine now:
            not those of requests that it may yet refuse because another one has that id.
        """
        ended: list[PendingRequest] = []
        tell: list[str] = []
        with self._lock:
            for request_id in request_ids:
                pending = self._requests.get(request_id)
                if pending is not None:
                    pending.aborted = True
                if pending is None:
                    tell += [] if own else [request_id]
                elif pending.known:
                    tell.append(request_id)
                elif pending.deferred:
                    ended.append(self._requests.pop(request_id))
        return ended, tell

    def note_known(self, request_id: str) -> bool:
        """Note that the engine has taken a request in; True if it is now to be told to end it."""
        pending = self._requests.get(request_id)
        if pending is None or pending.known:
            return False
        pending.known = True
        return pending.aborted

    def owed_aborts(self) -> list[str]:
        """Return the requests that are to end and of which the engine has not been told so."""
        with self._lock:
            return [i for i, one in self._requests.items() if one.aborted and not one.known]

    def defer(self, request_id: str, error: OmniError, now: float) -> bool:
        """Keep a refused request to submit it again; False if its refusal is its end.

        Waiting helps where the error says so: for room, if the request waits for that or had a
        place before, and for an id whose former run is ending, if that was its own.
        """
        with self._lock:
            pending = self._requests.get(request_id)
            if pending is None or error.retry_after_ms is None or pending.aborted:
                return False
            had_place = pending.attempts > 0
            if isinstance(error, QueueFullError):
                waits = pending.waits_for_room or had_place
            else:
                waits = isinstance(error, DuplicateRequestError) and had_place
            if waits:
                self._not_before = max(self._not_before, now + error.retry_after_ms / 1000)
                if not pending.deferred:
                    pending.deferred = True
                    self._deferred.append(pending)
            return waits

    def next_due(self) -> float | None:
        """Return when deferred requests are to be submitted again; None if there are none."""
        return self._not_before if self._deferred else None

    def take_due(self, now: float) -> list[PendingRequest]:
        """Return deferred requests that are to be submitted now; they stay pending."""
        due: list[PendingRequest] = []
        with self._lock:
            if not self._deferred or now < self._not_before:
                return due
            while self._deferred and len(due) < _AT_ONCE:
                pending = self._deferred.popleft()
                if self._requests.get(pending.request.request_id) is pending:
                    pending.deferred = False
                    due.append(pending)
            self._not_before = now + _PAUSE_S
        return due

    def forgotten(self) -> tuple[list[PendingRequest], list[tuple[PendingRequest, OmniError]]]:
        """Sort the requests that the engine has, or had, after it has forgotten this client.

        Returns:
            Those to submit again; they stay pending. Those that end, and why; they do not.
        """
        again: list[PendingRequest] = []
        ended: list[tuple[PendingRequest, OmniError]] = []
        with self._lock:
            for request_id, pending in list(self._requests.items()):
                if pending.deferred:
                    continue
                pending.attempts += 1
                pending.known = False
                if pending.attempts > MAX_ATTEMPTS:
                    del self._requests[request_id]
                    ended.append((pending, _given_up()))
                else:
                    again.append(pending)
        return again, ended


def _given_up() -> EngineClosedError:
    return EngineClosedError(
        f"the connection to the engine was lost {MAX_ATTEMPTS + 1} times",
        hint="See the engine's log; submit the request again.",
    )
