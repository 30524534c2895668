"""Messages between clients and the engine: header fields, version check, validation on arrival.

``docs/protocol.md`` is the specification; this module is its one implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from omni_engine.protocol import codec
from omni_engine.protocol.errors import (
    InvalidRequestError,
    MalformedMessageError,
    MessageTooLargeError,
    OmniError,
    ProtocolVersionError,
)
from omni_engine.protocol.fields import FieldRule, describe, integer, number, refuse_unknown, text
from omni_engine.protocol.sampling import MAX_SCALE

PROTOCOL_VERSION = 1

HELLO, SUBMIT, ABORT, RECEIVED, STATUS, WAIT_READY, PING, BYE = (
    "hello",
    "submit",
    "abort",
    "received",
    "status",
    "wait_ready",
    "ping",
    "bye",
)
METRICS, TIMELINE = "metrics", "timeline"
"""What happened so far, in numbers and as batches; answered with messages of the same types."""
LORAS, LOAD_LORA, UNLOAD_LORA, PIN_LORA = "loras", "load_lora", "unload_lora", "pin_lora"
"""Adapter management: the list is answered with ``loras``, the others with ``lora``."""
WELCOME, ACCEPTED, EVENT, PROGRESS, OUTPUT, READY, PONG, LORA, ERROR = (
    "welcome",
    "accepted",
    "event",
    "progress",
    "output",
    "ready",
    "pong",
    "lora",
    "error",
)

CLIENT_FIELDS: dict[str, frozenset[str]] = {
    HELLO: frozenset({"client"}),
    SUBMIT: frozenset({"requests"}),
    ABORT: frozenset({"request_ids"}),
    RECEIVED: frozenset({"request_ids"}),
    STATUS: frozenset(),
    METRICS: frozenset(),
    TIMELINE: frozenset({"since"}),
    WAIT_READY: frozenset(),
    PING: frozenset(),
    BYE: frozenset(),
    LORAS: frozenset({"model"}),
    LOAD_LORA: frozenset({"model", "name", "path", "default_scale", "preload", "pin", "replace"}),
    UNLOAD_LORA: frozenset({"model", "name"}),
    PIN_LORA: frozenset({"model", "name", "pin"}),
}
_COMMON = frozenset({"v", "type", "id"})
MAX_REQUESTS_PER_MESSAGE = 64
"""Judging so many takes some 10 ms, if all are wrong; the others wait meanwhile."""
MAX_IDS_PER_MESSAGE = 4096
MAX_CLIENT_CHARS = 200
MAX_PATH_CHARS = 4096
MAX_LORA_NAME_CHARS = 200
NO_PLACE = "max_clients"
"""The ``field`` of the ``queue_full`` error for every message of a client that has no place."""


def _lora_name(value: object) -> str:
    name: str = text(MAX_LORA_NAME_CHARS).normalise(value)
    if not name or name != name.strip() or set(":=") & set(name):
        raise ValueError
    return name


def _path(value: object) -> str:
    path: str = text(MAX_PATH_CHARS).normalise(value)
    if not path.strip() or "\0" in path:
        raise ValueError
    return path


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_SINCE = integer(0, 2**63 - 1)

_LORA_RULES = {
    "model": text(),
    "name": FieldRule(
        _lora_name,
        f"1 to {MAX_LORA_NAME_CHARS} characters without blanks around them and without ':' or '='",
    ),
    "path": FieldRule(_path, f"a path of at most {MAX_PATH_CHARS} characters"),
    "default_scale": number(-MAX_SCALE, MAX_SCALE),
    "preload": FieldRule(_boolean, "true or false"),
    "pin": FieldRule(_boolean, "true or false"),
    "replace": FieldRule(_boolean, "true or false"),
}
_LORA_REQUIRED = {
    LORAS: frozenset[str](),
    LOAD_LORA: frozenset({"name", "path"}),
    UNLOAD_LORA: frozenset({"name"}),
    PIN_LORA: frozenset({"name", "pin"}),
}
"""Fields of adapter management that may not be nil, by message."""


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A checked message from a client: its type, correlation id and own fields."""

    type: str
    id: int | None
    body: dict[str, Any]


def client_message(kind: str, message_id: int | None = None, **body: Any) -> dict[str, Any]:
    """Build a message for the engine, ready for ``codec.encode``."""
    return {"v": PROTOCOL_VERSION, "type": kind, "id": message_id, **body}


def engine_message(kind: str, reply_to: int | None = None, **body: Any) -> dict[str, Any]:
    """Build a message for a client, ready for ``codec.encode``."""
    return {"v": PROTOCOL_VERSION, "type": kind, "reply_to": reply_to, **body}


def error_message(
    error: OmniError,
    reply_to: int | None = None,
    request_id: str | None = None,
    request_index: int | None = None,
) -> dict[str, Any]:
    """Build the answer to a message, or to one of its requests, that can't be served.

    Args:
        error: why.
        reply_to: the message's id.
        request_id: the request's id, where it has one.
        request_index: the request's place in its submit message.
    """
    return engine_message(
        ERROR, reply_to, request_id=request_id, request_index=request_index, error=error.to_wire()
    )


def check_version(message: Mapping[str, Any]) -> None:
    """Raise ``ProtocolVersionError`` unless the message speaks this version."""
    version = message.get("v")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolVersionError(
            "the two sides speak different protocol versions",
            field="v",
            value=describe(version),
            expected=f"{PROTOCOL_VERSION}",
            hint="Install the same omni-engine version on both sides.",
        )


def parse_client_message(message: Mapping[str, Any]) -> ClientMessage:
    """Check a decoded client message: version, type, id and the names of its fields.

    Raises:
        ProtocolVersionError: if the version differs.
        MalformedMessageError: if the type is unknown or a field has the wrong type.
        UnknownFieldError: if a field is unknown.
    """
    check_version(message)
    kind, message_id = message.get("type"), message.get("id")
    if not isinstance(kind, str) or kind not in CLIENT_FIELDS:
        raise MalformedMessageError(
            "unknown message type",
            field="type",
            value=describe(kind),
            expected="one of " + ", ".join(CLIENT_FIELDS),
        )
    if message_id is not None and not _is_id(message_id):
        raise MalformedMessageError(
            "the message id is not acceptable",
            field="id",
            value=describe(message_id),
            expected="an integer >= 0 or nil",
        )
    refuse_unknown(message, CLIENT_FIELDS[kind] | _COMMON, "")
    body = {name: message.get(name) for name in CLIENT_FIELDS[kind]}
    if kind == HELLO and body["client"] is not None:
        body["client"] = text(MAX_CLIENT_CHARS).apply("client", body["client"])
    if kind == TIMELINE and body["since"] is not None:
        body["since"] = _SINCE.apply("since", body["since"])
    if kind == SUBMIT:
        _check_list(body["requests"], "requests", Mapping, "request maps", MAX_REQUESTS_PER_MESSAGE)
    if kind in (ABORT, RECEIVED):
        _check_list(body["request_ids"], "request_ids", str, "request ids", MAX_IDS_PER_MESSAGE)
    if kind in _LORA_REQUIRED:
        for name, value in body.items():
            if value is not None or name in _LORA_REQUIRED[kind]:
                body[name] = _LORA_RULES[name].apply(name, value)
    return ClientMessage(kind, message_id, body)


def salvage_id(frames: Sequence[Any]) -> int | None:
    """Return the message id of a message that can't be decoded, if it can be found at all."""
    if not frames or codec.message_bytes(frames[:1]) > codec.MAX_HEADER_BYTES:
        return None
    try:
        header = msgpack.unpackb(
            memoryview(getattr(frames[0], "buffer", frames[0])),
            unicode_errors="replace",
            **codec.counted_containers(),
        )
    except (ValueError, TypeError, msgpack.UnpackException, MessageTooLargeError):
        return None
    return message_id(header) if isinstance(header, dict) else None


def message_id(message: Mapping[Any, Any]) -> int | None:
    """Return a message's id, or None if it has none that is acceptable."""
    found = message.get("id")
    return found if _is_id(found) else None


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_list(value: object, field: str, item: type, what: str, most: int) -> None:
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= most
        or not all(isinstance(entry, item) for entry in value)
    ):
        raise InvalidRequestError(
            f"{field} is not acceptable",
            field=field,
            value=describe(value),
            expected=f"a list of 1 to {most} {what}",
        )
