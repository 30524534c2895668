"""``/v1/live``: what the workers run, told while it happens.

However many watch, the engine is asked by one loop, and only while somebody watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.engine.gateway.auth import require_key
from omni_engine.engine.gateway.state import gateway_of
from omni_engine.protocol.errors import OmniError

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", dependencies=[Depends(require_key)])

INTERVAL_S = 0.2
"""How often the engine is asked."""

HEARTBEAT_S = 5.0
"""How long nothing is said while nothing changes."""

MAX_WAITING_BOXES = 4096
"""Boxes that wait for a viewer who reads slowly; the oldest are lost first."""

BOXES_PER_EVENT = 256

ANSWER_TIMEOUT_S = 5.0

_OUTPUTS_INTERVAL_S = 1.0
_HISTORY_S = 30.0

Json = dict[str, Any]
T = TypeVar("T")


class Viewer:
    """What one viewer has not been told yet; bounded, however slowly it reads."""

    def __init__(self) -> None:
        self._boxes: deque[Json] = deque(maxlen=MAX_WAITING_BOXES)
        self._missed = 0
        self._state: Json | None = None
        self._away: str | None = None
        self._news = asyncio.Event()

    def tell(self, state: Json, boxes: list[Json], missed: int = 0) -> None:
        """Note what is so now, and boxes that ended since the last time."""
        self._missed += missed + max(0, len(self._boxes) + len(boxes) - MAX_WAITING_BOXES)
        self._boxes.extend(boxes)
        self._state, self._away = state, None
        self._news.set()

    def tell_away(self, reason: str) -> None:
        """Note that the engine does not answer."""
        self._away = reason
        self._news.set()

    async def next_event(self) -> tuple[str, Json]:
        """Wait for news; return an event's name and what it says."""
        await self._news.wait()
        if self._away is not None and not self._boxes:
            self._news.clear()
            return "away", {"message": self._away}
        assert self._state is not None  # boxes come with a state
        boxes = [self._boxes.popleft() for _ in range(min(BOXES_PER_EVENT, len(self._boxes)))]
        missed, self._missed = self._missed, 0
        if not self._boxes and self._away is None:
            self._news.clear()
        return "live", {**self._state, "missed": missed, "boxes": boxes}


class LiveFeed:
    """Asks the engine what happens, and tells all who watch.

    Args:
        client: the connection to the engine.
        answer_timeout_s: seconds after which an engine that has not answered is away.
    """

    def __init__(self, client: AsyncOmniClient, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._client, self._answer_timeout_s = client, answer_timeout_s
        self._viewers: set[Viewer] = set()
        self._loop: asyncio.Task[None] | None = None
        self._since: int | None = None
        self._state: Json | None = None
        self._recent: deque[Json] = deque(maxlen=MAX_WAITING_BOXES)
        self._told_at = 0.0
        self._outputs: dict[str, int] = {}
        self._outputs_at = -float("inf")

    @property
    def viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Viewer]:
        """Watch for as long as the context lasts; a newcomer is told of the last half minute."""
        viewer = Viewer()
        if self._state is not None:
            horizon = self._state["now_s"] - _HISTORY_S
            viewer.tell(self._state, [box for box in self._recent if box["end_s"] >= horizon])
        self._viewers.add(viewer)
        if self._loop is None:
            self._loop = asyncio.create_task(self._ask_again_and_again(), name="live feed")
            self._loop.add_done_callback(self._on_end)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def _stop(self) -> None:
        """Rest until somebody watches again; what was heard is stale by then."""
        if self._loop is not None:
            self._loop.cancel()
        self._loop = self._state = self._since = None
        self._recent.clear()

    def _on_end(self, loop: asyncio.Task[None]) -> None:
        """Tell of a defect; who watches next starts the loop again."""
        if not loop.cancelled() and (error := loop.exception()) is not None:
            logger.error("the live feed broke", exc_info=error)
            self._tell_away("the live feed broke; the server's log tells why")
            self._loop = None

    async def _ask_again_and_again(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._ask()
            except OmniError as error:
                self._tell_away(error.message)
            except TimeoutError:
                self._tell_away(f"it has not answered for {self._answer_timeout_s:g} s.")
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began)))

    async def _ask(self) -> None:
        if time.monotonic() - self._outputs_at >= _OUTPUTS_INTERVAL_S:
            metrics = await self._answer(self._client.metrics)
            self._outputs = {stage["name"]: stage["outputs"] for stage in metrics["stages"]}
            self._outputs_at = time.monotonic()
        told = await self._answer(lambda: self._client.timeline(self._since))
        first = self._since is None
        boxes, self._since = told["boxes"], told["next"]
        stages = [{**s, "outputs": self._outputs.get(s["name"], 0)} for s in told["stages"]]
        state = {
            "now_s": told["now_s"],
            "wall_s": told["wall_s"],
            "running": told["running"],
            "stages": stages,
        }
        self._recent.extend(boxes)
        if first:
            boxes = [box for box in boxes if box["end_s"] >= state["now_s"] - _HISTORY_S]
        quiet = time.monotonic() - self._told_at < HEARTBEAT_S
        if not first and quiet and not boxes and not told["missed"] and self._unchanged(state):
            return
        self._state, self._told_at = state, time.monotonic()
        for viewer in self._viewers:
            viewer.tell(state, boxes, told["missed"])

    def _unchanged(self, state: Json) -> bool:
        before = self._state or {}
        return all(before.get(key) == state[key] for key in ("running", "stages"))

    def _tell_away(self, reason: str) -> None:
        self._state = None
        for viewer in self._viewers:
            viewer.tell_away(reason)

    async def _answer(self, ask: Callable[[], Awaitable[Json]]) -> Json:
        async with asyncio.timeout(self._answer_timeout_s):
            return await ask()


def feed_of(request: Request) -> LiveFeed:
    """Return the feed that all viewers of a gateway share."""
    state = request.app.state
    if not hasattr(state, "live_feed"):
        state.live_feed = LiveFeed(gateway_of(request).client)
    feed: LiveFeed = state.live_feed
    return feed


@router.get("/live", include_in_schema=False)
async def live(request: Request) -> StreamingResponse:
    """Tell what the workers run, as server-sent events without end."""
    return StreamingResponse(
        _events(feed_of(request), gateway_of(request).closing),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(feed: LiveFeed, closing: asyncio.Event) -> AsyncIterator[str]:
    yield ": what the workers run\n\n"
    async with feed.watching() as viewer, _task(closing.wait()) as closed:
        while not closed.done():
            async with _task(viewer.next_event()) as news:
                await asyncio.wait({news, closed}, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    name, data = news.result()
                    yield f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


@contextlib.asynccontextmanager
async def _task(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Do something beside the context, and no longer than it lasts."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
