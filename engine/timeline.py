"""What workers ran when: the latest batches and ticks, each a box, numbered as they ended.

Pure: the time is passed in. A box costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omni_engine.protocol.adapters import AdapterActivation

MAX_BOXES = 16_384
"""Boxes that are kept; the oldest make room."""

MAX_KEPT_IDS = 16 * MAX_BOXES
"""Request ids that all boxes name together; fewer boxes are kept if each names more than 16."""

MAX_BOXES_PER_REPLY = 2048
_MAX_IDS_PER_REPLY = 8 * MAX_BOXES_PER_REPLY
"""What one answer holds at most takes the engine's loop some milliseconds."""

MAX_IDS_PER_BOX = 64
MAX_ADAPTERS_PER_BOX = 8

NamedScales = tuple[tuple[str, float], ...]
"""Adapters as users named them, each with its scale."""


@dataclass(slots=True)
class Box:
    """A batch or a tick on a worker.

    Attributes:
        stage: the model name that clients use.
        worker_id: where it ran.
        kind: a whole batch, or a tick.
        start_s: seconds, monotonic.
        end_s: likewise; None while it runs.
        requests: how many shared it.
        request_ids: of the first of them.
        adapters: that they ran under, each once.
    """

    stage: str
    worker_id: str
    kind: Literal["batch", "tick"]
    start_s: float
    end_s: float | None
    requests: int
    request_ids: tuple[str, ...]
    adapters: NamedScales

    def describe(self, seq: int | None) -> dict[str, Any]:
        """Return the box for clients, with its number; None while it runs."""
        return {
            "seq": seq,
            "stage": self.stage,
            "worker_id": self.worker_id,
            "kind": self.kind,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "requests": self.requests,
            "request_ids": list(self.request_ids),
            "adapters": [{"name": name, "scale": scale} for name, scale in self.adapters],
        }


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer to "what happened since?".

    Attributes:
        boxes: with their numbers, which follow each other.
        next: what to ask for next.
        missed: boxes that were asked for and are not kept any more.
    """

    boxes: list[tuple[int, Box]]
    next: int
    missed: int


class BoxRing:
    """The latest boxes by number.

    Args:
        max_boxes: how many are kept.
        max_ids: request ids that they name together.
    """

    def __init__(self, max_boxes: int = MAX_BOXES, max_ids: int = MAX_KEPT_IDS) -> None:
        self._places: list[Box | None] = [None] * max_boxes
        self._max_ids = max_ids
        self._ids = 0
        self._first = self._end = 0

    def add(self, box: Box) -> None:
        """Keep a box; the oldest ones make room."""
        self._ids += len(box.request_ids)
        while self._end - self._first >= len(self._places):
            self._drop_first()
        self._places[self._end % len(self._places)] = box
        self._end += 1
        while self._ids > self._max_ids and self._end - self._first > 1:
            self._drop_first()

    def read(self, since: int | None) -> Reading:
        """Return boxes from a number on, up to ``MAX_BOXES_PER_REPLY``.

        Args:
            since: the first that is wanted; None: the latest. What is greater than any number so
                far is taken for the next one: the engine that gave it was another one.
        """
        if since is None:
            since = self._start_of_latest()
        start = min(max(since, self._first), self._end)
        found: list[tuple[int, Box]] = []
        ids = 0
        for seq in range(start, min(self._end, start + MAX_BOXES_PER_REPLY)):
            box = self._box(seq)
            ids += len(box.request_ids)
            if found and ids > _MAX_IDS_PER_REPLY:
                break
            found.append((seq, box))
        return Reading(found, start + len(found), max(0, self._first - since))

    def _start_of_latest(self) -> int:
        """Return the number of the first of the latest boxes that fit an answer."""
        start, ids = self._end, 0
        while start > max(self._first, self._end - MAX_BOXES_PER_REPLY):
            ids += len(self._box(start - 1).request_ids)
            if ids > _MAX_IDS_PER_REPLY:
                break
            start -= 1
        return start

    def _box(self, seq: int) -> Box:
        box = self._places[seq % len(self._places)]
        assert box is not None  # every place from first to end is taken
        return box

    def _drop_first(self) -> None:
        self._ids -= len(self._box(self._first).request_ids)
        self._places[self._first % len(self._places)] = None
        self._first += 1


class StageTimeline:
    """Draws one stage's batches and ticks into the engine's timeline.

    Args:
        stage: the model name that clients use.
        ring: takes what has ended.
    """

    def __init__(self, stage: str, ring: BoxRing) -> None:
        self._stage, self._ring = stage, ring
        self._running: dict[str, Box] = {}
        self._last_tick: dict[str, tuple[tuple[str, ...], Box]] = {}

    @property
    def running(self) -> list[Box]:
        """The batches that run."""
        return list(self._running.values())

    def begin_batch(
        self,
        worker_id: str,
        request_ids: Sequence[str],
        activations: Iterable[AdapterActivation | None],
        now: float,
    ) -> None:
        """Note that a worker was sent a batch."""
        self._running[worker_id] = Box(
            self._stage,
            worker_id,
            "batch",
            now,
            None,
            len(request_ids),
            tuple(request_ids[:MAX_IDS_PER_BOX]),
            names_and_scales(activations),
        )

    def end_batch(self, worker_id: str, now: float) -> None:
        """Note that a worker's batch has ended, be it with the worker; does nothing without one."""
        if (box := self._running.pop(worker_id, None)) is not None:
            box.end_s = now
            self._ring.add(box)

    def add_tick(
        self,
        worker_id: str,
        request_ids: tuple[str, ...],
        activations: Callable[[], Iterable[AdapterActivation | None]],
        tick_ms: float,
        now: float,
    ) -> None:
        """Note that a worker has run a tick, which ended now.

        Args:
            worker_id: the worker.
            request_ids: who shared the tick.
            activations: returns what they run under; called when they are others than before.
            tick_ms: how long it took.
            now: seconds, monotonic.
        """
        start_s = now - tick_ms / 1000
        before, last = self._last_tick.get(worker_id, ((), None))
        if last is not None and last.end_s is not None:
            # The report of the tick before may have been read late: a worker runs one at a time.
            start_s = min(now, max(start_s, last.end_s))
        if last is not None and before == request_ids:
            ids, names = last.request_ids, last.adapters
        else:
            ids, names = request_ids[:MAX_IDS_PER_BOX], names_and_scales(activations())
        box = Box(self._stage, worker_id, "tick", start_s, now, len(request_ids), ids, names)
        self._last_tick[worker_id] = (request_ids, box)
        self._ring.add(box)


def names_and_scales(activations: Iterable[AdapterActivation | None]) -> NamedScales:
    """Return the adapters of requests as they named them, each once, up to eight."""
    found: dict[tuple[str, float], None] = {}
    for activation in dict.fromkeys(activations):
        if activation is not None:
            for adapter, scale in zip(activation.adapters, activation.scales, strict=True):
                found[adapter.name, scale] = None
    return tuple(found)[:MAX_ADAPTERS_PER_BOX]
