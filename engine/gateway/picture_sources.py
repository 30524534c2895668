"""Where input pictures come from: uploads, ``data:`` URLs, and URLs of allowed hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from starlette.datastructures import UploadFile

from omni_engine.engine.gateway.byte_budget import Lease
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.picture_inputs import (
    Pixels,
    decode_mask,
    decode_picture,
    decoded_bytes,
)
from omni_engine.engine.gateway.remote_pictures import fetch
from omni_engine.engine.gateway.state import Gateway

_FETCHES = asyncio.Semaphore(8)
"""Slow hosts hold up each other, and nobody else."""

_MASK = "mask"

Source = UploadFile | str
"""An uploaded file, or a URL."""


async def pictures_from(
    gateway: Gateway, given: Sequence[tuple[str, Source]], lease: Lease
) -> list[Pixels]:
    """Return input pictures as arrays.

    All are measured before one is decoded: small files may hold large pictures.

    Args:
        gateway: whose settings and threads count.
        given: what each is made from, by the HTTP field that it came in; ``mask`` becomes a mask.
        lease: takes the room for the arrays, which it may have to wait for.

    Raises:
        GatewayError: if one can't be had, is no picture, or all are too large together.
    """
    run, most_pixels = gateway.encoders.run, gateway.limits.max_input_pixels
    files: list[tuple[str, bytes]] = []
    left = gateway.http.max_body_bytes
    for param, source in given:
        data = await _bytes_of(gateway, source, param, left)
        left = max(0, left - len(data))
        files.append((param, data))
    size, most = 0, gateway.limits.max_message_bytes
    for param, data in files:
        size += await run(decoded_bytes, data, param, most_pixels, is_mask=param == _MASK)
        if size > most:
            raise _too_much(param, most)
    await lease.take(size)
    return [
        await run(decode_mask if param == _MASK else decode_picture, data, param, most_pixels)
        for param, data in files
    ]


async def _bytes_of(gateway: Gateway, source: Source, param: str, most: int) -> bytes:
    if isinstance(source, UploadFile):
        return await source.read()
    scheme = source.partition(":")[0].lower()
    if scheme == "data":
        return await gateway.encoders.run(_decoded_url, source, param)
    if scheme in ("http", "https"):
        async with _FETCHES:
            return await fetch(source, param, gateway.http.image_hosts, most)
    raise GatewayError(
        400,
        f"{param!r} is text, but no URL. Expected: an uploaded file, a data: URL, or a URL of an "
        "allowed host.",
        param,
        "invalid_image",
    )


def _decoded_url(url: str, param: str) -> bytes:
    header, comma, body = url.partition(",")
    try:
        if not comma:
            raise ValueError
        data = unquote_to_bytes(body)
        return base64.b64decode(data, validate=True) if header.endswith(";base64") else data
    except (ValueError, binascii.Error):
        raise GatewayError(
            400,
            f"The data: URL in {param!r} is malformed. "
            "Expected: data:image/png;base64, and the file in base64.",
            param,
            "invalid_image",
        ) from None


def _too_much(field: str, most: int) -> GatewayError:
    return GatewayError(
        413,
        f"The pictures have more than {most} bytes in all once they are decoded "
        "(limits.max_message_bytes). Send fewer or smaller ones.",
        field,
        "message_too_large",
    )
