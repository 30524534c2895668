"""The engine's side of its clients: reads their messages, takes requests in, answers.

Every message is validated here; a bad one is answered with a typed error and does no harm.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import zmq

import omni_engine
from omni_engine.engine import adapter_desk
from omni_engine.engine.connected_client import Client
from omni_engine.engine.figures import Traffic
from omni_engine.engine.health import LoopHealth, describe_health
from omni_engine.engine.intake import Intake, closing_error
from omni_engine.engine.metrics import describe_stage_figures, describe_timeline
from omni_engine.engine.outbox import Outbox
from omni_engine.engine.results import ResultStore
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.status import describe_stage
from omni_engine.engine.timeline import BoxRing
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import MalformedMessageError, OmniError, QueueFullError
from omni_engine.stages.config import Limits

__all__ = ["CLIENT_TIMEOUT_S", "ClientDesk", "closing_error"]

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 15.0
"""A client that was silent for so long is taken for gone; clients ping every few seconds."""

_UPKEEP_S = 0.1
"""How often clients and results are looked through."""

_PAUSE_S = 5.0
"""When they were not looked through for so long, nothing is known of how silent clients were."""

_PLACE_RETRY_MS = 1000.0
"""When a client for which there is no place may try again."""


class ClientDesk:
    """Serves the clients of an engine.

    Args:
        stages: by the model name that clients use.
        limits: what the engine accepts at most.
        endpoint: where clients connect; shown in status.
        outbox: sends messages to clients.
        result_ttl_s: how long a result is kept for a client that has not received it.
        loop: the health of the engine's loop, for status.
        boxes: the batches and ticks of all stages.
        traffic: counts the bytes that were sent and received.
    """

    def __init__(
        self,
        stages: Mapping[str, StageRuntime],
        limits: Limits,
        endpoint: str,
        outbox: Outbox,
        result_ttl_s: float,
        loop: LoopHealth,
        boxes: BoxRing,
        traffic: Traffic,
    ) -> None:
        self._stages = stages
        self._limits = limits
        self._endpoint = endpoint
        self._outbox = outbox
        self._loop = loop
        self._boxes, self._traffic = boxes, traffic
        self._results = ResultStore(result_ttl_s, limits.max_client_backlog_bytes)
        self._intake = Intake(stages, limits, self._results, outbox)
        self._started = time.monotonic()
        self._next_upkeep = self._started
        self._clients: dict[bytes, Client] = {}
        self._awaiting_ready: list[tuple[bytes, int | None]] = []
        self._rejected_messages: Counter[str] = Counter()
        self._dropped_clients = 0

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken in."""
        return self._intake.closing

    @closing.setter
    def closing(self, closing: bool) -> None:
        self._intake.closing = closing

    def on_frames(self, frames: list[zmq.Frame]) -> None:
        """Act on a message: the sender's identity, then the message's frames."""
        identity, now = frames[0].bytes, time.monotonic()
        self._traffic.from_clients += codec.message_bytes(frames[1:])
        client = self._known(identity, frames[1:], now)
        if client is None:
            return self._turn_away(identity, frames[1:])
        client.last_seen = now
        reply_to: int | None = None
        try:
            message = codec.decode(frames[1:], self._limits.max_message_bytes)
            reply_to = messages.message_id(message)
            parsed = messages.parse_client_message(message)
            self._on_message(client, parsed, now)
        except OmniError as error:
            self._rejected_messages[error.code] += 1
            if isinstance(error, MalformedMessageError) and reply_to is None:
                reply_to = messages.salvage_id(frames[1:])
            self._outbox.send(identity, messages.error_message(error, reply_to))
        except Exception as error:  # boundary: one message; no message may stop the loop
            logger.exception("a message of client %s could not be handled", identity.hex())
            wrapped = OmniError(f"the engine failed on this message: {type(error).__name__}")
            self._rejected_messages[wrapped.code] += 1
            self._outbox.send(identity, messages.error_message(wrapped, reply_to))

    def _on_message(self, client: Client, message: messages.ClientMessage, now: float) -> None:
        match message.type:
            case messages.HELLO:
                self._log_name(client, message.body["client"])
                welcome = self._welcome()
                self._reply(client, message, messages.WELCOME, session=client.session, **welcome)
            case messages.SUBMIT:
                self._intake.submit(client, message, now)
            case messages.ABORT:
                self._abort(message.body["request_ids"], now)
            case messages.RECEIVED:
                self._results.received(message.body["request_ids"])
            case messages.STATUS:
                self._reply(client, message, messages.STATUS, status=self._status(now))
            case messages.METRICS:
                self._reply(client, message, messages.METRICS, metrics=self._metrics(now))
            case messages.TIMELINE:
                since = message.body["since"]
                timeline = describe_timeline(self._stages.values(), self._boxes, since, now)
                self._reply(client, message, messages.TIMELINE, timeline=timeline)
            case messages.WAIT_READY:
                self._awaiting_ready.append((client.identity, message.id))
            case messages.PING:
                self._reply(client, message, messages.PONG, session=client.session)
            case messages.BYE:
                self._part(client, now)
            case kind if kind in adapter_desk.KINDS:
                if self.closing and kind == messages.LOAD_LORA:
                    raise closing_error()
                stage = self._intake.stage_for(message.body["model"])
                send = functools.partial(self._outbox.send, client.identity)
                adapter_desk.answer(
                    message, stage, send, now, client=client.identity, limits=self._limits
                )

    def _log_name(self, client: Client, program: str | None) -> None:
        """Log who a client is, once it says so: what is logged of its requests has its label."""
        fields = {"event": "client_connected", "client": client.label, "key": client.key,
                  "program": program}  # fmt: skip
        named = "a program without a name" if program is None else json.dumps(program)
        key = "" if client.key is None else f", key {json.dumps(client.key)}"
        logger.info("client %s is %s%s", client.label, named, key, extra=fields)

    def _reply(
        self, client: Client, message: messages.ClientMessage, kind: str, **body: Any
    ) -> None:
        self._outbox.send(client.identity, messages.engine_message(kind, message.id, **body))

    def _known(self, identity: bytes, frames: list[zmq.Frame], now: float) -> Client | None:
        """Return a client, a new one too; None if there is no place for it."""
        client = self._clients.get(identity)
        if client is None and len(self._clients) < self._limits.max_clients:
            client = Client(identity, self._outbox, self._results, now, key=_key_of(frames))
            self._clients[identity] = client
        return client

    def _turn_away(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Answer a message of a client for which there is no place, and do nothing else."""
        most = self._limits.max_clients
        error = QueueFullError(
            f"{most} clients are connected already",
            field=messages.NO_PLACE,
            value=most,
            expected="fewer clients at once",
            hint="Try again later.",
            retry_after_ms=_PLACE_RETRY_MS,
        )
        self._rejected_messages[error.code] += 1
        self._outbox.send(identity, messages.error_message(error, messages.salvage_id(frames)))

    def drop_silent(self, now: float) -> None:
        """Give up clients that are gone, silent or do not read, and results that are too old."""
        unreachable = self._outbox.take_gone()
        if not unreachable and now < self._next_upkeep:
            return
        if now - self._next_upkeep > _PAUSE_S:  # this process was stopped, not its clients
            for client in self._clients.values():
                client.last_seen = now
        self._next_upkeep = now + _UPKEEP_S
        self._intake.note_throughput(now)
        self._results.expire(now)
        overfull = set(self._outbox.over(self._limits.max_client_backlog_bytes))
        for client in list(self._clients.values()):
            if client.identity in unreachable:
                self._drop(client, "its connection is closed", now)
            elif client.identity in overfull:
                kept = self._outbox.bytes_kept(client.identity)
                self._drop(client, f"it does not read: {kept} bytes are kept for it", now)
            elif now - client.last_seen > CLIENT_TIMEOUT_S:
                self._drop(client, f"it was silent for {now - client.last_seen:.1f} s", now)
        for identity in overfull - self._clients.keys():
            self._outbox.forget(identity)

    def _drop(self, client: Client, reason: str, now: float) -> None:
        """Take a client for gone: abort what it asked for, except detached requests."""
        client.gone = True
        self._dropped_clients += 1
        ending = client.ending_with_it
        level = logging.WARNING if ending else logging.INFO
        logger.log(
            level,
            "client %s is taken for gone, %s; %d of its requests are aborted",
            client.identity.hex(),
            reason,
            len(ending),
        )
        self._abort(ending, now)
        self._results.orphan(client.identity)
        self._forget(client)

    def _part(self, client: Client, now: float) -> None:
        """Let a client go that says goodbye; it is told of what ends with it."""
        client.parted = True
        self._abort(client.ending_with_it, now)
        client.gone = True
        self._results.part(client.identity)
        self._forget(client)

    def _forget(self, client: Client) -> None:
        self._clients.pop(client.identity, None)
        self._outbox.forget(client.identity)
        self._awaiting_ready = [
            (identity, message_id)
            for identity, message_id in self._awaiting_ready
            if identity != client.identity
        ]

    def _abort(self, request_ids: list[str], now: float) -> None:
        for stage in self._stages.values():
            stage.abort(request_ids, now)

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
        stages = [describe_stage(stage, now) for stage in self._stages.values()]
        return {
            "version": omni_engine.__version__,
            "protocol": messages.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "endpoint": self._endpoint,
            "uptime_s": now - self._started,
            "stopping": self.closing,
            "clients": len(self._clients),
            "clients_dropped": self._dropped_clients,
            "followed": sum(len(client.asked) for client in self._clients.values()),
            "unsent": self._outbox.backlog,
            "kept_results": len(self._results),
            "kept_result_bytes": self._results.num_bytes,
            "kept_results_dropped": self._results.dropped,
            "rejected": self._refused.total(),
            "health": describe_health(stages, self._loop, now, stopping=self.closing),
            "stages": stages,
        }

    def _metrics(self, now: float) -> dict[str, Any]:
        return {
            "uptime_s": now - self._started,
            "clients": len(self._clients),
            "bytes": dataclasses.asdict(self._traffic),
            "refused": dict(self._refused),
            "stages": [describe_stage_figures(stage, now) for stage in self._stages.values()],
        }

    @property
    def _refused(self) -> Counter[str]:
        """Messages and requests that were refused, by the error's code."""
        return self._rejected_messages + self._intake.refused


def _key_of(frames: list[zmq.Frame]) -> str | None:
    """Return the name of the key with which a message's sender is let in; None without keys."""
    try:
        return str(frames[0].get("User-Id")) if frames else None
    except zmq.ZMQError:  # it came without
        return None
