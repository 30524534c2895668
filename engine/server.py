"""The engine process's loop: sockets of clients and workers, one thread, one poller.

Every message is validated on arrival; a bad one is answered with a typed error and can't stop the
loop. The loop itself decides nothing: scheduling is ``StageRuntime``'s.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

import omni_engine
from omni_engine.engine.devices import available_devices, worker_device
from omni_engine.engine.endpoints import EndpointLock, bind_endpoint
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.worker_handle import WorkerHandle, WorkerState
from omni_engine.protocol import codec, messages, plans
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    MalformedMessageError,
    OmniError,
    QueueFullError,
    UnknownModelError,
    WorkerLostError,
    nearest,
    shorten,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.protocol.requests import DiffusionRequest, presentable_id
from omni_engine.stages.config import DeployConfig

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 15.0
"""A client that was silent for so long is taken for gone; clients ping every few seconds."""

SHUTDOWN_GRACE_S = 10.0
"""How long running batches may finish after SIGTERM or SIGINT."""

_TICK_S = 0.2
_MESSAGES_PER_TURN = 2000
_HARD_FRAME_FACTOR = 8
"""Frames up to this multiple of max_message_bytes are received, to be refused with a reason."""


@dataclass(slots=True)
class Client:
    """A connected client: it listens to its own requests.

    Attributes:
        identity: the socket's, drawn anew by ZeroMQ for every connection.
        server: sends its messages.
        last_seen: seconds, monotonic.
        session: told to the client, which sees by a change that the engine has forgotten it.
        request_ids: live requests that end with it.
    """

    identity: bytes
    server: EngineServer
    last_seen: float
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    request_ids: set[str] = field(default_factory=set)

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """Tell the client that its request began to wait or to run."""
        event = messages.engine_message(
            messages.EVENT, request_id=request_id, status=status.name.lower()
        )
        self.server.send(self.identity, event)

    def on_output(self, output: DiffusionOutput) -> None:
        """Give the client its result."""
        self.request_ids.discard(output.request_id)
        self.server.send(
            self.identity, messages.engine_message(messages.OUTPUT, output=output.to_wire())
        )


class EngineServer:
    """Serves the stages of a configuration until it is told to stop.

    Args:
        config: the effective configuration.
        endpoint: where clients connect; None for a private one.
        parent_fd: a descriptor whose end of file means that the owner is gone.
        on_listening: called with the endpoint once clients can connect.

    Raises:
        ConfigError: if the endpoint is in use or an adapter's file is missing.
    """

    def __init__(
        self,
        config: DeployConfig,
        endpoint: str | None,
        parent_fd: int | None = None,
        on_listening: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config = config
        self.endpoint = endpoint or ""
        self._parent_fd = parent_fd
        self._on_listening = on_listening
        self._started = time.monotonic()
        self._clients: dict[bytes, Client] = {}
        self._awaiting_ready: list[tuple[bytes, int | None]] = []
        self._stopping_since: float | None = None
        self._stop_now = False
        self._rejected = 0
        self._stages = {
            stage.display_name: StageRuntime(stage, config.limits, self._send_to_worker)
            for stage in config.stage_args
        }
        self._stage_of_worker: dict[str, StageRuntime] = {}

    def run(self) -> int:
        """Serve until told to stop; return the exit code 0."""
        with contextlib.ExitStack() as stack:
            directory = Path(tempfile.mkdtemp(prefix=plans.PRIVATE_DIRECTORY_PREFIX))  # mode 0700
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            self.endpoint = self.endpoint or f"ipc://{directory}/clients"
            stack.enter_context(EndpointLock(self.endpoint))
            self._wake = stack.enter_context(_signal_pipe())
            self._context = zmq.Context()
            stack.callback(self._context.destroy, linger=2000)
            self._open_sockets(directory)
            stack.callback(self._worker_socket.close, linger=0)
            stack.callback(self._stop_workers)
            self._start_workers(f"ipc://{directory}/workers")
            logger.info("engine listens on %s", self.endpoint)
            self._on_listening(self.endpoint)
            while not self._finished():
                self._turn()
        return 0

    def send(self, identity: bytes, message: dict[str, Any]) -> None:
        """Send a message to a client; one that is gone loses it."""
        try:
            self._client_socket.send_multipart([identity, *codec.encode(message)], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.info("client %s is gone", identity.hex())
            if (client := self._clients.get(identity)) is not None:
                client.last_seen = float("-inf")  # dropped at the end of this turn

    # -- the loop

    def _turn(self) -> None:
        ready = dict(self._poller.poll(math.ceil(self._poll_timeout_s() * 1000)))
        if self._wake.fileno() in ready:
            self._on_signal()
        if self._parent_fd is not None and self._parent_fd in ready:
            self._stop_now = not os.read(self._parent_fd, 4096) or self._stop_now
        if self._worker_socket in ready:
            for frames in _drain(self._worker_socket):
                self._on_worker_frames(frames)
        if self._client_socket in ready:
            for frames in _drain(self._client_socket):
                self._on_client_frames(frames)
        now = time.monotonic()
        for stage in self._stages.values():
            stage.check_workers(now)
            if self._stopping_since is None:
                stage.dispatch(now)
        self._drop_silent_clients(now)
        self._answer_awaiting_ready()

    def _poll_timeout_s(self) -> float:
        now = time.monotonic()
        deadlines = [s.next_deadline(now) for s in self._stages.values()]
        waits = [max(0.0, deadline - now) for deadline in deadlines if deadline is not None]
        return min([_TICK_S, *waits])

    def _finished(self) -> bool:
        if self._stop_now:
            return True
        if self._stopping_since is None:
            return False
        expired = time.monotonic() - self._stopping_since > SHUTDOWN_GRACE_S
        return expired or not any(stage.busy for stage in self._stages.values())

    def _on_signal(self) -> None:
        self._wake.recv(64)
        if self._stopping_since is not None:
            self._stop_now = True
            return
        logger.info("stopping: no new requests; running batches may finish")
        self._stopping_since = time.monotonic()
        for stage in self._stages.values():
            stage.abort_all(self._stopping_since, _closing(), waiting_only=True)

    # -- clients

    def _on_client_frames(self, frames: list[zmq.Frame]) -> None:
        identity, now = frames[0].bytes, time.monotonic()
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = Client(identity, self, now)
        client.last_seen = now
        reply_to: int | None = None
        try:
            message = codec.decode(frames[1:], self._config.limits.max_message_bytes)
            reply_to = messages.message_id(message)
            parsed = messages.parse_client_message(message)
            self._on_client_message(client, parsed, now)
        except OmniError as error:
            self._rejected += 1
            if isinstance(error, MalformedMessageError) and reply_to is None:
                reply_to = messages.salvage_id(frames[1:])
            self.send(identity, messages.error_message(error, reply_to))
        except Exception as error:  # boundary: one message; no message may stop the loop
            logger.exception("a message of client %s could not be handled", identity.hex())
            self._rejected += 1
            wrapped = OmniError(f"the engine failed on this message: {type(error).__name__}")
            self.send(identity, messages.error_message(wrapped, reply_to))

    def _on_client_message(
        self, client: Client, message: messages.ClientMessage, now: float
    ) -> None:
        match message.type:
            case messages.HELLO:
                welcome = self._welcome()
                self._reply(client, message, messages.WELCOME, session=client.session, **welcome)
            case messages.SUBMIT:
                self._submit(client, message, now)
            case messages.ABORT:
                for stage in self._stages.values():
                    stage.abort(message.body["request_ids"], now)
            case messages.STATUS:
                self._reply(client, message, messages.STATUS, status=self._status(now))
            case messages.WAIT_READY:
                self._awaiting_ready.append((client.identity, message.id))
            case messages.PING:
                self._reply(client, message, messages.PONG, session=client.session)
            case messages.BYE:
                self._drop(client, now)

    def _reply(
        self, client: Client, message: messages.ClientMessage, kind: str, **body: Any
    ) -> None:
        self.send(client.identity, messages.engine_message(kind, message.id, **body))

    def _submit(self, client: Client, message: messages.ClientMessage, now: float) -> None:
        """Take in each request of a message for itself; a bad one does not touch the others."""
        accepted: list[str] = []
        for index, wire in enumerate(message.body["requests"]):
            request_id = presentable_id(wire.get("request_id"))
            try:
                request = DiffusionRequest.from_wire(wire)
                request_id = request.request_id
                self._take_in(client, request, now)
                accepted.append(request_id)
            except OmniError as error:
                self._rejected += 1
                refusal = messages.error_message(error, message.id, request_id, index)
                self.send(client.identity, refusal)
        self._reply(client, message, messages.ACCEPTED, request_ids=accepted)

    def _take_in(self, client: Client, request: DiffusionRequest, now: float) -> None:
        if self._stopping_since is not None:
            raise _closing()
        if any(stage.knows(request.request_id) for stage in self._stages.values()):
            raise DuplicateRequestError(
                "the request id is in use",
                field="request_id",
                value=request.request_id,
                expected="an id that no live request has",
            )
        most = self._config.limits.max_waiting_requests
        if sum(stage.num_waiting for stage in self._stages.values()) >= most:
            raise QueueFullError(
                f"{most} requests are waiting already",
                expected="fewer requests at once",
                hint="Try again later.",
                retry_after_ms=1000,
            )
        stage = self._stage_for(request.model)
        stage.submit(request, client, now)
        if not request.detached:
            client.request_ids.add(request.request_id)

    def _stage_for(self, model: str | None) -> StageRuntime:
        if model is None:
            return next(iter(self._stages.values()))
        if (stage := self._stages.get(model)) is not None:
            return stage
        close = nearest(model, set(self._stages))
        raise UnknownModelError(
            f"no stage serves model {shorten(model)!r}",
            field="model",
            value=model,
            expected="one of " + ", ".join(self._stages),
            hint=f"Did you mean {close!r}?" if close else None,
        )

    def _drop_silent_clients(self, now: float) -> None:
        for client in list(self._clients.values()):
            if now - client.last_seen > CLIENT_TIMEOUT_S:
                self._drop(client, now)

    def _drop(self, client: Client, now: float) -> None:
        """Forget a client and abort what it asked for, except detached requests."""
        self._clients.pop(client.identity, None)
        for stage in self._stages.values():
            stage.abort(list(client.request_ids), now)

    def _answer_awaiting_ready(self) -> None:
        if self._awaiting_ready and all(stage.settled for stage in self._stages.values()):
            waiting, self._awaiting_ready = self._awaiting_ready, []
            for identity, message_id in waiting:
                body = messages.engine_message(messages.READY, message_id, **self._welcome())
                self.send(identity, body)

    def _welcome(self) -> dict[str, Any]:
        return {
            "version": omni_engine.__version__,
            "max_message_bytes": self._config.limits.max_message_bytes,
            "models": [
                {
                    "name": stage.name,
                    "state": stage.state,
                    "error": None if stage.error is None else stage.error.to_wire(),
                    "adapters": [adapter.name for adapter in stage.registry.adapters],
                }
                for stage in self._stages.values()
            ],
        }

    def _status(self, now: float) -> dict[str, Any]:
        return {
            "version": omni_engine.__version__,
            "protocol": messages.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "endpoint": self.endpoint,
            "uptime_s": now - self._started,
            "stopping": self._stopping_since is not None,
            "clients": len(self._clients),
            "rejected": self._rejected,
            "stages": [stage.describe(now) for stage in self._stages.values()],
        }

    # -- workers

    def _on_worker_frames(self, frames: list[zmq.Frame]) -> None:
        worker_id = frames[0].bytes.decode("ascii", "replace")
        stage = self._stage_of_worker.get(worker_id)
        if stage is None:
            return
        try:
            stage.on_worker_message(worker_id, codec.decode(frames[1:]), time.monotonic())
        except Exception as error:  # boundary: one worker; it may not stop the others
            logger.exception("worker %s sent a message that can't be used", worker_id)
            reason = f"worker {worker_id} was ended: its message can't be used: {error}"
            stage.give_up(worker_id, WorkerLostError(reason))

    def _send_to_worker(self, worker_id: str, message: dict[str, Any]) -> None:
        frames = [worker_id.encode(), *codec.encode(message)]
        with contextlib.suppress(zmq.ZMQError):  # a dead worker is noticed by its exit
            self._worker_socket.send_multipart(frames, copy=False)

    def _start_workers(self, endpoint: str) -> None:
        devices = available_devices()
        planned = [
            (stage, device)
            for stage in self._stages.values()
            for device in stage.stage.worker_devices(devices)
        ]
        on_cpu = sum(device == "cpu" for _, device in planned)
        now = time.monotonic()
        for stage, name in planned:
            index = len(stage.workers)
            threads = stage.stage.runtime.threads
            if name == "cpu":
                threads = stage.stage.runtime.worker_threads(on_cpu, os.cpu_count() or 1)
            arguments = stage.stage.engine_args
            device = worker_device(name)
            spec = WorkerSpec(
                worker_id=f"stage{stage.stage.stage_id}-worker{index}",
                endpoint=endpoint,
                engine_args=arguments.model_dump(mode="json"),
                model=arguments.resolved_model(),
                device=device.torch_name,
                threads=threads,
                adapters=stage.registry.adapters,
            )
            stage.workers[spec.worker_id] = WorkerHandle(spec, device, arguments.max_loras, now)
            self._stage_of_worker[spec.worker_id] = stage

    def _stop_workers(self) -> None:
        now = time.monotonic()
        for stage in self._stages.values():
            stage.abort_all(now, _closing())
        workers = [w for s in self._stages.values() for w in s.workers.values()]
        alive = [worker for worker in workers if worker.exit_code is None]
        for worker in alive:
            if worker.state is WorkerState.IDLE:
                self._send_to_worker(worker.worker_id, {"type": plans.STOP})
            else:
                worker.terminate()
        deadline = time.monotonic() + 5
        for worker in alive:
            if not worker.wait(max(0.1, deadline - time.monotonic())):
                worker.kill()
                worker.wait(5)
            worker.close()

    # -- sockets

    def _open_sockets(self, directory: Path) -> None:
        self._worker_socket = self._context.socket(zmq.ROUTER)
        self._worker_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._worker_socket.setsockopt(zmq.SNDHWM, 0)
        self._worker_socket.setsockopt(zmq.RCVHWM, 0)
        self._worker_socket.bind(f"ipc://{directory}/workers")
        self._client_socket = self._context.socket(zmq.ROUTER)
        self._client_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._client_socket.setsockopt(zmq.SNDHWM, 0)
        self._client_socket.setsockopt(
            zmq.MAXMSGSIZE, self._config.limits.max_message_bytes * _HARD_FRAME_FACTOR
        )
        self.endpoint = bind_endpoint(self._client_socket, self.endpoint)
        self._poller = zmq.Poller()
        sources: list[Any] = [self._worker_socket, self._client_socket, self._wake.fileno()]
        if self._parent_fd is not None:
            sources.append(self._parent_fd)
        for source in sources:
            self._poller.register(source, zmq.POLLIN)


def _closing() -> EngineClosedError:
    return EngineClosedError("the engine is shutting down", hint="Submit the request again later.")


def _drain(source: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that are there, so that scheduling sees all of a burst."""
    for _ in range(_MESSAGES_PER_TURN):
        try:
            yield source.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return


@contextlib.contextmanager
def _signal_pipe() -> Iterator[socket.socket]:
    """Make SIGTERM and SIGINT readable on a socket while the context lasts."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer.fileno())
    handlers = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield reader
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        reader.close()
        writer.close()
