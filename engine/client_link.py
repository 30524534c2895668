"""A client's thread and socket: sends what it is given, hands over what comes, notices silence."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from omni_engine.engine.client_socket import Context, Socket, send
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import MalformedMessageError, OmniError

logger = logging.getLogger(__name__)

_READS_PER_TURN = 500


class LinkUser(Protocol):
    """Whom a link serves; all calls come from the link's thread."""

    def is_waiting(self) -> bool:
        """Whether the engine owes an answer, so that its silence matters."""

    def on_message(self, message: dict[str, Any]) -> bool:
        """Act on a message; False if it does not show that the engine serves this client."""

    def on_unusable(self, error: OmniError) -> None:
        """Something came that can't be used."""

    def on_turn(self, now: float) -> None:
        """Do what is due; called after messages were read and before others are sent."""

    def next_turn(self) -> float | None:
        """Return when something is due; None if nothing is."""

    def on_silence(self, silent_s: float) -> None:
        """The engine was silent for too long while it owed an answer."""

    def on_closed(self) -> None:
        """The link has ended."""


class ClientLink:
    """A thread with a socket to an engine; pings it, and says goodbye at the end.

    Args:
        connect: returns a socket of a context that is connected to the engine.
        user: is told of everything that happens.
        ping_interval_s: seconds between pings.
        silence_s: how long the engine may be silent while it owes an answer.

    Raises:
        OmniError: what ``connect`` raises.
    """

    def __init__(
        self,
        connect: Callable[[Context], Socket],
        user: LinkUser,
        ping_interval_s: float,
        silence_s: float,
    ) -> None:
        self._context = zmq.Context()
        self._engine = connect(self._context)  # the thread takes it over
        self._user = user
        self._ping_interval_s = ping_interval_s
        self._silence_s = silence_s
        self._todo: collections.deque[Callable[[], object]] = collections.deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._closing = False
        self._last_heard = time.monotonic()
        self._waiting_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="omni-client", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, frames: list[Any]) -> None:
        """Send a message, after what was given before; from any thread."""
        self.do(functools.partial(send, self._engine, frames))

    def do(self, action: Callable[[], object]) -> None:
        """Have the thread do something, after what was given before; from any thread."""
        self._todo.append(action)
        self._wake()

    def send_now(self, message: dict[str, Any]) -> None:
        """Send a message ahead of what was given before; from the link's thread only."""
        send(self._engine, codec.encode(message))

    def read_until_quiet(self, quiet_s: float) -> None:
        """Read until nothing has come for so long; from the link's thread only."""
        while self._engine.poll(math.ceil(quiet_s * 1000)):
            self._read()

    def close(self) -> None:
        """Send what was given, say goodbye and end; returns when the thread has ended."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, or is being woken already
            self._wake_writer.send(b"x")

    # -- the thread

    def _run(self) -> None:
        try:
            self._pump()
            self.send_now(messages.client_message(messages.BYE))
        finally:
            self._user.on_closed()
            self._context.destroy(linger=500)
            self._wake_reader.close()
            self._wake_writer.close()

    def _pump(self) -> None:
        poller = zmq.Poller()
        poller.register(self._engine, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        next_ping = time.monotonic() + self._ping_interval_s
        while not (self._closing and not self._todo):
            wake_at = min([next_ping, *self._other_deadlines()])
            wait_s = max(0.0, wake_at - time.monotonic())
            ready = dict(poller.poll(math.ceil(wait_s * 1000)))
            now = time.monotonic()
            if now - wake_at > self._ping_interval_s:  # this process was stopped, not the engine
                self._last_heard = now
            if self._wake_reader.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            if self._engine in ready:
                self._read()
            self._user.on_turn(now)
            self._check_silence(now)
            while self._todo:
                self._todo.popleft()()
            if now >= next_ping:
                self.send_now(messages.client_message(messages.PING))
                next_ping = now + self._ping_interval_s

    def _other_deadlines(self) -> list[float]:
        """When something but a ping is due."""
        waiting = self._user.is_waiting()
        if not waiting:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        deadlines = [self._user.next_turn(), self._silence_deadline()]
        return [at for at in deadlines if at is not None]

    def _silence_deadline(self) -> float | None:
        if self._waiting_since is None:
            return None
        return max(self._last_heard, self._waiting_since) + self._silence_s

    def _check_silence(self, now: float) -> None:
        deadline = self._silence_deadline()
        if deadline is not None and now >= deadline and self._user.is_waiting():
            self._waiting_since = None
            self._user.on_silence(now - self._last_heard)

    def _read(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_READS_PER_TURN):
                frames = self._engine.recv_multipart(zmq.NOBLOCK, copy=False)
                if self._hand_over(frames):
                    self._last_heard = time.monotonic()

    def _hand_over(self, frames: list[zmq.Frame]) -> bool:
        try:
            message = codec.decode(frames, trusted=True)  # what the engine may say has no limit
            messages.check_version(message)
            return self._user.on_message(message)
        except KeyError as error:
            unusable: OmniError = MalformedMessageError(f"the engine's message lacks {error}")
        except OmniError as error:
            unusable = error
        logger.error("a message from the engine can't be used: %s", unusable)
        self._user.on_unusable(unusable)
        return True
