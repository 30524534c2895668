"""The engine's way out to its clients: bounded queues in which only progress may get lost.

ZeroMQ is handed up to ``QUEUE_MESSAGES`` messages for a client that does not read, and large ones
only up to ``IN_FLIGHT_BYTES``. Beyond that, progress is dropped, and everything else is kept here,
in order, until the client reads on, or until so much is kept that it is taken for gone.
"""

from __future__ import annotations

import collections
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import zmq

from omni_engine.engine.figures import Traffic
from omni_engine.protocol import codec

logger = logging.getLogger(__name__)

QUEUE_MESSAGES = 500
RETRY_S = 0.02
"""How often to try again with a client whose queue is full; ZeroMQ does not tell when it is not."""

IN_FLIGHT_BYTES = 8 << 20
"""Another large message goes to ZeroMQ while less than this of a client's is still in its hands."""

STILL_S = 5.0
"""A client that took nothing for so long, while more is kept for it than may be, does not read."""

_SLOW_FACTOR = 8

_LARGE_BYTES = zmq.COPY_THRESHOLD
"""Smaller frames are copied when they are sent, and not counted."""


@dataclass(slots=True)
class _Lane:
    """What is on its way to one client.

    Attributes:
        kept: messages that ZeroMQ was not handed yet, each with its size.
        kept_bytes: their size together.
        in_flight: trackers of large frames that ZeroMQ has, each with its size.
        in_flight_bytes: their size together.
        moved_at: when the client last took something of it: seconds, monotonic.
    """

    kept: collections.deque[tuple[list[Any], int]] = field(default_factory=collections.deque)
    kept_bytes: int = 0
    in_flight: collections.deque[tuple[zmq.MessageTracker, int]] = field(
        default_factory=collections.deque
    )
    in_flight_bytes: int = 0
    moved_at: float = field(default_factory=time.monotonic)

    @property
    def is_open(self) -> bool:
        """Whether ZeroMQ may be handed one more large message."""
        while self.in_flight and self.in_flight[0][0].done:
            self.in_flight_bytes -= self.in_flight.popleft()[1]
            self.moved_at = time.monotonic()
        return self.in_flight_bytes < IN_FLIGHT_BYTES

    def keep(self, frames: list[Any]) -> None:
        """Keep a message for later."""
        size = codec.message_bytes(frames)
        self.kept.append((frames, size))
        self.kept_bytes += size

    def drop_first(self) -> None:
        """Let go of the message that was kept longest."""
        self.moved_at = time.monotonic()
        self.kept_bytes -= self.kept.popleft()[1]


class Outbox:
    """Sends messages to clients and never blocks.

    Args:
        socket: a ROUTER socket with ROUTER_MANDATORY and a send high-water mark.
        traffic: where what is handed to ZeroMQ is counted.
    """

    def __init__(self, socket: zmq.Socket[bytes], traffic: Traffic | None = None) -> None:
        self._socket = socket
        self._traffic = traffic or Traffic()
        self._lanes: dict[bytes, _Lane] = {}
        self._gone: set[bytes] = set()

    @property
    def backlog(self) -> int:
        """Messages that ZeroMQ was not handed yet."""
        return sum(len(lane.kept) for lane in self._lanes.values())

    def bytes_kept(self, identity: bytes) -> int:
        """Return the size of what ZeroMQ was not handed yet for a client."""
        lane = self._lanes.get(identity)
        return 0 if lane is None else lane.kept_bytes

    def over(self, max_bytes: int) -> list[bytes]:
        """Return the clients that don't read: more than so much is kept, and nothing moves.

        Of one that reads too slowly for what it asks for, eight times as much is kept at most.
        """
        still = time.monotonic() - STILL_S
        return [
            who
            for who, lane in self._lanes.items()
            if lane.kept_bytes > max_bytes
            and (lane.moved_at < still or lane.kept_bytes > _SLOW_FACTOR * max_bytes)
        ]

    def send(self, identity: bytes, message: dict[str, Any], *, droppable: bool = False) -> None:
        """Send a message; a client that is gone loses it.

        Args:
            identity: the client's.
            message: ready for the codec.
            droppable: whether a client that does not read may miss it.
        """
        if droppable and identity in self._lanes and self._lanes[identity].kept:
            return
        self.send_frames(identity, codec.encode(message), droppable=droppable)

    def send_frames(self, identity: bytes, frames: list[Any], *, droppable: bool = False) -> None:
        """Send an encoded message, as ``send`` does."""
        lane = self._lanes.get(identity)
        waits = lane is not None and bool(lane.kept)
        if (waits or not self._try_send(identity, frames)) and not droppable:
            self._lanes.setdefault(identity, _Lane()).keep(frames)

    def flush(self) -> None:
        """Try again with what was kept."""
        for identity, lane in list(self._lanes.items()):
            while lane.kept and self._try_send(identity, lane.kept[0][0]):
                lane.drop_first()
            if not lane.kept and lane.is_open and not lane.in_flight:
                self._lanes.pop(identity, None)

    def forget(self, identity: bytes) -> None:
        """Throw away what was kept for a client that is taken for gone.

        What ZeroMQ has of it still counts: the client may be connected, and come back.
        """
        if (lane := self._lanes.get(identity)) is not None:
            lane.kept.clear()
            lane.kept_bytes = 0

    def drain(self, timeout_s: float) -> None:
        """Flush until nothing is kept any more, or time is up."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self.backlog and time.monotonic() < deadline:
            time.sleep(RETRY_S)
            self.flush()

    def take_gone(self) -> set[bytes]:
        """Return the clients that could not be reached since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def _try_send(self, identity: bytes, frames: list[Any]) -> bool:
        """Send; False if the client's queue is full."""
        sizes = [memoryview(frame).nbytes for frame in frames]
        large = any(size >= _LARGE_BYTES for size in sizes)
        lane = self._lanes.setdefault(identity, _Lane()) if large else None
        if lane is not None and not lane.is_open:
            return False
        tracked, trackers = _tracked(frames) if lane is not None else (frames, [])
        try:
            self._socket.send_multipart([identity, *tracked], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.debug("client %s is gone", identity.hex())
            self._gone.add(identity)
            return True
        self._traffic.to_clients += sum(sizes)
        if lane is not None:
            lane.in_flight.extend(trackers)
            lane.in_flight_bytes += sum(size for _, size in trackers)
        return True


def _tracked(frames: list[Any]) -> tuple[list[Any], list[tuple[zmq.MessageTracker, int]]]:
    """Return frames of which ZeroMQ tells when it lets go of the large ones, and their trackers."""
    tracked: list[Any] = []
    trackers: list[tuple[zmq.MessageTracker, int]] = []
    for frame in frames:
        size = memoryview(frame).nbytes
        if size < _LARGE_BYTES:
            tracked.append(frame)
            continue
        large = zmq.Frame(frame, track=True, copy=False)
        assert large.tracker is not None  # it was asked for
        trackers.append((large.tracker, size))
        tracked.append(large)
    return tracked, trackers
