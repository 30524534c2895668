"""The picture world of the bundled model: sentences, and the pictures they describe.

A sentence names one object ("a small red circle on a white background") or two with a relation
("a red circle left of a blue star on a pink background"). Pictures are drawn with Pillow at four
times the size and reduced, so edges are smooth. Sentences divide into training and held-out ones
by a stable hash, so a held-out sentence is never trained on, whatever the seed.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from .shapes import SHAPES as SHAPES
from .shapes import contours
from .styles import LOOKS
from .styles import STYLES as STYLES
from .styles import Style as Style

Rgb: TypeAlias = tuple[int, int, int]
Picture: TypeAlias = NDArray[np.uint8]

COLOURS: Final[dict[str, Rgb]] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "purple": (140, 60, 180),
    "orange": (245, 145, 30),
    "white": (250, 250, 250),
    "black": (25, 25, 25),
}
BACKGROUNDS: Final[dict[str, Rgb]] = {
    "white": (250, 250, 250),
    "black": (25, 25, 25),
    "gray": (128, 128, 128),
    "pink": (250, 190, 200),
    "cyan": (120, 220, 230),
    "brown": (120, 80, 50),
}
SIZES: Final = ("small", "", "large")
RELATIONS: Final = ("left of", "right of", "above", "below")

IMAGE_SIZE: Final = 64
RADII: Final[dict[str, float]] = {"small": 10.5, "": 17.0, "large": 25.0}
PAIR_RADIUS: Final = 12.0
OUTLINE_WIDTH: Final = 2.4

_OVERSAMPLING: Final = 4
_HELD_OUT_SHARE: Final = 16
_ONE_OBJECT_SHARE: Final = 0.4
_OBJECT_PATTERN: Final = rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_BACKGROUND_PATTERN: Final = rf" on an? ({'|'.join(BACKGROUNDS)}) background"
_ONE_OBJECT: Final = re.compile(
    rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}){_BACKGROUND_PATTERN}"
)
_TWO_OBJECTS: Final = re.compile(
    rf"{_OBJECT_PATTERN} ({'|'.join(RELATIONS)}) {_OBJECT_PATTERN}{_BACKGROUND_PATTERN}"
)


@dataclass(frozen=True)
class Item:
    """A coloured shape."""

    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """What a sentence says: one item with a size, or two items with a relation."""

    background: str
    items: tuple[Item, ...]
    size: str = ""
    relation: str = ""


@dataclass(frozen=True)
class Placement:
    """Where an item is drawn; centre and radius in pixels."""

    item: Item
    x: float
    y: float
    radius: float


def caption(scene: Scene) -> str:
    """Writes the scene's sentence."""
    words = [_with_article(f"{scene.size} {scene.items[0].colour}".strip()), scene.items[0].shape]
    if scene.relation:
        other = scene.items[1]
        words += [scene.relation, _with_article(other.colour), other.shape]
    return " ".join([*words, "on", _with_article(scene.background), "background"])


def parse(sentence: str) -> Scene:
    """Reads a sentence of the grammar ("a orange" counts as "an orange").

    Raises:
        ValueError: The sentence is not of the grammar.
    """
    if match := _ONE_OBJECT.fullmatch(sentence):
        size, colour, shape, background = match.groups()
        return Scene(background, (Item(colour, shape),), size=size or "")
    if match := _TWO_OBJECTS.fullmatch(sentence):
        colour, shape, relation, other_colour, other_shape, background = match.groups()
        items = (Item(colour, shape), Item(other_colour, other_shape))
        return Scene(background, items, relation=relation)
    raise ValueError(f"not a sentence about coloured shapes: {sentence!r}")


def is_held_out(scene: Scene) -> bool:
    """Tells whether the scene's sentence is kept out of training (one sentence in 16 is)."""
    digest = hashlib.sha256(caption(scene).encode()).digest()
    return digest[0] % _HELD_OUT_SHARE == 0


def sample_scene(rng: random.Random) -> Scene:
    """Draws a scene: one object in 40 % of the cases, else two that differ."""
    background = rng.choice(tuple(BACKGROUNDS))
    colours = [colour for colour in COLOURS if colour != background]
    first = Item(rng.choice(colours), rng.choice(SHAPES))
    if rng.random() < _ONE_OBJECT_SHARE:
        return Scene(background, (first,), size=rng.choice(SIZES))
    second = first
    while second == first:
        second = Item(rng.choice(colours), rng.choice(SHAPES))
    return Scene(background, (first, second), relation=rng.choice(RELATIONS))


def sample_scenes(count: int, seed: int, *, held_out: bool) -> list[Scene]:
    """Draws scenes from one side of the split; held-out scenes come without repetition."""
    rng = random.Random(seed)
    scenes: list[Scene] = []
    seen: set[Scene] = set()
    while len(scenes) < count:
        scene = sample_scene(rng)
        if is_held_out(scene) != held_out or (held_out and scene in seen):
            continue
        seen.add(scene)
        scenes.append(scene)
    return scenes


def shown(scene: Scene, style: Style) -> Scene:
    """Gives the scene that a style's picture shows for a sentence: its own ground and ink."""
    look = LOOKS[style]
    background = look.ground or scene.background
    ink = look.opposite if look.ink == background else look.ink
    items = tuple(replace(item, colour=ink or item.colour) for item in scene.items)
    return replace(scene, background=background, items=items)


def place(
    scene: Scene, rng: random.Random | None = None, style: Style = "plain"
) -> list[Placement]:
    """Lays the scene's items out on the canvas.

    Args:
        scene: What to lay out.
        rng: Jitters place (±2 pixels) and size (±8 %); None gives the exact layout.
        style: Decides the size, where the style has one.
    """
    radius = LOOKS[style].radius or (PAIR_RADIUS if scene.relation else RADII[scene.size])
    placements = []
    for item, (x, y) in zip(scene.items, centres(scene), strict=True):
        dx, dy, scale = 0.0, 0.0, 1.0
        if rng is not None:
            dx, dy, scale = rng.uniform(-2, 2), rng.uniform(-2, 2), rng.uniform(0.92, 1.08)
        placements.append(Placement(item, x + dx, y + dy, radius * scale))
    return placements


def centres(scene: Scene) -> tuple[tuple[float, float], ...]:
    """Gives the (x, y) pixel centre of each item, in the order of the sentence."""
    low, middle, high = IMAGE_SIZE / 4, IMAGE_SIZE / 2, IMAGE_SIZE * 3 / 4
    return {
        "": ((middle, middle),),
        "left of": ((low, middle), (high, middle)),
        "right of": ((high, middle), (low, middle)),
        "above": ((middle, low), (middle, high)),
        "below": ((middle, high), (middle, low)),
    }[scene.relation]


def draw(scene: Scene, rng: random.Random | None = None, style: Style = "plain") -> Picture:
    """Draws the scene.

    Args:
        scene: What to draw.
        rng: Jitters place and size; None draws the exact layout.
        style: How to draw it.

    Returns:
        The picture, uint8, shape (64, 64, 3).
    """
    side = IMAGE_SIZE * _OVERSAMPLING
    scene = shown(scene, style)
    ground = palette_colour(scene.background, style, ground=True)
    canvas = Image.new("RGB", (side, side), ground)
    pen = ImageDraw.Draw(canvas)
    for placement in place(scene, rng, style):
        fill = palette_colour(placement.item.colour, style)
        _draw_item(pen, placement, fill, ground, style)
    small = canvas.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.uint8)


def coverage(placement: Placement, style: Style = "plain") -> NDArray[np.float32]:
    """Draws one item alone, white on black.

    Returns:
        How much of each pixel the item covers: float32, shape (64, 64), range 0 to 1.
    """
    side = IMAGE_SIZE * _OVERSAMPLING
    canvas = Image.new("RGB", (side, side))
    _draw_item(ImageDraw.Draw(canvas), placement, (255, 255, 255), (0, 0, 0), style)
    small = canvas.getchannel(0).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.float32) / np.float32(255)


def palette_colour(name: str, style: Style = "plain", *, ground: bool = False) -> Rgb:
    """Gives the RGB value (0 to 255) a style uses for an object's or a background's colour."""
    red, green, blue = (BACKGROUNDS if ground else COLOURS)[name]
    r_light, g_light, b_light = LOOKS[style].light
    return round(red * r_light), round(green * g_light), round(blue * b_light)


def _with_article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _on_canvas(
    placement: Placement, contour: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    return [
        (
            (placement.x + x * placement.radius) * _OVERSAMPLING,
            (placement.y + y * placement.radius) * _OVERSAMPLING,
        )
        for x, y in contour
    ]


def _draw_item(
    pen: ImageDraw.ImageDraw, placement: Placement, fill: Rgb, ground: Rgb, style: Style
) -> None:
    lines = [_on_canvas(placement, contour) for contour in contours(placement.item.shape)]
    if LOOKS[style].outlined:
        width = round(OUTLINE_WIDTH * _OVERSAMPLING)
        for points in lines:
            pen.line([*points, *points[:2]], fill=fill, width=width, joint="curve")
        return
    for points, colour in zip(lines, (fill, ground), strict=False):
        pen.polygon(points, fill=colour)
