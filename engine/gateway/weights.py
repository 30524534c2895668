"""Which work is too heavy for the event loop, told from the values that it is done with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.protocol.codec import MAX_ITEMS

_LIGHT_ITEMS = 1000
_LIGHT_CHARS = 64 << 10
"""What is checked and packed for the engine within a few ms."""


def is_light(value: Any) -> bool:
    """Whether a value holds so little that it is checked at once; looks no further than needed.

    Args:
        value: plain values in dicts and lists.
    """
    items, chars = _LIGHT_ITEMS, _LIGHT_CHARS
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            chars -= len(one)
        elif isinstance(one, Mapping | list | tuple):
            items -= len(one)
            if items >= 0:
                left += [*one, *one.values()] if isinstance(one, Mapping) else one
        if items < 0 or chars < 0:
            return False
    return True


def refuse_crowded(text: bytes | str, param: str | None = None) -> None:
    """Refuse JSON that holds more values than a request may, before it is read.

    Commas and opening brackets are counted, those within texts, too: there are never fewer than
    values.

    Args:
        text: JSON, or what is taken for it.
        param: the field that it came in; None for the whole body.

    Raises:
        GatewayError: 413.
    """
    if isinstance(text, bytes):
        found = text.count(b",") + text.count(b"[") + text.count(b"{")
    else:
        found = text.count(",") + text.count("[") + text.count("{")
    if found > MAX_ITEMS:
        raise GatewayError(
            413,
            f"{param or 'The body'} holds too many values. "
            f"Expected: at most {MAX_ITEMS} commas and opening brackets.",
            param,
            "message_too_large",
        )
