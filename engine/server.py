"""The engine process's loop: sockets of clients and workers, one thread, one poller.

The loop itself decides nothing: clients are ``ClientDesk``'s, scheduling is ``StageRuntime``'s.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from omni_engine.engine.client_desk import ClientDesk, closing_error
from omni_engine.engine.curve_server import curve_server
from omni_engine.engine.endpoints import EndpointLock, bind_endpoint, socket_file
from omni_engine.engine.figures import Traffic
from omni_engine.engine.file_limits import raise_file_limit
from omni_engine.engine.health import LoopHealth
from omni_engine.engine.outbox import QUEUE_MESSAGES, RETRY_S, Outbox
from omni_engine.engine.private_directory import private_directory
from omni_engine.engine.signals import signal_pipe
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.timeline import BoxRing
from omni_engine.engine.worker_pool import start_workers, stop_workers
from omni_engine.protocol import codec
from omni_engine.protocol.errors import WorkerLostError
from omni_engine.stages.config import DeployConfig

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_DRAIN_S = 2.0
"""How long clients may take, at the engine's end, to read what is still for them."""
_MESSAGES_PER_TURN = 2000
_READING_S = 0.004
"""How long a turn reads messages before it goes on to its other work."""
_QUEUED_MESSAGES = 32
"""Messages of one client that ZeroMQ reads ahead; each may have max_message_bytes."""
_FRAME_SLACK_BYTES = 1 << 20
"""Frames up to so many bytes beyond max_message_bytes are received, to be refused with a reason;
the sender of a longer one is disconnected before it is read."""


class EngineServer:
    """Serves the stages of a configuration until it is told to stop.

    Args:
        config: the effective configuration.
        endpoint: where clients connect; None for a private one.
        parent_fd: a descriptor whose end of file means that the owner is gone.
        on_listening: called with the endpoint once clients can connect.
        on_stage: called with a stage whenever its state has changed.
        end_when_unusable: whether to end when no stage's model could be loaded.

    Raises:
        ConfigError: if the endpoint is in use or an adapter's file is missing.
    """

    def __init__(
        self,
        config: DeployConfig,
        endpoint: str | None,
        parent_fd: int | None = None,
        on_listening: Callable[[str], None] = lambda _: None,
        on_stage: Callable[[StageRuntime], None] = lambda _: None,
        end_when_unusable: bool = False,
    ) -> None:
        self._config = config
        self.endpoint = endpoint or ""
        self._parent_fd = parent_fd
        self._on_listening = on_listening
        self._on_stage = on_stage
        self._end_when_unusable = end_when_unusable
        self._told: dict[str, str] = {}
        self._stopping_since: float | None = None
        self._stop_now = False
        self._traffic, self._boxes = Traffic(), BoxRing()
        self._stages = {
            stage.display_name: StageRuntime(
                stage, config.limits, self._send_to_worker, self._boxes
            )
            for stage in config.stage_args
        }
        self._stage_of_worker: dict[str, StageRuntime] = {}
        self._health = LoopHealth(time.monotonic())

    def run(self) -> int:
        """Serve until told to stop; return the exit code: 1 if no model could be loaded."""
        raise_file_limit()
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(private_directory())
            self.endpoint = self.endpoint or f"ipc://{directory}/clients"
            stack.enter_context(EndpointLock(self.endpoint))
            self._wake = stack.enter_context(signal_pipe())
            self._context = zmq.Context()
            stack.callback(self._context.destroy, linger=int(_DRAIN_S * 1000))
            self._open_sockets(directory, stack)
            stack.callback(self._worker_socket.close, linger=0)
            self._outbox = Outbox(self._client_socket, self._traffic)
            stack.callback(self._outbox.drain, _DRAIN_S)
            self._desk = ClientDesk(
                self._stages,
                self._config.limits,
                self.endpoint,
                self._outbox,
                self._config.result_ttl_s,
                self._health,
                self._boxes,
                self._traffic,
            )
            stack.callback(self._stop_workers)
            stages = self._stages.values()
            self._stage_of_worker = start_workers(
                stages, f"ipc://{directory}/workers", socket_file(self.endpoint)
            )
            logger.info("engine listens on %s", self.endpoint)
            self._on_listening(self.endpoint)
            while not self._finished():
                self._turn()
        return 1 if self._unusable else 0

    # -- the loop

    def _turn(self) -> None:
        ready = dict(self._poller.poll(math.ceil(self._poll_timeout_s() * 1000)))
        started = time.monotonic()
        if self._wake.fileno() in ready:
            self._on_signal()
        if self._parent_fd is not None and self._parent_fd in ready:
            self._stop_now = not os.read(self._parent_fd, 4096) or self._stop_now
        if self._worker_socket in ready:
            for frames in _drain(self._worker_socket):
                self._on_worker_frames(frames)
        if self._client_socket in ready:
            for frames in _drain(self._client_socket):
                self._desk.on_frames(frames)
        now = time.monotonic()
        for stage in self._stages.values():
            stage.check_workers(now)
            stage.dispatch(now)
        self._outbox.flush()
        self._tell_states()
        self._desk.drop_silent(now)
        self._desk.answer_awaiting_ready()
        self._health.note_turn(started, time.monotonic())

    def _poll_timeout_s(self) -> float:
        now = time.monotonic()
        deadlines = [s.next_deadline(now) for s in self._stages.values()]
        waits = [max(0.0, deadline - now) for deadline in deadlines if deadline is not None]
        return min([RETRY_S if self._outbox.backlog else _TICK_S, *waits])

    @property
    def _unusable(self) -> bool:
        """Whether every stage went down before its model was loaded."""
        return self._end_when_unusable and all(
            stage.state == "down" and stage.capabilities is None for stage in self._stages.values()
        )

    def _tell_states(self) -> None:
        for stage in self._stages.values():
            if stage.state != self._told.get(stage.name, "loading"):
                self._told[stage.name] = stage.state
                self._on_stage(stage)

    def _finished(self) -> bool:
        if self._stop_now or self._unusable:
            return True
        if self._stopping_since is None:
            return False
        took_s = time.monotonic() - self._stopping_since
        expired = took_s >= self._config.shutdown_timeout_s
        return expired or not any(stage.has_work for stage in self._stages.values())

    def _on_signal(self) -> None:
        self._wake.recv(64)
        if self._stopping_since is not None:
            self._stop_now = True
            return
        limit_s = self._config.shutdown_timeout_s
        logger.info("stopping: no new requests; those taken in may finish within %g s", limit_s)
        self._stopping_since = time.monotonic()
        self._desk.closing = True

    # -- workers

    def _on_worker_frames(self, frames: list[zmq.Frame]) -> None:
        self._traffic.from_workers += codec.message_bytes(frames[1:])
        identity = frames[0].bytes.decode("ascii", "replace")
        worker_id = identity.rpartition(".")[0]
        stage = self._stage_of_worker.get(worker_id)
        if stage is None or stage.workers[worker_id].identity != identity:
            return  # the last words of a process that was replaced
        try:
            stage.on_worker_message(
                worker_id, codec.decode(frames[1:], trusted=True), time.monotonic()
            )
        except Exception as error:  # boundary: one worker; it may not stop the others
            logger.exception("worker %s sent a message that can't be used", worker_id)
            reason = f"worker {worker_id} was ended: its message can't be used: {error}"
            stage.give_up(worker_id, WorkerLostError(reason))

    def _send_to_worker(self, worker_id: str, message: dict[str, Any]) -> None:
        identity = self._stage_of_worker[worker_id].workers[worker_id].identity
        frames = codec.encode(message)
        with contextlib.suppress(zmq.ZMQError):  # a dead worker is noticed by its exit
            self._worker_socket.send_multipart([identity.encode(), *frames], copy=False)
            self._traffic.to_workers += codec.message_bytes(frames)

    def _stop_workers(self) -> None:
        now = time.monotonic()
        for stage in self._stages.values():
            stage.abort_all(now, closing_error())
            stage.adapters.refuse_checks(closing_error(), now)
        workers = [worker for s in self._stages.values() for worker in s.workers.values()]
        stop_workers(workers, self._send_to_worker)

    # -- sockets

    def _open_sockets(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._worker_socket = self._context.socket(zmq.ROUTER)
        self._worker_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._worker_socket.setsockopt(zmq.SNDHWM, 0)
        self._worker_socket.setsockopt(zmq.RCVHWM, 0)
        bind_endpoint(self._worker_socket, f"ipc://{directory}/workers")
        self._client_socket = self._context.socket(zmq.ROUTER)
        self._client_socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._client_socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._client_socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        self._client_socket.setsockopt(
            zmq.MAXMSGSIZE, self._config.limits.max_message_bytes + _FRAME_SLACK_BYTES
        )
        door = curve_server(self._context, self._client_socket, self._config.curve)
        encrypted = stack.enter_context(door) is not None
        self.endpoint = bind_endpoint(self._client_socket, self.endpoint, encrypted=encrypted)
        self._poller = zmq.Poller()
        sources: list[Any] = [self._worker_socket, self._client_socket, self._wake.fileno()]
        if self._parent_fd is not None:
            sources.append(self._parent_fd)
        for source in sources:
            self._poller.register(source, zmq.POLLIN)


def _drain(source: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Yield the messages that are there, so that scheduling sees all of a burst.

    Ends early when acting on them takes long: no client may keep the loop from its other work.
    """
    until = time.monotonic() + _READING_S
    for _ in range(_MESSAGES_PER_TURN):
        try:
            yield source.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if time.monotonic() > until:
            return
