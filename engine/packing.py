"""Packs what a client says into messages that keep to every limit of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_engine.protocol import codec, fields, messages
from omni_engine.protocol.errors import InvalidRequestError, MessageTooLargeError
from omni_engine.protocol.requests import DiffusionRequest

_MESSAGE_BYTES = 64 * 2**20
_ENVELOPE_BYTES = 128
_ENVELOPE_CONTAINERS = 2
_ENVELOPE_ITEMS = 5
"""What a message adds to its requests."""


def split(
    requests: Sequence[DiffusionRequest], max_message_bytes: int
) -> Iterator[list[DiffusionRequest]]:
    """Split requests into messages that keep to every limit."""
    most = min(_MESSAGE_BYTES, max_message_bytes)
    chunk: list[DiffusionRequest] = []
    used = 0.0
    for request in requests:
        share = max(size / limit for _, size, limit in _sizes(request, most))
        share = max(share, 1 / messages.MAX_REQUESTS_PER_MESSAGE)
        if chunk and used + share > 1:
            yield chunk
            chunk, used = [], 0.0
        chunk.append(request)
        used += share
    if chunk:
        yield chunk


def too_large(request: DiffusionRequest, max_message_bytes: int) -> MessageTooLargeError | None:
    """Return the error for a request that fits no message; None if it fits one."""
    for what, size, most in _sizes(request, max_message_bytes):
        if size > most:
            return MessageTooLargeError(
                "the request is too large",
                field="message",
                value=f"{size} {what}",
                expected=f"at most {most} {what}",
            )
    return None


def batches(request_ids: Sequence[str]) -> Iterator[list[str]]:
    """Split request ids into as many as one message may name."""
    for start in range(0, len(request_ids), messages.MAX_IDS_PER_MESSAGE):
        yield list(request_ids[start : start + messages.MAX_IDS_PER_MESSAGE])


def encode_call(kind: str, message_id: int, body: Mapping[str, Any]) -> list[Any]:
    """Return the frames of a message whose fields the user chose.

    Raises:
        InvalidRequestError: if one of them can't be sent.
    """
    for name, value in body.items():
        if isinstance(value, str):
            fields.text().apply(name, value)
    try:
        return codec.encode(messages.client_message(kind, message_id, **body))
    except TypeError as error:
        raise InvalidRequestError(f"the call {kind} can't be sent: {error}") from None


def _sizes(request: DiffusionRequest, max_message_bytes: int) -> tuple[tuple[str, int, int], ...]:
    """Return (unit, size of a message with this request alone, most) for every limit."""
    wire = request.to_wire()
    header, *buffers = codec.encode(wire)
    header_bytes = len(header) + _ENVELOPE_BYTES
    return (
        ("bytes", header_bytes + codec.message_bytes(buffers), max_message_bytes),
        ("bytes of text and numbers", header_bytes, codec.MAX_HEADER_BYTES),
        ("frames", 1 + len(buffers), codec.MAX_FRAMES),
        ("maps and lists", _ENVELOPE_CONTAINERS + _containers(wire), codec.MAX_CONTAINERS),
        ("values in maps and lists", _ENVELOPE_ITEMS + _items(wire), codec.MAX_ITEMS),
    )


def _containers(value: Any) -> int:
    """Return how many maps and lists a value consists of."""
    match value:
        case Mapping():
            return 1 + sum(map(_containers, value.values()))
        case list() | tuple():
            return 1 + sum(map(_containers, value))
    return 0


def _items(value: Any) -> int:
    """Return how many values the maps and lists of a value hold."""
    match value:
        case Mapping():
            return len(value) + sum(map(_items, value.values()))
        case list() | tuple():
            return len(value) + sum(map(_items, value))
    return 0
