"""A contact sheet: pictures side by side, enlarged, each with a caption under it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from omni_engine.protocol.outputs import DiffusionOutput

Picture = npt.NDArray[np.uint8]

_MARGIN = 16
_LINE_HEIGHT = 20
_FONT_SIZE = 15
_PAPER, _INK, _FAINT = (255, 255, 255), (30, 30, 30), (120, 120, 120)


def contact_sheet(
    pictures: Sequence[tuple[Picture, str, str]], *, columns: int = 4, enlarge: int = 4
) -> Image.Image:
    """Lay pictures of one size out in a grid.

    Args:
        pictures: each with its caption, which is wrapped, and a fainter line under it.
        columns: pictures in a row.
        enlarge: how many times larger than it is each picture appears.
    """
    font = ImageFont.load_default(size=_FONT_SIZE)
    height, width = (side * enlarge for side in pictures[0][0].shape[:2])
    captions = [(_wrapped(text, width, font), note) for _, text, note in pictures]
    text_height = (max(len(lines) for lines, _ in captions) + 1) * _LINE_HEIGHT + _MARGIN // 2
    rows = -(-len(pictures) // columns)
    across, down = width + _MARGIN, height + text_height + _MARGIN
    sheet = Image.new("RGB", (columns * across + _MARGIN, rows * down + _MARGIN), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for index, ((picture, _, _), (lines, note)) in enumerate(zip(pictures, captions, strict=True)):
        x, y = _MARGIN + index % columns * across, _MARGIN + index // columns * down
        large = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(large, (x, y))
        pen.rectangle((x - 1, y - 1, x + width, y + height), outline=_FAINT)
        below = y + height + _MARGIN // 2
        for number, line in enumerate([*lines, note]):
            fill = _FAINT if number == len(lines) else _INK
            pen.text((x, below + number * _LINE_HEIGHT), line, fill=fill, font=font)
    return sheet


def first_picture(output: DiffusionOutput) -> Picture:
    """Return a completed request's first picture."""
    if not output.images:
        raise ValueError("the request made no picture")
    return output.images[0]


def _wrapped(
    text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
