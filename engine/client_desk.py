"""The engine's side of its clients: reads their messages, takes requests in, answers.

Every message is validated here; a bad one is answered with a typed error and does no harm.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

import omni_engine
from omni_engine.engine import adapter_desk
from omni_engine.engine.live_request import Preview
from omni_engine.engine.outbox import Outbox
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.status import describe_stage
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    MalformedMessageError,
    OmniError,
    QueueFullError,
    UnknownModelError,
    nearest,
    shorten,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest, presentable_id
from omni_engine.stages.config import Limits

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 15.0
"""A client that was silent for so long is taken for gone; clients ping every few seconds."""


@dataclass(slots=True)
class Client:
    """A connected client: it listens to its own requests.

    Attributes:
        identity: the socket's, drawn anew by ZeroMQ for every connection.
        outbox: sends messages to identities.
        last_seen: seconds, monotonic.
        session: told to the client, which sees by a change that the engine has forgotten it.
        request_ids: live requests that end with it.
    """

    identity: bytes
    outbox: Outbox
    last_seen: float
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    request_ids: set[str] = field(default_factory=set)

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """Tell the client that its request began to wait or to run."""
        event = messages.engine_message(
            messages.EVENT, request_id=request_id, status=status.name.lower()
        )
        self.outbox.send(self.identity, event)

    def on_progress(
        self, request_id: str, step: int, num_steps: int, preview: Preview | None
    ) -> None:
        """Tell the client how far its request is, unless it does not read what it is sent."""
        message = messages.engine_message(
            messages.PROGRESS,
            request_id=request_id,
            step=step,
            num_steps=num_steps,
            preview=preview,
        )
        self.outbox.send(self.identity, message, droppable=True)

    def on_output(self, output: DiffusionOutput) -> None:
        """Give the client its result."""
        self.request_ids.discard(output.request_id)
        message = messages.engine_message(messages.OUTPUT, output=output.to_wire())
        self.outbox.send(self.identity, message)


class ClientDesk:
    """Serves the clients of an engine.

    Args:
        stages: by the model name that clients use.
        limits: what the engine accepts at most.
        endpoint: where clients connect; shown in status.
        outbox: sends messages to clients.

    Attributes:
        closing: set when no more requests are taken in.
    """

    def __init__(
        self, stages: Mapping[str, StageRuntime], limits: Limits, endpoint: str, outbox: Outbox
    ) -> None:
        self._stages = stages
        self._limits = limits
        self._endpoint = endpoint
        self._outbox = outbox
        self._started = time.monotonic()
        self._clients: dict[bytes, Client] = {}
        self._awaiting_ready: list[tuple[bytes, int | None]] = []
        self._rejected = 0
        self.closing = False

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        """Act on a message: the sender's identity, then the message's frames."""
        identity, now = frames[0].bytes, time.monotonic()
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = Client(identity, self._outbox, now)
        client.last_seen = now
        reply_to: int | None = None
        try:
            message = codec.decode(frames[1:], self._limits.max_message_bytes)
            reply_to = messages.message_id(message)
            parsed = messages.parse_client_message(message)
            self._on_message(client, parsed, now)
        except OmniError as error:
            self._rejected += 1
            if isinstance(error, MalformedMessageError) and reply_to is None:
                reply_to = messages.salvage_id(frames[1:])
            self._outbox.send(identity, messages.error_message(error, reply_to))
        except Exception as error:  # boundary: one message; no message may stop the loop
            logger.exception("a message of client %s could not be handled", identity.hex())
            self._rejected += 1
            wrapped = OmniError(f"the engine failed on this message: {type(error).__name__}")
            self._outbox.send(identity, messages.error_message(wrapped, reply_to))

    def _on_message(self, client: Client, message: messages.ClientMessage, now: float) -> None:
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
            case kind if kind in adapter_desk.KINDS:
                if self.closing and kind == messages.LOAD_LORA:
                    raise closing_error()
                stage = self._stage_for(message.body["model"])
                send = functools.partial(self._outbox.send, client.identity)
                adapter_desk.answer(message, stage, send, now)

    def _reply(
        self, client: Client, message: messages.ClientMessage, kind: str, **body: Any
    ) -> None:
        self._outbox.send(client.identity, messages.engine_message(kind, message.id, **body))

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
                self._outbox.send(client.identity, refusal)
        self._reply(client, message, messages.ACCEPTED, request_ids=accepted)

    def _take_in(self, client: Client, request: DiffusionRequest, now: float) -> None:
        if self.closing:
            raise closing_error()
        if any(stage.live(request.request_id) for stage in self._stages.values()):
            raise DuplicateRequestError(
                "the request id is in use",
                field="request_id",
                value=request.request_id,
                expected="an id that no live request has",
            )
        most = self._limits.max_waiting_requests
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

    def drop_silent(self, now: float) -> None:
        """Give up clients that are gone or have been silent for too long."""
        gone = self._outbox.take_gone()
        for client in list(self._clients.values()):
            if client.identity in gone or now - client.last_seen > CLIENT_TIMEOUT_S:
                self._drop(client, now)
                self._outbox.forget(client.identity)

    def _drop(self, client: Client, now: float) -> None:
        """Forget a client and abort what it asked for, except detached requests."""
        self._clients.pop(client.identity, None)
        for stage in self._stages.values():
            stage.abort(list(client.request_ids), now)

    def answer_awaiting_ready(self) -> None:
        """Answer those who wait for the workers, once none is loading any more."""
        if self._awaiting_ready and all(stage.settled for stage in self._stages.values()):
            waiting, self._awaiting_ready = self._awaiting_ready, []
            for identity, message_id in waiting:
                body = messages.engine_message(messages.READY, message_id, **self._welcome())
                self._outbox.send(identity, body)

    def _welcome(self) -> dict[str, Any]:
        return {
            "version": omni_engine.__version__,
            "max_message_bytes": self._limits.max_message_bytes,
            "models": [
                {
                    "name": stage.name,
                    "state": stage.state,
                    "error": None if stage.error is None else stage.error.to_wire(),
                    "adapters": list(stage.adapters.registry.names),
                }
                for stage in self._stages.values()
            ],
        }

    def _status(self, now: float) -> dict[str, Any]:
        return {
            "version": omni_engine.__version__,
            "protocol": messages.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "endpoint": self._endpoint,
            "uptime_s": now - self._started,
            "stopping": self.closing,
            "clients": len(self._clients),
            "rejected": self._rejected,
            "stages": [describe_stage(stage, now) for stage in self._stages.values()],
        }


def closing_error() -> EngineClosedError:
    """Tell a client that the engine takes nothing in any more."""
    return EngineClosedError("the engine is shutting down", hint="Submit the request again later.")
