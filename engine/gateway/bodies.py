"""Reads bodies: JSON and forms, never on the event loop where they may be large."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import UploadFile

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import gateway_of
from omni_engine.engine.gateway.validation import Body, validated

B = TypeVar("B", bound=Body)

_FIELD_BYTES = 4 << 20
"""Of one text field of a form; pictures as data: URLs are such fields."""
_SMALL_BYTES = 64 << 10
"""Of a body that is read in less time than handing it to a thread takes."""
_NESTED = re.compile(r"(\w+)\[(\w*)\]")


async def json_body(request: Request, model: type[B]) -> B:
    """Return a body of JSON.

    Raises:
        GatewayError: 415 if it is something else, 400 naming the field that is wrong.
    """
    _expect(request, "application/json")
    data = await request.body()
    if len(data) <= _SMALL_BYTES:
        return model.of_json(data)
    return await gateway_of(request).encoders.run(model.of_json, data)


@dataclass(frozen=True)
class Form:
    """A form.

    Attributes:
        values: its text fields by name; ``a[b]`` are those of a mapping.
        pictures: what pictures were given by field, each a file or a URL.
    """

    values: dict[str, Any]
    pictures: dict[str, list[UploadFile | str]]


async def form_body(request: Request, pictures: Mapping[str, int], nested: frozenset[str]) -> Form:
    """Return a form as it was sent.

    Args:
        request: that holds it.
        pictures: the fields that hold pictures, and how many each may have.
        nested: the fields whose text is JSON.

    Raises:
        GatewayError: 415 if it is no form, 400 if it is malformed.
    """
    _expect(request, "multipart/form-data", "application/x-www-form-urlencoded")
    found = Form({}, {})
    form = await request.form(max_files=64, max_fields=256, max_part_size=_FIELD_BYTES)
    for key, value in form.multi_items():
        name, inner = _parts(key)
        if name in pictures:
            given = found.pictures.setdefault(name, [])
            given.append(value)
            if len(given) > pictures[name]:
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
            _put_inner(found.values, name, inner, value)
        elif name in found.values:
            raise GatewayError(400, f"{name!r} is given twice.", name)
        else:
            found.values[name] = _json_of(name, value) if name in nested else value
    return found


def checked_form(form: Form, model: type[B]) -> B:
    """Return a form's text fields as a model.

    Raises:
        GatewayError: naming the field that is wrong.
    """
    return validated(model, form.values, text=True)


def _parts(key: str) -> tuple[str, str]:
    """Split ``a[b]`` into a and b, as OpenAI's clients write mappings; ``a[]`` is just a."""
    if (match := _NESTED.fullmatch(key)) is None:
        return key, ""
    return match[1], match[2]


def _put_inner(values: dict[str, Any], name: str, inner: str, text: str) -> None:
    mapping = values.setdefault(name, {})
    if not isinstance(mapping, dict) or inner in mapping:
        raise GatewayError(400, f"{name!r} is given twice.", name)
    try:
        mapping[inner] = json.loads(text)
    except (ValueError, RecursionError):
        mapping[inner] = text  # plain text needs no quotes here


def _json_of(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GatewayError(
            400, f"{name!r} of a form must be JSON: {error}.", name, "invalid_json"
        ) from None


def _expect(request: Request, *kinds: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in kinds:
        raise GatewayError(
            415,
            f"The body's Content-Type is {given or 'missing'}. Expected: {' or '.join(kinds)}.",
            code="unsupported_media_type",
        )
