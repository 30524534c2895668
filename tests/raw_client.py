"""A client written from docs/protocol.md alone: the standard library, pyzmq and msgpack."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

VERSION = 1
PING_INTERVAL_S = 3.0
EXT_BUFFER = 1

Message = dict[str, Any]


@dataclass(frozen=True)
class Array:
    """An array on the wire: little-endian items in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: Any


def encode(message: Message) -> list[Any]:
    """A message's frames: the msgpack header, then one buffer per array."""
    buffers: list[Any] = []

    def extension(value: object) -> msgpack.ExtType:
        if not isinstance(value, Array):
            raise TypeError(type(value).__name__)
        buffers.append(value.data)
        reference = [len(buffers) - 1, value.dtype, list(value.shape)]
        return msgpack.ExtType(EXT_BUFFER, msgpack.packb(reference))

    return [msgpack.packb(message, default=extension), *buffers]


def decode(frames: Sequence[bytes]) -> Message:
    """The message of these frames."""

    def array(code: int, data: bytes) -> Array:
        assert code == EXT_BUFFER
        index, dtype, shape = msgpack.unpackb(data)
        return Array(dtype, tuple(shape), frames[1 + index])

    message: Message = msgpack.unpackb(frames[0], ext_hook=array)
    return message


class RawClient:
    """One connection; every wait is bounded."""

    def __init__(self, endpoint: str, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._unread: deque[Message] = deque()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.connect(endpoint)

    def send_frames(self, frames: Sequence[Any]) -> None:
        """Send anything at all."""
        self.socket.send_multipart(frames, copy=False)

    def send(self, kind: str, **fields: Any) -> int:
        """Send a message; its id."""
        message_id = next(self._ids)
        self.send_frames(encode({"v": VERSION, "type": kind, "id": message_id, **fields}))
        return message_id

    def messages(self) -> Iterator[Message]:
        """What the engine says, in order; ends by failing when nothing comes in time."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if self.socket.poll(PING_INTERVAL_S * 1000):
                yield decode(self.socket.recv_multipart())
            else:
                self.send_frames(encode({"v": VERSION, "type": "ping", "id": None}))
        raise AssertionError(f"nothing suitable came within {self._timeout_s:g} s")

    def find(self, wanted: Callable[[Message], bool]) -> Message:
        """The next message of a kind, kept ones first; others are kept."""
        for message in self._unread:
            if wanted(message):
                self._unread.remove(message)
                return message
        for message in self.messages():
            if wanted(message):
                return message
            self._unread.append(message)
        raise AssertionError("unreachable")

    def reply(self, message_id: int | None) -> Message:
        """The answer to a message."""
        return self.find(lambda message: message["reply_to"] == message_id)

    def call(self, kind: str, **fields: Any) -> Message:
        """Send a message and wait for its answer."""
        return self.reply(self.send(kind, **fields))

    def submit(self, *requests: Any) -> int:
        """Submit requests; the message's id."""
        return self.send("submit", requests=list(requests))

    def refusal(self, request: Any) -> Message:
        """Submit one request that is refused; the error map."""
        answer = self.reply(self.submit(request))
        assert answer["type"] == "error", answer
        error: Message = answer["error"]
        return error

    def output(self, request_id: str) -> Message:
        """Wait for a request's end."""
        found = self.find(
            lambda message: (
                message["type"] == "output" and message["output"]["request_id"] == request_id
            )
        )
        output: Message = found["output"]
        return output

    def story(self, request_id: str) -> list[Message]:
        """Everything that was said about a request, to its output, in order."""
        told: list[Message] = []
        while not told or told[-1]["type"] != "output":
            told.append(self.find(lambda message: about(message) == request_id))
        return told

    def close(self) -> None:
        """Close the connection without a word."""
        self.socket.close(linger=1000)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.send("bye")
        self.close()


def about(message: Message) -> str | None:
    """The request that a message is about."""
    if message["type"] == "output":
        message = message["output"]
    found: str | None = message.get("request_id")
    return found
