"""Reads bodies: JSON and forms, never on the event loop where they may be large."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import UploadFile

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import gateway_of
from omni_engine.engine.gateway.validation import Body, validated
from omni_engine.engine.gateway.weights import refuse_crowded
from omni_engine.protocol.codec import MAX_HEADER_BYTES

B = TypeVar("B", bound=Body)
Given = dict[str, list[UploadFile | str]]
"""What pictures were given by field, each a file or a URL."""

TEXT_BODY_BYTES = 2 * MAX_HEADER_BYTES
"""Of JSON without pictures: all that the engine takes, written with escapes."""
PICTURE_BODY_BYTES = 16 << 20
"""Of JSON with a picture as a data: URL. Reading it stops everything else for some 20 ms."""
_FIELD_BYTES = 4 << 20
"""Of one text field of a form; pictures as data: URLs are such fields."""
_ENCODED_FIELD_BYTES = 64 << 10
"""Of one field of a form in URL encoding, which is decoded on the event loop."""
_SMALL_BYTES = 64 << 10
"""Of a body that is read in less time than handing it to a thread takes."""
_NESTED = re.compile(r"(\w+)\[(\w*)\]")


async def json_body(request: Request, model: type[B], most: int = TEXT_BODY_BYTES) -> B:
    """Return a body of JSON.

    Args:
        request: that holds it.
        model: what it should be.
        most: bytes that it may have.

    Raises:
        GatewayError: 415 if it is something else, 413 if it is too large, 400 naming the field
            that is wrong.
    """
    _expect(request, "application/json")
    data = await _read(request, most)
    if len(data) <= _SMALL_BYTES:
        return model.of_json(data)
    return await gateway_of(request).encoders.run(model.of_json, data)


async def form_body(
    request: Request, model: type[B], pictures: Mapping[str, int], nested: frozenset[str]
) -> tuple[B, Given]:
    """Return a form: its text fields as a model, and its pictures.

    Args:
        request: that holds it.
        model: what its text fields should be; ``a[b]`` are those of a mapping.
        pictures: the fields that hold pictures, and how many each may have.
        nested: the fields whose text is JSON.

    Raises:
        GatewayError: 415 if it is no form, 413 if it holds too much, 400 if it is malformed or
            naming the field that is wrong.
    """
    kind = _expect(request, "multipart/form-data", "application/x-www-form-urlencoded")
    most = _FIELD_BYTES if kind == "multipart/form-data" else _ENCODED_FIELD_BYTES
    form = await request.form(max_files=64, max_fields=256, max_part_size=most)
    items = form.multi_items()
    chars = sum(len(key) + (len(value) if isinstance(value, str) else 0) for key, value in items)
    if chars <= _SMALL_BYTES:
        return _checked_form(items, model, pictures, nested)
    run = gateway_of(request).encoders.run
    return await run(_checked_form, items, model, pictures, nested)


async def _read(request: Request, most: int) -> bytes:
    """Return the body, or refuse it as soon as it is known to be too large."""
    told = request.headers.get("content-length", "0")
    data = bytearray()
    if not told.isdecimal() or int(told) <= most:
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise GatewayError(
        413,
        f"The body has more than the {most} bytes that JSON may have here. "
        "Where a form is taken, upload large pictures in one.",
        code="message_too_large",
        headers={"Connection": "close"},
    )


def _checked_form(
    items: Sequence[tuple[str, UploadFile | str]],
    model: type[B],
    pictures: Mapping[str, int],
    nested: frozenset[str],
) -> tuple[B, Given]:
    values: dict[str, Any] = {}
    given: Given = {}
    for key, value in items:
        name, inner = _parts(key)
        if name in pictures:
            given.setdefault(name, []).append(value)
            if len(given[name]) > pictures[name]:
                raise GatewayError(
                    400, f"{name!r} is given more than {pictures[name]} times.", name
                )
        elif isinstance(value, UploadFile):
            raise GatewayError(
                400,
                f"{key!r} is a file. Files are: {', '.join(pictures)}.",
                key,
                "unknown_field" if name not in nested else "invalid_request",
            )
        elif inner:
            _put_inner(values, name, inner, value)
        elif name in values:
            raise GatewayError(400, f"{name!r} is given twice.", name)
        else:
            values[name] = _json_of(name, value) if name in nested else value
    return validated(model, values, text=True), given


def _parts(key: str) -> tuple[str, str]:
    """Split ``a[b]`` into a and b, as OpenAI's clients write mappings; ``a[]`` is just a."""
    if (match := _NESTED.fullmatch(key)) is None:
        return key, ""
    return match[1], match[2]


def _put_inner(values: dict[str, Any], name: str, inner: str, text: str) -> None:
    mapping = values.setdefault(name, {})
    if not isinstance(mapping, dict) or inner in mapping:
        raise GatewayError(400, f"{name!r} is given twice.", name)
    refuse_crowded(text, f"{name}.{inner}")
    try:
        mapping[inner] = json.loads(text)
    except (ValueError, RecursionError):
        mapping[inner] = text  # plain text needs no quotes here


def _json_of(name: str, text: str) -> Any:
    refuse_crowded(text, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GatewayError(
            400, f"{name!r} of a form must be JSON: {error}.", name, "invalid_json"
        ) from None


def _expect(request: Request, *kinds: str) -> str:
    """Return the kind of the body, one of these."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in kinds:
        raise GatewayError(
            415,
            f"The body's Content-Type is {given or 'missing'}. Expected: {' or '.join(kinds)}.",
            code="unsupported_media_type",
        )
    return given
