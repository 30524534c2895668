"""A worker's last seconds as a row of block characters: height for batch size, colour for adapters.

Pure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"
IDLE = "·"

_COLOURS = (
    "cyan", "magenta", "yellow", "green", "bright_blue", "bright_red",
    "bright_cyan", "bright_magenta", "bright_yellow", "bright_green",
)  # fmt: skip
BARE = "the bare model"


@dataclass(slots=True)
class _Column:
    """What ran in one slice of time: seconds and requests x seconds, by adapters."""

    seconds: dict[str, float] = field(default_factory=dict)
    weighted: dict[str, float] = field(default_factory=dict)

    def add(self, label: str, requests: int, seconds: float) -> None:
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds
        self.weighted[label] = self.weighted.get(label, 0.0) + requests * seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of a strip.

    Attributes:
        character: a block, or ``IDLE``.
        label: the adapters that ran longest then; None where nothing ran.
    """

    character: str
    label: str | None


@dataclass(frozen=True, slots=True)
class Strip:
    """A worker's last seconds.

    Attributes:
        cells: the oldest first.
        busy: the share of the time in which something ran, 0 to 1.
        mean_requests: how many requests shared a batch or tick, on average over the time it took;
            None if nothing ran.
    """

    cells: tuple[Cell, ...]
    busy: float
    mean_requests: float | None


def adapters_label(adapters: Iterable[Mapping[str, Any]]) -> str:
    """Return the adapters of a box for people: their names, whatever their scales."""
    names = dict.fromkeys(str(adapter["name"]) for adapter in adapters)
    return "+".join(sorted(names)) or BARE


def colour_of(label: str) -> str:
    """Return the colour of adapters: the same in every run."""
    return "default" if label == BARE else _COLOURS[zlib.crc32(label.encode()) % len(_COLOURS)]


def block(requests: float, most: int) -> str:
    """Return the block for a batch of so many requests, where ``most`` fill it."""
    level = math.ceil(len(BLOCKS) * requests / max(1, most))
    return BLOCKS[min(max(level, 1), len(BLOCKS)) - 1]


def draw(
    boxes: Iterable[Mapping[str, Any]], now_s: float, span_s: float, width: int, most: int
) -> Strip:
    """Return a strip of the time from ``now_s - span_s`` on.

    Slices of time begin at multiples of their length, so that what is drawn moves as a whole.

    Args:
        boxes: of one worker, as the engine's timeline has them; they don't overlap.
        now_s: the engine's clock.
        span_s: how long the strip is, in seconds.
        width: how long it is, in characters.
        most: requests that fill a batch.
    """
    slice_s = span_s / width
    end = math.ceil(now_s / slice_s)
    columns = [_Column() for _ in range(width)]
    busy_s = weighted_s = 0.0
    for box in boxes:
        end_s = now_s if box["end_s"] is None else box["end_s"]
        start_s = max(box["start_s"], now_s - span_s)
        if end_s <= start_s:
            continue
        busy_s += end_s - start_s
        weighted_s += (end_s - start_s) * box["requests"]
        label = adapters_label(box["adapters"])
        for place in range(math.floor(start_s / slice_s), math.ceil(end_s / slice_s)):
            index = place - end + width
            covered_s = min(end_s, (place + 1) * slice_s) - max(start_s, place * slice_s)
            if 0 <= index < width and covered_s > 0:
                columns[index].add(label, box["requests"], covered_s)
    cells = tuple(_cell(column, most) for column in columns)
    mean = weighted_s / busy_s if busy_s else None
    return Strip(cells, min(1.0, busy_s / span_s), mean)


def _cell(column: _Column, most: int) -> Cell:
    if not column.seconds:
        return Cell(IDLE, None)
    label = max(column.seconds, key=lambda name: column.seconds[name])
    return Cell(block(column.weighted[label] / column.seconds[label], most), label)
