"""The worker's I/O thread: its only socket, its heartbeat, its watch over the engine's life.

A long forward in the main thread delays neither a heartbeat nor an abort. When the engine goes away
(standard input reaches its end) the process exits at once, whatever the main thread is doing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import zmq

from omni_engine.protocol import adapters, codec, plans, socket_locks
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.progress import main_thread

logger = logging.getLogger(__name__)

WAKE = "wake"
"""A message of the worker to itself: something changed that its main thread may wait for."""

_ADAPTER_MESSAGES = frozenset(
    {
        adapters.ADAPTER_CHECK,
        adapters.ADAPTER_PREFETCH,
        adapters.ADAPTER_PIN,
        adapters.ADAPTER_DROP,
    }
)
_STDIN = 0
_OUTBOX = "inproc://outbox"


class AdapterKeeper(Protocol):
    """Loads adapters beside the main thread."""

    def on_message(self, message: dict[str, Any]) -> bool:
        """Act on a message of the engine, without waiting."""

    def expect(self, activations: Iterable[adapters.AdapterActivation | None]) -> None:
        """Load what a plan that has just arrived needs."""

    def loading_ms(self) -> float:
        """For how long the loader has been at its present file; 0 while it waits."""


class Limits(Protocol):
    """What a worker has learnt about its memory."""

    def shown(self) -> dict[str, int]:
        """Return the most rows of a forward by its kind."""


class EngineLink(threading.Thread):
    """Connects the worker's main thread with the engine.

    Args:
        endpoint: the engine's socket for workers.
        identity: this process's on it.
        aborts: told about aborted requests as soon as the message arrives.
        engine_socket: the engine's socket file for clients, if it has one.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        aborts: AbortFlags,
        engine_socket: str | None = None,
    ) -> None:
        super().__init__(name="engine-link", daemon=True)
        self._endpoint = endpoint
        self._engine_socket = engine_socket
        self._aborts = aborts
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._adapter_keeper: AdapterKeeper | None = None
        self._sending = threading.Lock()
        self._memory: Limits | None = None
        self._context = zmq.Context()
        self._engine = self._context.socket(zmq.DEALER)
        self._engine.setsockopt(zmq.IDENTITY, identity.encode())
        self._engine.setsockopt(zmq.LINGER, 2000)
        self._engine.connect(endpoint)
        self._outbox_in = self._context.socket(zmq.PULL)
        self._outbox_in.bind(_OUTBOX)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.LINGER, 0)
        self._outbox.connect(_OUTBOX)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message about the main thread's work to the engine."""
        main_thread.mark()
        self.post(message)

    def post(self, message: dict[str, Any]) -> None:
        """Send a message to the engine that says nothing of the main thread; from any thread."""
        frames = codec.encode(message)
        with self._sending:
            if not self._outbox.closed:
                self._outbox.send_multipart(frames, copy=False)

    def wake(self) -> None:
        """Let the main thread, if it waits for a message, look again; from any thread."""
        self._inbox.put({"type": WAKE})

    def tell_of_adapters(self, keeper: AdapterKeeper) -> None:
        """Hand what concerns adapters to their keeper as soon as it arrives."""
        self._adapter_keeper = keeper

    def tell_of_memory(self, memory: Limits) -> None:
        """Show in heartbeats what is learnt about memory."""
        self._memory = memory

    def receive(self, *, wait: bool = True) -> dict[str, Any] | None:
        """Return the next message: a plan or STOP; None if there is none and ``wait`` is False."""
        if wait:
            with main_thread.waiting():
                return self._inbox.get()
        try:
            message = self._inbox.get_nowait()
        except queue.Empty:
            return None
        main_thread.mark()
        return message

    def close(self) -> None:
        """Deliver what is queued and end the thread; called from the main thread only."""
        with self._sending:
            self._outbox.send(b"")
        self.join(timeout=5)
        with self._sending:
            self._outbox.close()
        self._context.destroy(linger=2000)

    def run(self) -> None:
        """Pump messages until ``close``."""
        try:
            self._pump()
        except Exception:  # boundary: the process; without this thread the engine waits forever
            logger.exception("the link to the engine failed")
            os._exit(1)

    def _pump(self) -> None:
        poller = zmq.Poller()
        for source in (self._engine, self._outbox_in, _STDIN):
            poller.register(source, zmq.POLLIN)
        next_beat = 0.0
        while True:
            ready = dict(poller.poll(math.ceil(max(0.0, next_beat - time.monotonic()) * 1000)))
            if _STDIN in ready and not os.read(_STDIN, 4096):
                self._leave_dead_engine()
            if self._engine in ready:
                self._read_engine()
            if self._outbox_in in ready and not self._forward_outbox():
                break
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + plans.HEARTBEAT_INTERVAL_S
        self._engine.close()
        self._outbox_in.close()

    def _leave_dead_engine(self) -> NoReturn:
        """Remove the files that the engine can't remove any more, and exit."""
        if self._engine_socket is not None:
            socket_locks.remove_if_abandoned(Path(self._engine_socket))
        folder = Path(self._endpoint.removeprefix("ipc://")).parent
        if folder.name.startswith(plans.PRIVATE_DIRECTORY_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _read_engine(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._engine.recv_multipart(zmq.NOBLOCK, copy=False)
                message = codec.decode(frames, trusted=True)
                if message["type"] == plans.ABORT:
                    self._aborts.set(message["request_ids"])
                    self.wake()
                    continue
                if message["type"] in _ADAPTER_MESSAGES:
                    if self._adapter_keeper is not None:
                        self._adapter_keeper.on_message(message)
                    continue
                if message["type"] != plans.STOP:
                    if self._adapter_keeper is not None:
                        activations = adapters.activations_from_wire(message["activations"])
                        self._adapter_keeper.expect(activations)
                    self._aborts.expect(request["request_id"] for request in message["requests"])
                self._inbox.put(message)

    def _forward_outbox(self) -> bool:
        frames = self._outbox_in.recv_multipart(copy=False)
        if len(frames) == 1 and not frames[0].bytes:
            return False
        self._engine.send_multipart(frames, copy=False)
        return True

    def _beat(self) -> None:
        beat = plans.Heartbeat(
            main_thread.working_ms(),
            0.0 if self._adapter_keeper is None else self._adapter_keeper.loading_ms(),
            {} if self._memory is None else self._memory.shown(),
            len(self._aborts),
            main_thread.forwards,
        )
        self._engine.send_multipart(codec.encode(beat.to_wire()))
