"""The live feed: one loop for all viewers, bounded for slow ones, back after an outage."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from omni_engine import AsyncOmniClient, Omni, OmniDiffusionSamplingParams
from omni_engine.engine.gateway.live import (
    BOXES_PER_EVENT,
    MAX_WAITING_BOXES,
    LiveFeed,
    Viewer,
)

T = TypeVar("T")
_PATIENCE_S = 30.0


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def boxes(start: int, count: int) -> list[dict[str, Any]]:
    return [{"seq": seq} for seq in range(start, start + count)]


STATE = {"now_s": 1.0, "wall_s": 2.0, "running": [], "stages": []}


class Counted(AsyncOmniClient):
    """Counts how often the engine is asked for its timeline."""

    asked = 0

    async def timeline(self, since: int | None = None) -> dict[str, Any]:
        self.asked += 1
        return await super().timeline(since)


async def event_where(viewer: Viewer, name: str, holds: Any = lambda data: True) -> dict[str, Any]:
    """The first event of a name for which something holds; fails if there is none for long."""
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            told, data = await viewer.next_event()
            if told == name and holds(data):
                return data


async def draw(client: AsyncOmniClient, request_id: str) -> None:
    params = OmniDiffusionSamplingParams(seed=1)
    handle = await client.submit("a prompt", params, request_id=request_id)
    (await handle.result()).raise_for_error()


def holds_request(request_id: str) -> Any:
    return lambda data: any(request_id in box["request_ids"] for box in data["boxes"])


def test_a_slow_viewer_loses_the_oldest_boxes_and_is_told_how_many() -> None:
    async def scenario() -> None:
        viewer = Viewer()
        extra = 10
        for start in range(0, MAX_WAITING_BOXES + extra, 2):
            viewer.tell(STATE, boxes(start, 2))
        told = []
        missed = 0
        while len(told) < MAX_WAITING_BOXES:
            name, data = await viewer.next_event()
            assert name == "live"
            assert len(data["boxes"]) <= BOXES_PER_EVENT
            told += [box["seq"] for box in data["boxes"]]
            missed += data["missed"]
        assert told == list(range(extra, MAX_WAITING_BOXES + extra))
        assert missed == extra

    run(scenario())


def test_boxes_that_were_heard_come_before_the_engine_s_absence() -> None:
    async def scenario() -> None:
        viewer = Viewer()
        viewer.tell(STATE, boxes(0, BOXES_PER_EVENT + 1))
        viewer.tell_away("gone")
        names = [(await viewer.next_event())[0] for _ in range(3)]
        assert names == ["live", "live", "away"]
        viewer.tell({**STATE, "now_s": 9.0}, [])
        name, data = await viewer.next_event()
        assert (name, data["now_s"], data["boxes"]) == ("live", 9.0, [])

    run(scenario())


def test_all_viewers_hear_of_a_request_from_one_loop_that_ends_with_them(
    pattern_engine: Omni,
) -> None:
    async def scenario() -> None:
        async with Counted(pattern_engine.endpoint) as client:
            feed = LiveFeed(client)
            async with feed.watching() as one:
                async with feed.watching() as other:
                    await event_where(one, "live")
                    await event_where(other, "live")
                    asked = client.asked
                    await draw(client, "seen-by-both")
                    for viewer in (one, other):
                        data = await event_where(viewer, "live", holds_request("seen-by-both"))
                        assert data["stages"][0]["name"] == "pattern"
                        assert data["stages"][0]["workers"][0]["worker_id"]
                    loops = [task for task in asyncio.all_tasks() if task.get_name() == "live feed"]
                    assert len(loops) == 1
                    assert client.asked > asked
                assert feed.viewers == 1
            assert feed.viewers == 0
            await asyncio.wait(loops)  # ends by itself, or the test's time is up

    run(scenario())


def test_who_comes_later_sees_what_has_just_run(pattern_engine: Omni) -> None:
    async def scenario() -> None:
        async with AsyncOmniClient(pattern_engine.endpoint) as client:
            feed = LiveFeed(client)
            await draw(client, "before-anybody-watched")
            async with feed.watching() as first:
                await event_where(first, "live", holds_request("before-anybody-watched"))
                await draw(client, "while-one-watched")
                await event_where(first, "live", holds_request("while-one-watched"))
                async with feed.watching() as second:
                    data = await event_where(second, "live")
                    ids = {name for box in data["boxes"] for name in box["request_ids"]}
                    assert {"before-anybody-watched", "while-one-watched"} <= ids

    run(scenario())


def test_delivered_pictures_are_counted(pattern_engine: Omni) -> None:
    async def scenario() -> None:
        async with (
            AsyncOmniClient(pattern_engine.endpoint) as client,
            LiveFeed(client).watching() as viewer,
        ):
            before = (await event_where(viewer, "live"))["stages"][0]["outputs"]
            await draw(client, "counted")
            await event_where(
                viewer, "live", lambda data: data["stages"][0]["outputs"] == before + 1
            )

    run(scenario())


def test_an_engine_that_hangs_is_told_of_and_the_feed_goes_on_after_it(
    pattern_engine: Omni,
) -> None:
    async def scenario() -> None:
        async with AsyncOmniClient(pattern_engine.endpoint) as client:
            pid = (await client.status())["pid"]
            async with LiveFeed(client, answer_timeout_s=1.0).watching() as viewer:
                await event_where(viewer, "live")
                os.kill(pid, signal.SIGSTOP)
                try:
                    away = await event_where(viewer, "away")
                finally:
                    os.kill(pid, signal.SIGCONT)
                assert "not answered" in away["message"]
                await draw(client, "after-the-outage")
                await event_where(viewer, "live", holds_request("after-the-outage"))

    run(scenario())


def test_a_defect_is_told_of_and_the_next_viewer_begins_anew(
    pattern_engine: Omni, caplog: pytest.LogCaptureFixture
) -> None:
    class Defective(AsyncOmniClient):
        broken = True

        async def timeline(self, since: int | None = None) -> dict[str, Any]:
            return {} if self.broken else await super().timeline(since)

    async def scenario() -> None:
        async with Defective(pattern_engine.endpoint) as client:
            feed = LiveFeed(client)
            async with feed.watching() as viewer:
                assert "broke" in (await event_where(viewer, "away"))["message"]
                client.broken = False
                async with feed.watching() as other:
                    await event_where(other, "live")
                    await event_where(viewer, "live")

    run(scenario())
    assert "KeyError" in caplog.text
