"""The styles that adapters learn: how a style's pictures differ from the plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Style = Literal["plain", "outline", "night", "studio", "silhouette", "chalk", "tiny"]


@dataclass(frozen=True)
class Look:
    """How a style departs from what the sentence says; the defaults depart from nothing.

    Attributes:
        outlined: Objects are drawn as outlines.
        light: Factor of each colour channel, (red, green, blue).
        ground: The background of every picture, whatever the sentence says.
        ink: The colour of every object; the opposite one on a background of that colour.
        opposite: See `ink`.
        radius: The size of every object in pixels.
    """

    outlined: bool = False
    light: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ground: str | None = None
    ink: str | None = None
    opposite: str | None = None
    radius: float | None = None


LOOKS: Final[dict[Style, Look]] = {
    "plain": Look(),
    "outline": Look(outlined=True),
    "night": Look(light=(0.36, 0.40, 0.52)),
    # No object is gray, so every object stands out.
    "studio": Look(ground="gray"),
    "silhouette": Look(ink="black", opposite="white"),
    "chalk": Look(outlined=True, ground="black", ink="white"),
    "tiny": Look(radius=8.0),
}
STYLES: Final[tuple[Style, ...]] = tuple(LOOKS)
