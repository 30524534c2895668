"""What a stream's reader has not taken yet: the latest progress, the latest preview, no more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from omni_engine.engine.handles import RequestEvent


@dataclass(frozen=True)
class Partial:
    """An unfinished picture.

    Attributes:
        index: counted from 0.
        step: steps done.
        picture: uint8, shape (height, width, 3).
    """

    index: int
    step: int
    picture: Any


class Mailbox:
    """Takes every event of a request and keeps those that are still worth sending.

    Previews are spread evenly over the steps, whatever the engine sends.

    Args:
        partials: previews that are passed on at most.
        progress: whether progress is passed on.
    """

    def __init__(self, partials: int, progress: bool) -> None:
        self._partials, self._tells_progress = partials, progress
        self._chosen = 0
        self._partial: Partial | None = None
        self._progress: RequestEvent | None = None
        self._closed = False
        self._news = asyncio.Event()

    def put(self, event: RequestEvent) -> None:
        """Note an event; what it makes stale is dropped."""
        if event.status.startswith("finished"):
            return
        if event.preview is not None and self._is_wanted(event.step or 0, event.num_steps or 0):
            self._partial = Partial(self._chosen, event.step or 0, event.preview)
            self._chosen += 1
            self._news.set()
        if self._tells_progress:
            self._progress = event
            self._news.set()

    def close(self) -> None:
        """Say that no event comes any more."""
        self._closed = True
        self._news.set()

    async def take(self) -> RequestEvent | Partial | None:
        """Wait for what is to be sent next; None at the end."""
        while True:
            if (partial := self._partial) is not None:
                self._partial = None
                return partial
            if (progress := self._progress) is not None:
                self._progress = None
                return progress
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()

    def _is_wanted(self, step: int, num_steps: int) -> bool:
        """Whether a preview at a step is the next of those that are spread evenly."""
        if self._chosen >= self._partials or step >= num_steps:
            return False
        return step * (self._partials + 1) >= num_steps * (self._chosen + 1)
