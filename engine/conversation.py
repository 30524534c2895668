"""What a client and an engine have said: matches answers to calls, and repeats what got lost.

The user's threads note what they ask for here; everything else happens in the link's thread.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from omni_engine.engine.client_link import ClientLink
from omni_engine.engine.client_socket import Context, Socket
from omni_engine.engine.handles import answer_future
from omni_engine.engine.packing import batches, encode_call, split
from omni_engine.engine.pending import PendingRequest, PendingRequests
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import (
    EngineClosedError,
    OmniError,
    QueueFullError,
    RequestAbortedError,
    error_from_wire,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.1
"""When an engine's process has ended, what it sent before is read until this long after it."""


class Conversation:
    """The calls and requests of one connection, and what becomes of them.

    Args:
        endpoint: where the engine listens; for messages.
        connect: returns a socket of a context that is connected to the engine.
        ping_interval_s: seconds between pings.
        silence_s: how long the engine may be silent while it owes an answer.

    Attributes:
        link: the thread and the socket.
        max_message_bytes: what the engine accepts.

    Raises:
        OmniError: what ``connect`` raises.
    """

    def __init__(
        self,
        endpoint: str,
        connect: Callable[[Context], Socket],
        ping_interval_s: float,
        silence_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._calls: dict[int, Future[dict[str, Any]]] = {}
        self._pending = PendingRequests()
        self._received: list[str] = []
        self._session: str | None = None
        self._process = os.getpid()
        self._closed: EngineClosedError | None = None
        self.max_message_bytes = 0
        self.link = ClientLink(connect, self, ping_interval_s, silence_s)
        self.link.start()

    # -- any thread

    def call(self, kind: str, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Send a message; the future holds its answer or the engine's error.

        Raises:
            InvalidRequestError: if it holds what can't be sent.
            EngineClosedError: if the conversation is over.
        """
        message_id = next(self._ids)
        frames = encode_call(kind, message_id, body)
        future: Future[dict[str, Any]] = answer_future()
        with self._lock:
            self._check_open()
            self._calls[message_id] = future
        self.link.send(frames)
        return future

    def add(self, pending: PendingRequest) -> bool:
        """Note a request that is going to be submitted; False if another one has its id.

        Raises:
            EngineClosedError: if the conversation is over.
        """
        with self._lock:
            self._check_open()
            return self._pending.add(pending)

    def submit(self, requests: Sequence[DiffusionRequest]) -> None:
        """Submit requests that were added."""
        for chunk in split(requests, self.max_message_bytes):
            message_id = next(self._ids)
            self._pending.note_sent([request.request_id for request in chunk], message_id)
            wire = [request.to_wire() for request in chunk]
            message = messages.client_message(messages.SUBMIT, message_id, requests=wire)
            self.link.send(codec.encode(message))

    def abort(self, request_ids: Sequence[str], *, own: bool = False) -> None:
        """Ask the engine to end requests; unknown ids are ignored.

        Args:
            request_ids: the requests.
            own: whether only requests of this client are meant; else any client's.
        """
        self.link.do(functools.partial(self._abort_now, list(request_ids), own))

    def close(self) -> None:
        """Say goodbye; what is pending ends with ``EngineClosedError``."""
        with self._lock:
            self._closed = self._closed or EngineClosedError("this client is closed")
        self.link.do(lambda: self._send_aborts(self._pending.owed_aborts()))
        self.link.close()

    def engine_ended(self, error: EngineClosedError) -> None:
        """Take note that the engine's process has ended: nothing can be answered any more."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
        self.link.do(self._read_last_words)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise EngineClosedError(self._closed.message, hint=self._closed.hint)
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this client belongs to the process that this one was forked from",
                hint="Connect anew in the forked process.",
            )

    # -- the link's thread

    def is_waiting(self) -> bool:
        """Whether the engine owes an answer; how long it may take to connect is another matter."""
        return self._session is not None and bool(self._calls or len(self._pending))

    def next_turn(self) -> float | None:
        """Return when refused requests are to be submitted again."""
        return self._pending.next_due()

    def on_turn(self, now: float) -> None:
        """Say which outputs arrived, before their ids are used again; repeat what was refused."""
        received, self._received = self._received, []
        for some in batches(received):
            self.link.send_now(messages.client_message(messages.RECEIVED, request_ids=some))
        self._submit_again(self._pending.take_due(now), now)

    def on_message(self, message: dict[str, Any]) -> bool:
        """Act on a message; False if the engine has no place for this client."""
        self._check_session(message)
        match message["type"]:
            case messages.EVENT:
                if self._pending.note_known(message["request_id"]):
                    self._send_aborts([message["request_id"]])
                if (handle := self._pending.handle(message["request_id"])) is not None:
                    handle.note(message["status"])
            case messages.PROGRESS:
                if (handle := self._pending.handle(message["request_id"])) is not None:
                    preview = message["preview"]
                    handle.note_progress(message["step"], message["num_steps"], preview)
            case messages.OUTPUT:
                output = DiffusionOutput.from_wire(message["output"])
                self._received.append(output.request_id)
                if (pending := self._pending.take(output.request_id)) is not None:
                    pending.handle.finish(output)
            case messages.ERROR:
                return self._on_error(message)
            case messages.ACCEPTED:
                pass
            case _:
                if (future := self._take_call(message["reply_to"])) is not None:
                    future.set_result(message)
        return True

    def on_unusable(self, error: OmniError) -> None:
        """Nobody knows whose answer it was."""
        self._fail_everything(error)

    def on_silence(self, silent_s: float) -> None:
        """Give up what is pending; an engine that comes back is told not to run it."""
        error = EngineClosedError(
            f"the engine at {self._endpoint} has not answered for {silent_s:.0f} s"
        )
        failed = self._fail_everything(error)
        self._send_aborts([p.request.request_id for p in failed if not p.request.detached])

    def on_closed(self) -> None:
        """End what is pending."""
        error = EngineClosedError("this client was closed")
        with self._lock:
            self._closed = self._closed or error
        self._fail_everything(error)

    def _read_last_words(self) -> None:
        self.link.read_until_quiet(_LAST_WORDS_S)
        assert self._closed is not None  # that is why this is called
        self._fail_everything(self._closed)

    def _check_session(self, message: dict[str, Any]) -> None:
        """Notice that the engine is another one, or has taken this client for gone."""
        session = message.get("session")
        if session is None or session == self._session:
            return
        known, self._session = self._session, session
        if known is None:
            return
        logger.info("the engine at %s has forgotten this client", self._endpoint)
        lost = EngineClosedError(
            "the connection to the engine was lost; it has forgotten the call",
            hint="Try it again.",
        )
        with self._lock:
            answered = self._calls.pop(message["reply_to"], None)
            calls, self._calls = self._calls, {}
            if answered is not None:
                self._calls[message["reply_to"]] = answered
        for future in calls.values():
            future.set_exception(lost)
        again, ended = self._pending.forgotten()
        for pending, error in ended:
            pending.handle.fail(error)
        self._submit_again(again, time.monotonic())

    def _submit_again(self, all_pending: Sequence[PendingRequest], now: float) -> None:
        good: list[DiffusionRequest] = []
        for pending in all_pending:
            request = pending.again(now)
            if isinstance(request, OmniError):
                self._end(pending.request.request_id, request)
                self._send_aborts([pending.request.request_id])
            else:
                good.append(request)
        self.submit(good)

    def _on_error(self, message: dict[str, Any]) -> bool:
        error, reply_to = error_from_wire(message["error"]), message["reply_to"]
        if message["request_id"] is not None:
            self._refuse(message["request_id"], error)
        elif (future := self._take_call(reply_to)) is not None:
            future.set_exception(error)
        elif request_ids := self._pending.sent_in(reply_to):
            for request_id in request_ids:
                self._refuse(request_id, error)
        else:
            logger.error("the engine refused a message: %s", error)
        return not (isinstance(error, QueueFullError) and error.field == messages.NO_PLACE)

    def _refuse(self, request_id: str, error: OmniError) -> None:
        if not self._pending.defer(request_id, error, time.monotonic()):
            self._end(request_id, error)

    def _end(self, request_id: str, error: OmniError) -> None:
        if (pending := self._pending.take(request_id)) is not None:
            pending.handle.fail(error)

    def _abort_now(self, request_ids: list[str], own: bool) -> None:
        ended, tell = self._pending.abort(request_ids, own=own)
        for pending in ended:
            pending.handle.fail(RequestAbortedError("the request was aborted"))
        self._send_aborts(tell)

    def _send_aborts(self, request_ids: list[str]) -> None:
        for some in batches(request_ids):
            self.link.send_now(messages.client_message(messages.ABORT, request_ids=some))

    def _take_call(self, reply_to: int | None) -> Future[dict[str, Any]] | None:
        """Return the call that waits for this answer, if one does."""
        with self._lock:
            return None if reply_to is None else self._calls.pop(reply_to, None)

    def _fail_everything(self, error: OmniError) -> list[PendingRequest]:
        """End all calls and requests; return the requests."""
        with self._lock:
            calls, self._calls = self._calls, {}
            failed = self._pending.take_all()
        for future in calls.values():
            future.set_exception(error)
        for pending in failed:
            pending.handle.fail(error)
        return failed
