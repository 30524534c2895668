"""The engine's timeline: the ring of boxes, what stages draw into it, and strips made of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_engine.cli.recent import Recent
from omni_engine.cli.strip import BARE, BLOCKS, IDLE, adapters_label, block, colour_of, draw
from omni_engine.engine import timeline
from omni_engine.engine.timeline import Box, BoxRing, StageTimeline
from omni_engine.protocol.adapters import Adapter, AdapterActivation


def box(number: int, ids: int = 0) -> Box:
    names = tuple(f"r{number}-{i}" for i in range(ids))
    return Box("m", "w", "tick", number, number + 1, max(1, ids), names, ())


def numbers(ring: BoxRing, since: int | None) -> list[int]:
    return [seq for seq, _ in ring.read(since).boxes]


# -- the ring


@given(
    max_boxes=st.integers(1, 20),
    max_ids=st.integers(1, 60),
    sizes=st.lists(st.integers(0, 9), max_size=80),
    since=st.integers(0, 100),
)
def test_the_ring_keeps_the_latest_boxes_and_tells_what_was_lost(
    max_boxes: int, max_ids: int, sizes: list[int], since: int
) -> None:
    ring = BoxRing(max_boxes, max_ids)
    for number, size in enumerate(sizes):
        ring.add(box(number, size))
    kept = list(range(len(sizes)))[-max_boxes:]
    while len(kept) > 1 and sum(sizes[number] for number in kept) > max_ids:
        del kept[0]
    reading = ring.read(since)
    assert [seq for seq, _ in reading.boxes] == [seq for seq in kept if seq >= since]
    assert all(found.start_s == seq for seq, found in reading.boxes)
    assert reading.next == len(sizes)
    lost = set(range(len(sizes))) - set(kept)
    assert reading.missed == len([seq for seq in lost if seq >= since])
    assert numbers(ring, None) == kept


@given(
    reads=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    max_boxes=st.integers(1, 15),
)
def test_a_follower_sees_every_box_once_or_hears_that_it_was_missed(
    reads: list[int], max_boxes: int
) -> None:
    ring, since, seen, missed, added = BoxRing(max_boxes), 0, [], 0, 0
    for more in reads:
        for _ in range(more):
            ring.add(box(added))
            added += 1
        reading = ring.read(since)
        missed += reading.missed
        seen += [seq for seq, _ in reading.boxes]
        since = reading.next
    assert seen == sorted(set(seen))
    assert len(seen) + missed == added == since


def test_an_answer_holds_no_more_than_the_loop_can_bear() -> None:
    ring = BoxRing()
    for number in range(timeline.MAX_BOXES + 10):
        ring.add(box(number, 1))
    first = ring.read(0)
    assert len(first.boxes) == timeline.MAX_BOXES_PER_REPLY
    assert (first.missed, first.next) == (10, 10 + timeline.MAX_BOXES_PER_REPLY)
    latest = numbers(ring, None)
    assert latest == list(range(timeline.MAX_BOXES + 10))[-timeline.MAX_BOXES_PER_REPLY :]
    crowded = BoxRing()
    for number in range(1000):
        crowded.add(box(number, timeline.MAX_IDS_PER_BOX))
    found, since = [], 0
    while part := numbers(crowded, since):
        assert len(part) * timeline.MAX_IDS_PER_BOX <= 8 * timeline.MAX_BOXES_PER_REPLY
        found += part
        since = crowded.read(since).next
    assert found == list(range(1000))
    latest = numbers(crowded, None)
    assert latest == found[-len(latest) :]
    assert len(latest) == 8 * timeline.MAX_BOXES_PER_REPLY // timeline.MAX_IDS_PER_BOX


def test_numbers_of_another_engine_lead_to_the_next_box() -> None:
    ring = BoxRing()
    ring.add(box(0))
    reading = ring.read(500)
    assert (reading.boxes, reading.next, reading.missed) == ([], 1, 0)


# -- what a stage draws


def activation(*named: tuple[str, float]) -> AdapterActivation:
    adapters = tuple(Adapter(name, f"/{name}", f"digest of {name}") for name, _ in named)
    return AdapterActivation(adapters, tuple(scale for _, scale in named))


def test_a_batch_is_open_until_it_ends() -> None:
    ring = BoxRing()
    drawn = StageTimeline("m", ring)
    members = [activation(("night", 0.5)), None, activation(("night", 0.5), ("chalk", 1.0))]
    drawn.begin_batch("w", ["a", "b", "c"], members, 10.0)
    (open_box,) = drawn.running
    assert open_box.describe(None) == {
        "seq": None, "stage": "m", "worker_id": "w", "kind": "batch", "start_s": 10.0,
        "end_s": None, "requests": 3, "request_ids": ["a", "b", "c"],
        "adapters": [{"name": "night", "scale": 0.5}, {"name": "chalk", "scale": 1.0}],
    }  # fmt: skip
    assert numbers(ring, 0) == []
    drawn.end_batch("w", 12.5)
    drawn.end_batch("w", 99.0)  # nothing runs any more
    assert drawn.running == []
    ((seq, closed),) = ring.read(0).boxes
    assert (seq, closed.start_s, closed.end_s) == (0, 10.0, 12.5)


def test_ticks_end_when_they_are_told_and_do_not_overlap() -> None:
    ring = BoxRing()
    drawn = StageTimeline("m", ring)
    looked_up: list[str] = []

    def under(name: str) -> list[AdapterActivation | None]:
        looked_up.append(name)
        return [activation((name, 1.0))]

    drawn.add_tick("w", ("a", "b"), lambda: under("night"), 1000.0, 10.0)
    drawn.add_tick("w", ("a", "b"), lambda: under("night"), 1000.0, 10.5)  # both told late
    drawn.add_tick("other", ("z",), lambda: under("chalk"), 1000.0, 10.5)
    drawn.add_tick("w", ("c",), lambda: under("outline"), 250.0, 11.0)
    found = [one for _, one in ring.read(0).boxes]
    assert [(one.worker_id, one.start_s, one.end_s) for one in found] == [
        ("w", 9.0, 10.0), ("w", 10.0, 10.5), ("other", 9.5, 10.5), ("w", 10.75, 11.0),
    ]  # fmt: skip
    assert [one.adapters for one in found] == [
        (("night", 1.0),), (("night", 1.0),), (("chalk", 1.0),), (("outline", 1.0),),
    ]  # fmt: skip
    assert looked_up == ["night", "chalk", "outline"], "looked up again only for other requests"
    assert found[0].request_ids is found[1].request_ids


def test_a_box_names_a_bounded_number_of_requests_and_adapters() -> None:
    ring = BoxRing()
    drawn = StageTimeline("m", ring)
    ids = tuple(f"r{i}" for i in range(200))
    drawn.begin_batch("w", ids, [activation((f"a{i}", 1.0)) for i in range(200)], 0.0)
    drawn.end_batch("w", 1.0)
    drawn.add_tick("w", ids, lambda: [activation((f"a{i}", 1.0)) for i in range(200)], 9.0, 2.0)
    for _, found in ring.read(0).boxes:
        assert found.requests == 200
        assert found.request_ids == ids[: timeline.MAX_IDS_PER_BOX]
        assert len(found.adapters) == timeline.MAX_ADAPTERS_PER_BOX


# -- strips


def told(start_s: float, end_s: float | None, requests: int = 1, *names: str) -> dict[str, Any]:
    adapters = [{"name": name, "scale": 1.0} for name in names]
    return {"worker_id": "w", "start_s": start_s, "end_s": end_s, "requests": requests,
            "adapters": adapters}  # fmt: skip


def test_a_strip_shows_when_how_many_and_under_which_adapters() -> None:
    boxes = [told(0.0, 2.0, 4), told(3.0, 4.0, 1, "night"), told(6.0, None, 2, "b", "a")]
    strip = draw(boxes, now_s=8.0, span_s=8.0, width=8, most=4)
    assert "".join(cell.character for cell in strip.cells) == "██·▂··▄▄"
    labels = [BARE, BARE, None, "night", None, None, "a+b", "a+b"]
    assert [cell.label for cell in strip.cells] == labels
    assert strip.busy == pytest.approx(5 / 8)
    assert strip.mean_requests == pytest.approx((8 + 1 + 4) / 5)


@given(
    gaps=st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 3)), max_size=20),
    width=st.integers(1, 50),
    now_s=st.floats(0, 80),
)
def test_a_strip_covers_what_ran_within_its_span(
    gaps: list[tuple[float, float]], width: int, now_s: float
) -> None:
    boxes, at = [], 0.0
    for gap, length in gaps:
        boxes.append(told(at + gap, at + gap + length))
        at += gap + length
    boxes = [one for one in boxes if one["end_s"] <= now_s]
    strip = draw(boxes, now_s, 10.0, width, most=1)
    assert len(strip.cells) == width
    covered = sum(max(0.0, b["end_s"] - max(b["start_s"], now_s - 10.0)) for b in boxes)
    assert strip.busy == pytest.approx(covered / 10.0, abs=1e-6)
    shown = {cell.character for cell in strip.cells}
    if not covered:
        assert shown == {IDLE}
    if covered >= 2 * 10.0 / width:  # less than a slice may be before the first
        assert BLOCKS[-1] in shown


def test_heights_and_colours() -> None:
    assert [block(n, 8) for n in range(1, 9)] == list(BLOCKS)
    assert block(1, 1) == block(99, 4) == BLOCKS[-1]
    assert block(1, 4096) == BLOCKS[0]
    assert colour_of("night") == colour_of("night")
    assert len({colour_of(name) for name in ("night", "outline", "chalk", "studio")}) > 1
    assert adapters_label([]) == BARE
    assert adapters_label([{"name": "b"}, {"name": "a"}, {"name": "b"}]) == "a+b"


# -- what top remembers


def answer(now_s: float, next_: int, *boxes: dict[str, Any]) -> dict[str, Any]:
    return {"now_s": now_s, "next": next_, "boxes": list(boxes), "running": []}


def stage(completed: int, outputs: int, **errors: int) -> dict[str, Any]:
    counts = {"received": 99, "completed": completed, "failed": sum(errors.values()), "aborted": 0}
    return {"name": "m", "requests": counts, "outputs": outputs, "errors": errors}


def test_top_forgets_what_is_older_than_its_span_and_another_engines_boxes() -> None:
    recent = Recent(10.0)
    recent.note_timeline(answer(20.0, 3, told(1.0, 2.0), told(8.0, 11.0), told(12.0, 13.0)))
    assert [one["start_s"] for one in recent.boxes_of("w")] == [8.0, 12.0]
    assert list(recent.boxes_of("other")) == []
    recent.note_timeline(answer(22.5, 4, told(21.0, 22.0)))
    assert [one["start_s"] for one in recent.boxes_of("w")] == [12.0, 21.0]
    recent.note_timeline(answer(5.0, 1, told(4.0, 4.5)))
    assert [one["start_s"] for one in recent.boxes_of("w")] == [4.0]


def test_tops_rates_and_errors() -> None:
    recent = Recent(10.0)
    recent.note_metrics({"stages": [stage(5, 5, model_error=2)], "refused": {}}, 100.0)
    assert recent.rates == (0.0, 0.0)
    refused = {"queue_full": 7}
    recent.note_metrics({"stages": [stage(9, 13, model_error=2)], "refused": refused}, 102.0)
    assert recent.rates == (2.0, 4.0)
    assert [(seen.code, seen.where, seen.count, seen.at_s) for seen in recent.errors] == [
        ("queue_full", None, 7, 102.0), ("model_error", "m", 2, None),
    ]  # fmt: skip
    recent.note_metrics({"stages": [stage(9, 13, model_error=3)], "refused": refused}, 110.0)
    assert [seen.code for seen in recent.errors] == ["model_error", "queue_full"]
    assert recent.rates == (pytest.approx(1 / 8), 0.0)
