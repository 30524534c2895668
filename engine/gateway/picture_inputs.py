"""Uploaded pictures become arrays: checked before they are decoded, upright, in 8 bits."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from omni_engine.engine.gateway.errors import GatewayError

FORMATS = ("PNG", "JPEG", "WEBP")

_MOST_SCANS = 100
"""Of a progressive JPEG: cameras and encoders make a dozen. Each scan passes over every pixel,
and may take only a few bytes of the file: a small one could occupy a processor for hours."""
_JPEG_BEGINS, _SCAN_BEGINS = b"\xff\xd8", b"\xff\xda"

Pixels = npt.NDArray[np.uint8]


def decode_picture(data: bytes, param: str, most_pixels: int) -> Pixels:
    """Decode a picture.

    Args:
        data: a PNG, JPEG or WebP file.
        param: the HTTP field that it came in, for errors.
        most_pixels: width x height that it may have; larger ones are not even decoded.

    Returns:
        Shape (height, width, 3), or (height, width, 4) if anything in it is transparent.

    Raises:
        GatewayError: if it is no such picture, or too large.
    """
    picture = _opened(data, param, most_pixels)
    if not picture.has_transparency_data:
        return np.asarray(picture.convert("RGB"))
    pixels = np.asarray(picture.convert("RGBA"))
    return pixels if bool((pixels[..., 3] < 255).any()) else np.ascontiguousarray(pixels[..., :3])


def decode_mask(data: bytes, param: str, most_pixels: int) -> Pixels:
    """Decode a mask: transparent, or white where there is no transparency, is what changes.

    Args:
        data: a PNG, JPEG or WebP file.
        param: the HTTP field that it came in, for errors.
        most_pixels: width x height that it may have.

    Returns:
        Shape (height, width); 255 is what changes, 0 is what stays.

    Raises:
        GatewayError: if it is no such picture, or too large.
    """
    picture = _opened(data, param, most_pixels)
    if picture.has_transparency_data:
        return mask_of(np.asarray(picture.convert("RGBA")))
    return np.asarray(picture.convert("L"))


def decoded_bytes(data: bytes, param: str, most_pixels: int, *, is_mask: bool = False) -> int:
    """Return how many bytes a picture's array has at most, from the file's header alone.

    Args:
        data: a PNG, JPEG or WebP file.
        param: the HTTP field that it came in, for errors.
        most_pixels: width x height that it may have.
        is_mask: whether it becomes a mask.

    Raises:
        GatewayError: if it is no such picture, or too large.
    """
    picture = _opened(data, param, most_pixels, decode=False)
    channels = 1 if is_mask else 4 if picture.has_transparency_data else 3
    return picture.width * picture.height * channels


def mask_of(pixels: Pixels) -> Pixels:
    """Return the mask in a picture's transparency: 255 where shape (height, width, 4) has none."""
    return np.ascontiguousarray(255 - pixels[..., 3])


def _opened(data: bytes, param: str, most_pixels: int, *, decode: bool = True) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # checked here
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > most_pixels:
            raise _too_large(f"{width}x{height}", param, most_pixels)
        if data.startswith(_JPEG_BEGINS) and data.count(_SCAN_BEGINS) > _MOST_SCANS:
            raise _too_many_scans(param)
        if not decode:
            return picture
        return _in_eight_bits(ImageOps.exif_transpose(picture))
    except GatewayError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large("larger than any that is decoded", param, most_pixels) from error
    except Exception as error:  # boundary: decoders of foreign files raise whatever they like
        raise GatewayError(
            400,
            f"The file in {param!r} can't be read as a picture. "
            f"Expected: a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file.",
            param,
            "invalid_image",
        ) from error


def _in_eight_bits(picture: Image.Image) -> Image.Image:
    """Decode; 16 bits of grey lose their lower half, where PIL would cut off bright values."""
    if picture.mode.startswith("I"):
        values: npt.NDArray[Any] = np.asarray(picture)
        return Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
    picture.load()
    return picture


def _too_large(size: str, param: str, most_pixels: int) -> GatewayError:
    return GatewayError(
        400,
        f"The picture in {param!r} is too large: {size}. "
        f"Expected: at most {most_pixels} pixels (limits.max_input_pixels).",
        param,
        "limit_exceeded",
    )


def _too_many_scans(param: str) -> GatewayError:
    return GatewayError(
        400,
        f"The JPEG in {param!r} has too many scans. Expected: at most {_MOST_SCANS}.",
        param,
        "limit_exceeded",
    )
