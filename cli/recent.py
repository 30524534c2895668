"""What an engine told of the last seconds: boxes of its timeline, and how fast its figures grow.

Pure: what the engine answers is passed in, and so is the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_RATE_SPAN_S = 5.0
"""Rates are means over this time."""


@dataclass(slots=True)
class ErrorSeen:
    """How often a code came, and when last.

    Attributes:
        code: the error's.
        where: the model whose requests failed; None for what was refused.
        count: since the engine's start.
        at_s: when the count was first seen as it is: seconds, monotonic; None: before the first
            look.
    """

    code: str
    where: str | None
    count: int
    at_s: float | None


class Recent:
    """Keeps the boxes and figures of the last seconds.

    Args:
        span_s: how long boxes are kept.

    Attributes:
        metrics: the latest, as ``OmniClient.metrics`` returns them; empty before the first.
        now_s: the engine's clock when it told of its timeline last.
        next: what to ask the engine for next; None before the first answer.
        running: the boxes that run.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self.metrics: Mapping[str, Any] = {}
        self.now_s = 0.0
        self.next: int | None = None
        self.running: list[Mapping[str, Any]] = []
        self._boxes: deque[Mapping[str, Any]] = deque()
        self._samples: deque[tuple[float, int, int]] = deque()
        self._errors: dict[tuple[str | None, str], ErrorSeen] = {}

    def note_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Take note of an answer to ``timeline(self.next)``."""
        self.now_s, self.running = timeline["now_s"], timeline["running"]
        if self.next is not None and timeline["next"] < self.next:
            self._boxes.clear()  # another engine has another clock
        self.next = timeline["next"]
        self._boxes.extend(timeline["boxes"])
        while self._boxes and self._boxes[0]["end_s"] < self.now_s - self._span_s:
            self._boxes.popleft()

    def note_metrics(self, metrics: Mapping[str, Any], at_s: float) -> None:
        """Take note of the engine's figures.

        Args:
            metrics: as ``OmniClient.metrics`` returns them.
            at_s: seconds, monotonic.
        """
        first = not self.metrics
        self.metrics = metrics
        ended = outputs = 0
        for stage in metrics["stages"]:
            counts = stage["requests"]
            ended += counts["completed"] + counts["failed"] + counts["aborted"]
            outputs += stage["outputs"]
            for code, count in stage["errors"].items():
                self._note_error(stage["name"], code, count, None if first else at_s)
        for code, count in metrics["refused"].items():
            self._note_error(None, code, count, None if first else at_s)
        self._samples.append((at_s, ended, outputs))
        while len(self._samples) > 2 and self._samples[1][0] <= at_s - _RATE_SPAN_S:
            self._samples.popleft()

    def boxes_of(self, worker_id: str) -> Iterator[Mapping[str, Any]]:
        """Yield the boxes of a worker, those that run last."""
        for boxes in (self._boxes, self.running):
            yield from (box for box in boxes if box["worker_id"] == worker_id)

    @property
    def rates(self) -> tuple[float, float]:
        """Requests that ended and outputs that were made, per second; 0 before a second look."""
        then_s, ended_then, made_then = self._samples[0]
        now_s, ended, made = self._samples[-1]
        took_s = now_s - then_s
        if took_s <= 0:
            return 0.0, 0.0
        return max(0, ended - ended_then) / took_s, max(0, made - made_then) / took_s

    @property
    def errors(self) -> list[ErrorSeen]:
        """What went wrong, the most recent first."""
        return sorted(self._errors.values(), key=lambda seen: -(seen.at_s or 0.0))

    def _note_error(self, where: str | None, code: str, count: int, at_s: float | None) -> None:
        seen = self._errors.get((where, code))
        if seen is None or seen.count != count:
            self._errors[where, code] = ErrorSeen(code, where, count, at_s)
