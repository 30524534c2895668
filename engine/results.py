"""Results of requests that have ended, kept until their clients have them or time is up.

Pure: the time is passed in, and nothing is sent from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_engine.protocol import codec
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.tensors import TensorData

_NOT_CONTENT = "timeout_s"
"""Left out of a comparison: whoever asks again has less time left."""


def same_content(one: DiffusionRequest, other: DiffusionRequest) -> bool:
    """Whether two requests ask for the same, their ids included; arrays are compared by value."""
    return _content(one) == _content(other)


def _content(request: DiffusionRequest) -> list[bytes]:
    wire = request.to_wire()
    del wire[_NOT_CONTENT]
    return [bytes(frame) for frame in codec.encode(_in_order(wire))]


def _in_order(value: Any) -> Any:
    """Return a value with the keys of all its maps sorted: their order means nothing."""
    match value:
        case Mapping():
            return {key: _in_order(value[key]) for key in sorted(value)}
        case list() | tuple():
            return [_in_order(item) for item in value]
    return value


def _array_bytes(value: Any) -> int:
    """Return what the arrays in a value take."""
    match value:
        case Mapping():
            return sum(map(_array_bytes, value.values()))
        case list() | tuple():
            return sum(map(_array_bytes, value))
        case np.ndarray():
            return value.nbytes
        case TensorData():
            return memoryview(value.data).nbytes
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class KeptResult:
    """A result and what it is the result of.

    Attributes:
        request: as it was submitted.
        frames: the output message, encoded.
    """

    request: DiffusionRequest
    frames: list[Any] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """What it takes: the message, and the request's arrays."""
        inputs = (self.request.multi_modal_data, self.request.sampling_params.extra_args)
        return codec.message_bytes(self.frames) + _array_bytes(inputs)


@dataclass(slots=True)
class _Kept:
    result: KeptResult
    num_bytes: int
    owner: bytes | None
    expires_at: float


@dataclass(slots=True)
class _Shelf:
    """The results of one client, or of all that are gone, the longest kept first."""

    request_ids: dict[str, None] = field(default_factory=dict)
    num_bytes: int = 0


class ResultStore:
    """Keeps results until they are received, at most for some time and up to some size.

    Args:
        ttl_s: how long a result is kept at most, in seconds; 0 keeps none.
        max_bytes: how much is kept for one client, and for all clients that are gone together; the
            longest kept ones are dropped beyond it.

    Attributes:
        num_bytes: what the kept results take together.
        dropped: results that were dropped for want of room since the start.
    """

    def __init__(self, ttl_s: float, max_bytes: int) -> None:
        self._ttl_s, self._max_bytes = ttl_s, max_bytes
        self._kept: dict[str, _Kept] = {}  # in the order in which they expire
        self._shelves: dict[bytes | None, _Shelf] = {}
        self.num_bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, request_id: str) -> KeptResult | None:
        """Return a kept result; None if there is none of that id."""
        kept = self._kept.get(request_id)
        return None if kept is None else kept.result

    def bytes_of(self, owner: bytes | None) -> int:
        """Return what is kept for a client, or, for None, for those that are gone."""
        shelf = self._shelves.get(owner)
        return 0 if shelf is None else shelf.num_bytes

    def keep(self, result: KeptResult, owner: bytes | None, now: float) -> None:
        """Keep a result.

        Args:
            result: it replaces another of the same id.
            owner: the client that it is sent to; None if that is gone.
            now: seconds, monotonic, never less than before.
        """
        self._remove(result.request.request_id)
        if self._ttl_s > 0:
            self._put(_Kept(result, result.num_bytes, owner, now + self._ttl_s))

    def received(self, request_ids: Iterable[str]) -> None:
        """Let go of results that have arrived; unknown ids are ignored."""
        for request_id in request_ids:
            self._remove(request_id)

    def claim(self, request_id: str, owner: bytes, now: float) -> None:
        """Note that a kept result is sent to another client; its time starts anew."""
        kept = self._remove(request_id)
        if kept is not None:
            self._put(_Kept(kept.result, kept.num_bytes, owner, now + self._ttl_s))

    def orphan(self, owner: bytes) -> None:
        """Note that a client vanished: what it has not received waits for it to come back."""
        for request_id in self._ids_of(owner):
            self._to_nobody(request_id)

    def part(self, owner: bytes) -> None:
        """Note that a client said goodbye: only results of detached requests stay."""
        for request_id in self._ids_of(owner):
            if self._kept[request_id].result.request.detached:
                self._to_nobody(request_id)
            else:
                self._remove(request_id)

    def expire(self, now: float) -> None:
        """Let go of results whose time is up."""
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest].expires_at > now:
                return
            self._remove(oldest)

    def _ids_of(self, owner: bytes) -> list[str]:
        shelf = self._shelves.get(owner)
        return [] if shelf is None else list(shelf.request_ids)

    def _to_nobody(self, request_id: str) -> None:
        """Move a result to those of clients that are gone; it expires when it would have."""
        kept = self._kept[request_id]
        self._take_off(request_id, kept)
        kept.owner = None
        self._put_on(request_id, kept)

    def _put(self, kept: _Kept) -> None:
        request_id = kept.result.request.request_id
        self._kept[request_id] = kept
        self.num_bytes += kept.num_bytes
        self._put_on(request_id, kept)

    def _remove(self, request_id: str) -> _Kept | None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes
            self._take_off(request_id, kept)
        return kept

    def _put_on(self, request_id: str, kept: _Kept) -> None:
        shelf = self._shelves.setdefault(kept.owner, _Shelf())
        shelf.request_ids[request_id] = None
        shelf.num_bytes += kept.num_bytes
        while shelf.num_bytes > self._max_bytes:
            self._remove(next(iter(shelf.request_ids)))
            self.dropped += 1

    def _take_off(self, request_id: str, kept: _Kept) -> None:
        shelf = self._shelves[kept.owner]
        del shelf.request_ids[request_id]
        shelf.num_bytes -= kept.num_bytes
        if not shelf.request_ids:
            del self._shelves[kept.owner]
