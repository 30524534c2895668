"""Where input pictures come from: uploads, ``data:`` URLs, and URLs of allowed hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from starlette.datastructures import UploadFile

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.picture_inputs import Pixels, decode_picture
from omni_engine.engine.gateway.remote_pictures import fetch
from omni_engine.engine.gateway.state import Gateway

_FETCHES = asyncio.Semaphore(8)
"""Slow hosts hold up each other, and nobody else."""

Decoder = Callable[[bytes, str, int], Pixels]


async def picture_from(
    gateway: Gateway, source: UploadFile | str, param: str, decode: Decoder = decode_picture
) -> Pixels:
    """Return an input picture as an array.

    Args:
        gateway: whose settings and threads count.
        source: an uploaded file, or a URL.
        param: the HTTP field that it came in, for errors.
        decode: turns the file into an array.

    Raises:
        GatewayError: if it can't be had, or is no picture.
    """
    data = await _bytes_of(gateway, source, param)
    return await gateway.encoders.run(decode, data, param, gateway.limits.max_input_pixels)


async def _bytes_of(gateway: Gateway, source: UploadFile | str, param: str) -> bytes:
    if isinstance(source, UploadFile):
        return await source.read()
    if source.startswith("data:"):
        return await gateway.encoders.run(_decoded_url, source, param)
    if source.startswith(("http://", "https://")):
        async with _FETCHES:
            return await asyncio.to_thread(
                fetch, source, param, gateway.http.image_hosts, gateway.http.max_body_bytes
            )
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
