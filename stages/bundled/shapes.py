"""The shapes of the picture world as closed contours."""

from __future__ import annotations

import math
from typing import Final

SHAPES: Final = ("circle", "square", "triangle", "star", "diamond", "ring", "cross", "heart")


def contours(shape: str) -> list[list[tuple[float, float]]]:
    """Gives a shape's closed contours in the unit circle, y down; a second one is a hole."""
    match shape:
        case "circle":
            return [_regular(48, 1.0)]
        case "square":
            return [[(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)]]
        case "triangle":
            return [[(0.0, -1.0), (0.95, 0.72), (-0.95, 0.72)]]
        case "star":
            points = zip(_regular(5, 1.0), _regular(5, 0.42, math.pi / 5), strict=True)
            return [[point for pair in points for point in pair]]
        case "diamond":
            return [[(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)]]
        case "ring":
            return [_regular(48, 1.0), _regular(48, 0.55)]
        case "cross":
            return [_cross(0.34)]
        case "heart":
            return [[_heart(2 * math.pi * step / 48) for step in range(48)]]
    raise ValueError(f"unknown shape: {shape!r}")


def _regular(corners: int, radius: float, turn: float = 0.0) -> list[tuple[float, float]]:
    angles = (turn + 2 * math.pi * corner / corners for corner in range(corners))
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


def _cross(arm: float) -> list[tuple[float, float]]:
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
    points = list(quarter)
    for _ in range(3):
        quarter = [(-y, x) for x, y in quarter]
        points += quarter
    return points


def _heart(angle: float) -> tuple[float, float]:
    x = 16 * math.sin(angle) ** 3
    y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle)
    y -= math.cos(4 * angle)
    return x / 17, -(y + 2.5) / 17
