"""Pictures become files: PNG, JPEG or WebP."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

FormatName = Literal["png", "jpeg", "webp"]

MEDIA_TYPES: dict[str, str] = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
TRANSPARENT_FORMATS = ("png", "webp")
_PNG_LEVEL = 4
"""Of zlib: nearly as small as its default, in half the time."""
_FULL_COLOUR_FROM = 90
"""Quality from which JPEG keeps the colour of every pixel."""


@dataclass(frozen=True)
class PictureFormat:
    """How a picture is written.

    Attributes:
        name: the kind of file.
        quality: 0 to 100, of JPEG and WebP; PNG loses nothing.
        transparent: whether transparency is kept; else it becomes white.
    """

    name: FormatName = "png"
    quality: int = 100
    transparent: bool = True

    @property
    def media_type(self) -> str:
        """The content type."""
        return MEDIA_TYPES[self.name]


def encode_picture(pixels: npt.NDArray[np.uint8], how: PictureFormat) -> bytes:
    """Return a picture as a file; no metadata is in it.

    Args:
        pixels: shape (height, width, 3 or 4).
        how: the kind of file.
    """
    picture = Image.fromarray(pixels)
    if picture.mode == "RGBA" and not (how.transparent and how.name in TRANSPARENT_FORMATS):
        picture = _on_white(picture)
    file = io.BytesIO()
    if how.name == "png":
        picture.save(file, "PNG", compress_level=_PNG_LEVEL)
    elif how.name == "webp":
        picture.save(file, "WEBP", quality=how.quality)
    else:
        quality = max(1, how.quality)
        subsampling = 0 if quality >= _FULL_COLOUR_FROM else 2
        picture.save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def _on_white(picture: Image.Image) -> Image.Image:
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")
