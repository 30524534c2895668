"""Packs requests into submit messages that keep to every limit of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_engine.protocol import codec, messages
from omni_engine.protocol.requests import DiffusionRequest

_MESSAGE_BYTES = 64 * 2**20
_ENVELOPE_BYTES = 128
"""What a message adds to its requests."""


def split(
    requests: Sequence[DiffusionRequest], max_message_bytes: int
) -> Iterator[list[DiffusionRequest]]:
    """Split requests into messages that keep to every limit."""
    most = min(_MESSAGE_BYTES, max_message_bytes)
    chunk: list[DiffusionRequest] = []
    used = 0.0
    for request in requests:
        share = max(size / limit for _, size, limit in sizes(request, most))
        share = max(share, 4 / messages.MAX_REQUESTS_PER_MESSAGE)
        if chunk and used + share > 1:
            yield chunk
            chunk, used = [], 0.0
        chunk.append(request)
        used += share
    if chunk:
        yield chunk


def sizes(
    request: DiffusionRequest, max_message_bytes: int
) -> tuple[tuple[str, int, int], tuple[str, int, int], tuple[str, int, int]]:
    """Return (unit, size of a message with this request alone, most) for every limit."""
    header, *buffers = codec.encode(request.to_wire())
    header_bytes = len(header) + _ENVELOPE_BYTES
    return (
        ("bytes", header_bytes + codec.message_bytes(buffers), max_message_bytes),
        ("bytes of text and numbers", header_bytes, codec.MAX_HEADER_BYTES),
        ("frames", 1 + len(buffers), codec.MAX_FRAMES),
    )
