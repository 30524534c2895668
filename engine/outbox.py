"""The engine's way out to its clients: bounded queues in which only progress may get lost.

ZeroMQ holds up to ``QUEUE_MESSAGES`` messages for a client that does not read. Beyond that,
progress is dropped, and everything else is kept here, in order, until the client reads on.
"""

from __future__ import annotations

import collections
import logging
import time
from typing import Any

import zmq

from omni_engine.protocol import codec

logger = logging.getLogger(__name__)

QUEUE_MESSAGES = 500
RETRY_S = 0.02
"""How often to try again with a client whose queue is full; ZeroMQ does not tell when it is not."""


class Outbox:
    """Sends messages to clients and never blocks.

    Args:
        socket: a ROUTER socket with ROUTER_MANDATORY and a send high-water mark.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._kept: dict[bytes, collections.deque[list[Any]]] = {}
        self._gone: set[bytes] = set()

    @property
    def backlog(self) -> int:
        """Messages that ZeroMQ did not take yet."""
        return sum(map(len, self._kept.values()))

    def send(self, identity: bytes, message: dict[str, Any], *, droppable: bool = False) -> None:
        """Send a message; a client that is gone loses it.

        Args:
            identity: the client's.
            message: ready for the codec.
            droppable: whether a client that does not read may miss it.
        """
        kept = self._kept.get(identity)
        if kept is not None and droppable:
            return
        frames = [identity, *codec.encode(message)]
        if kept is not None:
            kept.append(frames)
        elif not self._try_send(frames) and not droppable:
            self._kept[identity] = collections.deque([frames])

    def flush(self) -> None:
        """Try again with what was kept."""
        for identity, kept in list(self._kept.items()):
            while kept and self._try_send(kept[0]):
                kept.popleft()
            if not kept:
                del self._kept[identity]

    def forget(self, identity: bytes) -> None:
        """Throw away what was kept for a client that is taken for gone."""
        self._kept.pop(identity, None)

    def drain(self, timeout_s: float) -> None:
        """Flush until nothing is kept any more, or time is up."""
        deadline = time.monotonic() + timeout_s
        self.flush()
        while self._kept and time.monotonic() < deadline:
            time.sleep(RETRY_S)
            self.flush()

    def take_gone(self) -> set[bytes]:
        """Return the clients that could not be reached since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def _try_send(self, frames: list[Any]) -> bool:
        """Send; False if the client's queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.debug("client %s is gone", frames[0].hex())
            self._gone.add(frames[0])
        return True
