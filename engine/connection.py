"""A client's connection: one I/O thread with one socket, shared by the sync and the async client.

Every pending call ends: with an answer, with the engine's error, or, when the engine stays silent
for ``ENGINE_TIMEOUT_S``, with ``EngineClosedError``.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import zmq

from omni_engine.engine.client_socket import connected_socket
from omni_engine.engine.endpoints import check_endpoint, default_endpoint
from omni_engine.engine.handles import RequestEvent, RequestHandle, answer_future
from omni_engine.engine.packing import sizes, split
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    MalformedMessageError,
    MessageTooLargeError,
    OmniError,
    RequestTimeoutError,
    error_from_wire,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 3.0
ENGINE_TIMEOUT_S = 15.0


class Connection:
    """A connection to an engine.

    Args:
        endpoint: where the engine listens; None for the default endpoint.
        connect_timeout_s: seconds within which the engine must answer.

    Raises:
        ConfigError: if the endpoint is not one.
        EngineClosedError: if no engine answers there.
        ProtocolVersionError: if it speaks another version.
    """

    def __init__(self, endpoint: str | None = None, connect_timeout_s: float = 10.0) -> None:
        self.endpoint = endpoint or default_endpoint()
        check_endpoint(self.endpoint)
        self._context = zmq.Context()
        self._engine = connected_socket(self._context, self.endpoint)  # the thread takes it over
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[dict[str, Any]]] = {}
        self._handles: dict[str, RequestHandle] = {}
        self._submitted: dict[int, list[str]] = {}
        self._session: str | None = None
        self._outbox: collections.deque[list[Any]] = collections.deque()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._process = os.getpid()
        self._closing = False
        self._last_heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="omni-client", daemon=True)
        self._thread.start()
        try:
            self.welcome = self.call(messages.HELLO, connect_timeout_s, client="omni-engine-python")
        except RequestTimeoutError:
            self.close()
            raise EngineClosedError(
                f"no engine answers at {self.endpoint}",
                field="endpoint",
                value=self.endpoint,
                hint="Start one with `omni-engine serve`, or name its endpoint.",
            ) from None
        except BaseException:  # whatever it is: clean up, then pass it on
            self.close()
            raise

    def call(self, kind: str, timeout_s: float | None = 30.0, **body: Any) -> dict[str, Any]:
        """Send a message and wait for its answer.

        Raises:
            OmniError: the engine's error, ``RequestTimeoutError`` or ``EngineClosedError``.
        """
        future = self.call_soon(kind, **body)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise RequestTimeoutError(
                f"the engine at {self.endpoint} did not answer within {timeout_s:g} s"
            ) from None

    def call_soon(self, kind: str, **body: Any) -> Future[dict[str, Any]]:
        """Send a message; the future holds its answer or the engine's error."""
        message_id = next(self._ids)
        future: Future[dict[str, Any]] = answer_future()
        with self._lock:
            self._check_open()
            self._calls[message_id] = future
        self._send(messages.client_message(kind, message_id, **body))
        return future

    def submit(
        self,
        requests: Sequence[DiffusionRequest],
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> list[RequestHandle]:
        """Submit requests; those sent together reach the scheduler together.

        Returns:
            One handle per request, in order; a refused request's handle carries the error.
        """
        handles = [RequestHandle(request, self.abort, on_event) for request in requests]
        fitting: list[DiffusionRequest] = []
        for request, handle in zip(requests, handles, strict=True):
            if self._register(request, handle):
                fitting.append(request)
        for chunk in split(fitting, self.welcome["max_message_bytes"]):
            message_id = next(self._ids)
            self._submitted[message_id] = [request.request_id for request in chunk]
            wire = [request.to_wire() for request in chunk]
            self._send(messages.client_message(messages.SUBMIT, message_id, requests=wire))
        return handles

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        for start in range(0, len(request_ids), messages.MAX_REQUESTS_PER_MESSAGE):
            some = list(request_ids[start : start + messages.MAX_REQUESTS_PER_MESSAGE])
            self._send(messages.client_message(messages.ABORT, request_ids=some))

    def close(self) -> None:
        """Say goodbye and end the thread; what is pending ends with ``EngineClosedError``."""
        with self._lock:
            already, self._closing = self._closing, True
        if not already:
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def _register(self, request: DiffusionRequest, handle: RequestHandle) -> bool:
        """Note a handle under its id; False if it failed already."""
        for what, size, most in sizes(request, self.welcome["max_message_bytes"]):
            if size > most:
                handle.fail(
                    MessageTooLargeError(
                        "the request is too large",
                        field="message",
                        value=f"{size} {what}",
                        expected=f"at most {most} {what}",
                    )
                )
                return False
        with self._lock:
            self._check_open()
            if request.request_id not in self._handles:
                self._handles[request.request_id] = handle
                return True
        handle.fail(_duplicate(request.request_id))
        return False

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosedError("this client is closed")
        if os.getpid() != self._process:
            raise EngineClosedError(
                "this client belongs to the process that this one was forked from",
                hint="Connect anew in the forked process.",
            )

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.append(codec.encode(message))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended, or is being woken already
            self._wake_writer.send(b"x")

    # -- the I/O thread

    def _run(self) -> None:
        engine = self._engine
        try:
            self._pump(engine)
            engine.send_multipart(codec.encode(messages.client_message(messages.BYE)))
        finally:
            with self._lock:
                self._closing = True
            self._fail_everything(EngineClosedError("this client was closed"))
            self._context.destroy(linger=500)
            self._wake_reader.close()
            self._wake_writer.close()

    def _pump(self, engine: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(engine, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        next_ping = time.monotonic() + PING_INTERVAL_S
        while not (self._closing and not self._outbox):
            ready = dict(poller.poll(math.ceil(max(0.0, next_ping - time.monotonic()) * 1000)))
            if self._wake_reader.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            while self._outbox:
                engine.send_multipart(self._outbox.popleft(), copy=False)
            if engine in ready:
                self._read(engine)
            if (late_s := time.monotonic() - next_ping) >= 0:
                if late_s > PING_INTERVAL_S:  # this process was stopped, not the engine
                    self._last_heard = time.monotonic()
                self._check_engine()
                engine.send_multipart(codec.encode(messages.client_message(messages.PING)))
                next_ping = time.monotonic() + PING_INTERVAL_S

    def _read(self, engine: zmq.Socket[bytes]) -> None:
        self._last_heard = time.monotonic()
        with contextlib.suppress(zmq.Again):
            while True:
                frames = engine.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    message = codec.decode(frames)
                    messages.check_version(message)
                    self._on_message(message)
                except KeyError as error:
                    self._on_unusable(MalformedMessageError(f"the engine's message lacks {error}"))
                except OmniError as error:
                    self._on_unusable(error)

    def _on_unusable(self, error: OmniError) -> None:
        logger.error("a message from the engine can't be used: %s", error)
        self._fail_everything(error)

    def _on_message(self, message: dict[str, Any]) -> None:
        self._check_session(message)
        match message["type"]:
            case messages.EVENT:
                if (handle := self._handles.get(message["request_id"])) is not None:
                    handle.note(message["status"])
            case messages.PROGRESS:
                if (handle := self._handles.get(message["request_id"])) is not None:
                    preview = message["preview"]
                    handle.note_progress(message["step"], message["num_steps"], preview)
            case messages.OUTPUT:
                output = DiffusionOutput.from_wire(message["output"])
                self._settle(output.request_id, lambda handle: handle.finish(output))
            case messages.ERROR:
                self._on_error(message)
            case messages.ACCEPTED:
                self._submitted.pop(message["reply_to"], None)
            case _:
                if (future := self._take_call(message["reply_to"])) is not None:
                    future.set_result(message)

    def _check_session(self, message: dict[str, Any]) -> None:
        """Notice that the engine is another one, or has taken this client for gone."""
        session = message.get("session")
        if session is None or session == self._session:
            return
        known, self._session = self._session, session
        if known is None:
            return
        answered = self._calls.pop(message["reply_to"], None)
        self.abort(list(self._handles))
        self._fail_everything(
            EngineClosedError(
                "the connection to the engine was lost; it has forgotten what was pending",
                hint="Submit the request again.",
            )
        )
        if answered is not None:
            self._calls[message["reply_to"]] = answered

    def _on_error(self, message: dict[str, Any]) -> None:
        error = error_from_wire(message["error"])
        if message["request_id"] is not None:
            self._settle(message["request_id"], lambda handle: handle.fail(error))
        elif (future := self._take_call(message["reply_to"])) is not None:
            future.set_exception(error)
        elif (request_ids := self._submitted.pop(message["reply_to"], None)) is not None:
            for request_id in request_ids:
                self._settle(request_id, lambda handle: handle.fail(error))
        else:
            logger.error("the engine refused a message: %s", error)

    def _settle(self, request_id: str, settle: Callable[[RequestHandle], None]) -> None:
        with self._lock:
            handle = self._handles.pop(request_id, None)
        if handle is not None:
            settle(handle)

    def _take_call(self, reply_to: int | None) -> Future[dict[str, Any]] | None:
        """Return the call that waits for this answer, if one does."""
        with self._lock:
            return None if reply_to is None else self._calls.pop(reply_to, None)

    def _check_engine(self) -> None:
        silent_s = time.monotonic() - self._last_heard
        if silent_s > ENGINE_TIMEOUT_S and (self._calls or self._handles):
            self._fail_everything(
                EngineClosedError(
                    f"the engine at {self.endpoint} has not answered for {silent_s:.0f} s"
                )
            )

    def _fail_everything(self, error: OmniError) -> None:
        with self._lock:
            calls, self._calls = self._calls, {}
            handles, self._handles = self._handles, {}
        self._submitted.clear()
        for future in calls.values():
            future.set_exception(error)
        for handle in handles.values():
            handle.fail(error)


def raise_if_down(models: Sequence[dict[str, Any]]) -> None:
    """Raise the error of the first model that has no worker left.

    Args:
        models: as in the engine's ``welcome`` and ``ready``.
    """
    for model in models:
        if model["state"] == "down" and model["error"] is not None:
            raise error_from_wire(model["error"])


def _duplicate(request_id: str) -> DuplicateRequestError:
    return DuplicateRequestError(
        "the request id is in use",
        field="request_id",
        value=request_id,
        expected="an id that no live request has",
    )
