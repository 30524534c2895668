"""Says from the pixels whether a picture shows what its sentence says.

The judge looks at nothing but the picture: it takes the background from the border, the foreground
as what differs from it, and reads colour, place and shape of the foreground (of its two halves,
where the sentence names two objects). Colours are compared in CIELAB, where orange and yellow lie
apart much as they look.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from . import pictures
from .pictures import IMAGE_SIZE, Picture, Placement, Scene
from .styles import LOOKS, Style

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_BORDER: Final = 3
_GROUND_TOLERANCE: Final = 12.0
_FOREGROUND_SHARE: Final = 0.4
_MIN_PIXELS: Final = 20
_COLOUR_AGREEMENT: Final = 0.6
_PLACE_TOLERANCE: Final = 8.0
_PAIR_ELONGATION: Final = 2.75
_SIZE_TOLERANCE: Final = 1.2
_TEMPLATE_SCALES: Final = (0.84, 0.92, 1.0, 1.08, 1.16)
_TEMPLATE_SHIFTS: Final = (-0.5, 0.0, 0.5)


@dataclass(frozen=True)
class Verdict:
    """What the judge found; each part is True where the picture agrees with the sentence."""

    background: bool
    colours: bool
    places: bool
    shapes: bool
    sizes: bool

    @property
    def adherent(self) -> bool:
        """Background, colours and places are right (shapes and sizes are figures of their own)."""
        return self.background and self.colours and self.places


def judge(scene: Scene, picture: Picture, style: Style = "plain") -> Verdict:
    """Judges a picture.

    Args:
        scene: What the picture should show; `pictures.parse` reads it from a sentence.
        picture: uint8, shape (64, 64, 3).
        style: Whose palette, sizes and line work the picture is judged by.
    """
    scene = pictures.shown(scene, style)
    lab = to_lab(picture)
    ground = _ground(lab)
    name, distance = _nearest(ground, "background", style)
    away = np.linalg.norm(lab - ground, axis=-1)
    foreground = away > _FOREGROUND_SHARE * _closest_colour(name, style)
    regions = _regions(scene, foreground)
    seen = all(region.sum() >= _MIN_PIXELS for region in regions)
    expected = pictures.place(scene, style=style)
    return Verdict(
        background=name == scene.background and distance <= _GROUND_TOLERANCE,
        colours=seen and _colours_agree(scene, lab, away, regions, style),
        places=seen and _places_agree(scene, foreground, regions),
        shapes=seen and _shapes(expected, picture, regions, style) == _named_shapes(scene),
        sizes=seen and _sizes_agree(expected, regions, style),
    )


def hollow_share(scene: Scene, picture: Picture, style: Style = "plain") -> float:
    """Tells which share of the items has the background's colour at its middle.

    Args:
        scene: What the picture should show. Rings are hollow anyhow and are left out.
        picture: uint8, shape (64, 64, 3).
        style: Whose palette the picture is judged by.

    Returns:
        The share, 0 to 1; NaN where all items are rings. Missing items are not hollow.
    """
    scene = pictures.shown(scene, style)
    lab = to_lab(picture)
    ground = _ground(lab)
    name, _ = _nearest(ground, "background", style)
    near = _FOREGROUND_SHARE * _closest_colour(name, style)
    away = np.linalg.norm(lab - ground, axis=-1)
    found = []
    for item, region in zip(scene.items, _regions(scene, away > near), strict=True):
        if item.shape == "ring":
            continue
        hollow = False
        if region.sum() >= _MIN_PIXELS:
            x, y = (round(value) for value in _centroid(region))
            hollow = bool(np.median(away[y - 1 : y + 2, x - 1 : x + 2]) <= near)
        found.append(hollow)
    return float(np.mean(found)) if found else float("nan")


def to_lab(picture: Picture) -> Floats:
    """Converts sRGB (uint8, (..., 3)) to CIELAB under D65 (float64, the same shape)."""
    srgb = np.asarray(picture, dtype=np.float64) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = linear @ _RGB_TO_XYZ.T / _WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


_RGB_TO_XYZ: Final = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.072175],
        [0.0193339, 0.119192, 0.9503041],
    ]
)
_WHITE: Final = np.array([0.95047, 1.0, 1.08883])


@lru_cache
def _palette(kind: str, style: Style) -> tuple[tuple[str, ...], Floats]:
    ground = kind == "background"
    names = tuple(pictures.BACKGROUNDS if ground else pictures.COLOURS)
    colours = [pictures.palette_colour(name, style, ground=ground) for name in names]
    return names, to_lab(np.array(colours, dtype=np.uint8))


def _nearest(colour: Floats, kind: str, style: Style) -> tuple[str, float]:
    names, palette = _palette(kind, style)
    distances = np.linalg.norm(palette - colour, axis=-1)
    best = int(distances.argmin())
    return names[best], float(distances[best])


@lru_cache
def _closest_colour(background: str, style: Style) -> float:
    """Gives the distance from a background to the object colour that stands out least."""
    names, palette = _palette("object", style)
    grounds, ground_palette = _palette("background", style)
    ground = ground_palette[grounds.index(background)]
    distances = np.linalg.norm(palette - ground, axis=-1)
    return float(min(d for n, d in zip(names, distances, strict=True) if n != background))


def _ground(lab: Floats) -> Floats:
    inner = slice(_BORDER, -_BORDER)
    border = np.ones(lab.shape[:2], dtype=bool)
    border[inner, inner] = False
    return np.asarray(np.median(lab[border], axis=0))


def _regions(scene: Scene, foreground: Mask) -> list[Mask]:
    """Gives each item's foreground: all of it, or the half where the item belongs."""
    rows, columns = np.indices(foreground.shape)
    regions = []
    for x, y in pictures.centres(scene):
        region = foreground.copy()
        for position, centre in ((columns, x), (rows, y)):
            if centre < IMAGE_SIZE / 2:
                region &= position < IMAGE_SIZE / 2
            elif centre > IMAGE_SIZE / 2:
                region &= position >= IMAGE_SIZE / 2
        regions.append(region)
    return regions


def _core(away: Floats, region: Mask) -> Mask:
    # Pixels at an edge mix with the background (yellow with brown is orange): leave them out.
    return region & (away >= 0.75 * np.percentile(away[region], 95))


def _colours_agree(
    scene: Scene, lab: Floats, away: Floats, regions: list[Mask], style: Style
) -> bool:
    names, palette = _palette("object", style)
    for item, region in zip(scene.items, regions, strict=True):
        core = lab[_core(away, region)]
        nearest = np.linalg.norm(core[:, None] - palette, axis=-1).argmin(axis=-1)
        if (nearest == names.index(item.colour)).mean() < _COLOUR_AGREEMENT:
            return False
    return True


def _places_agree(scene: Scene, foreground: Mask, regions: list[Mask]) -> bool:
    rows, columns = np.nonzero(foreground)
    # One object is about as wide as high; two lie along the relation's axis.
    elongation = (columns.var() + 1e-6) / (rows.var() + 1e-6)
    if scene.relation in ("above", "below"):
        arranged = elongation < 1 / _PAIR_ELONGATION
    elif scene.relation:
        arranged = elongation > _PAIR_ELONGATION
    else:
        arranged = 1 / _PAIR_ELONGATION < elongation < _PAIR_ELONGATION
    return bool(arranged) and all(
        abs(found - expected) <= _PLACE_TOLERANCE
        for region, centre in zip(regions, pictures.centres(scene), strict=True)
        for found, expected in zip(_centroid(region), centre, strict=True)
    )


def _centroid(weights: Mask | Floats) -> tuple[float, float]:
    rows, columns = np.indices(weights.shape)
    total = weights.sum()
    return float((columns * weights).sum() / total), float((rows * weights).sum() / total)


def _named_shapes(scene: Scene) -> list[str]:
    return [item.shape for item in scene.items]


def _sizes_agree(expected: list[Placement], regions: list[Mask], style: Style) -> bool:
    ratios = [
        _spread(region) / _spread(pictures.coverage(placement, style).astype(np.float64))
        for placement, region in zip(expected, regions, strict=True)
    ]
    return all(1 / _SIZE_TOLERANCE <= ratio <= _SIZE_TOLERANCE for ratio in ratios)


def _spread(weights: Mask | Floats) -> float:
    """Gives the root of the mean squared distance from the centroid, in pixels."""
    rows, columns = np.indices(weights.shape)
    x, y = _centroid(weights)
    squares = (columns - x) ** 2 + (rows - y) ** 2
    return float(np.sqrt((squares * weights).sum() / weights.sum()))


def _shapes(
    expected: list[Placement], picture: Picture, regions: list[Mask], style: Style
) -> list[str]:
    """Names each region's shape by the template most alike; "" where nothing is covered."""
    return [
        _most_alike(_item_coverage(picture, region), placement.radius, style)
        for placement, region in zip(expected, regions, strict=True)
    ]


def _item_coverage(picture: Picture, region: Mask) -> Floats:
    """Estimates how much of each pixel an item covers, by where it lies from ground to item."""
    values = picture.astype(np.float64)
    ground = np.median(np.concatenate([values[:_BORDER], values[-_BORDER:]]), axis=(0, 1))
    away = np.linalg.norm(values - ground, axis=-1)
    item = np.median(values[_core(away, region)], axis=0)
    direction = item - ground
    covered = (values - ground) @ direction / max(1e-6, float(direction @ direction))
    rows, columns = np.nonzero(region)
    near = np.zeros(region.shape)
    near[max(0, rows.min() - 2) : rows.max() + 3, max(0, columns.min() - 2) : columns.max() + 3] = 1
    return np.asarray(np.clip(covered, 0, 1) * near)


def _most_alike(covered: Floats, radius: float, style: Style) -> str:
    if covered.sum() < _MIN_PIXELS / 2:
        return ""
    x, y = _centroid(covered)
    middle = IMAGE_SIZE // 2
    shift = (middle - round(y), middle - round(x))
    centred = np.roll(covered, shift, axis=(0, 1)).ravel()
    templates = _templates(radius, LOOKS[style].outlined)
    likeness = templates @ centred.astype(np.float32)
    return pictures.SHAPES[int(likeness.argmax()) * len(pictures.SHAPES) // len(likeness)]


@lru_cache
def _templates(radius: float, outlined: bool) -> NDArray[np.float32]:
    """Draws all shapes in several sizes, their centroids near the middle, as unit rows."""
    style: Style = "outline" if outlined else "plain"
    rows = []
    for shape in pictures.SHAPES:
        for scale in _TEMPLATE_SCALES:
            for dx in _TEMPLATE_SHIFTS:
                rows += [_template(shape, radius * scale, dx, dy, style) for dy in _TEMPLATE_SHIFTS]
    return np.stack([row / np.linalg.norm(row) for row in rows])


def _template(shape: str, radius: float, dx: float, dy: float, style: Style) -> NDArray[np.float32]:
    middle = IMAGE_SIZE / 2
    item = pictures.Item("white", shape)
    drawn = pictures.coverage(pictures.Placement(item, middle, middle, radius), style)
    x, y = _centroid(drawn.astype(np.float64))
    # Rows and columns count from pixel centres: +0.5 puts the centroid on the canvas's scale.
    placed = pictures.Placement(item, 2 * middle - x + dx, 2 * middle - y + dy, radius)
    return pictures.coverage(placed, style).ravel()
