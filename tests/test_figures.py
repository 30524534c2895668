"""The engine's figures: they add up, whatever becomes of requests and workers."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PATTERN
from hypothesis import given
from hypothesis import strategies as st
from test_step_mode import GATED
from waiting import wait_for

from omni_engine import AsyncOmniClient, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.figures import StageFigures, WorkerFigures
from omni_engine.engine.histograms import REQUESTS, SECONDS, Histogram
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.restarts import Death
from omni_engine.protocol.adapters import AdaptersHeld
from omni_engine.protocol.errors import (
    InvalidRequestError,
    ModelError,
    RequestAbortedError,
    WorkerLostError,
)
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.requests import build_request

Figures = dict[str, Any]

# -- pure


@given(values=st.lists(st.floats(0, 1e4), max_size=60))
def test_a_histogram_counts_every_value_between_its_bounds(values: list[float]) -> None:
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.add(value)
    told = histogram.describe()
    assert told["bounds"] == list(SECONDS)
    edges = [-1.0, *SECONDS, float("inf")]
    assert told["counts"] == [
        sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)
    ]
    assert told["sum"] == pytest.approx(sum(values))
    assert histogram.total == len(values)


def test_batch_sizes_as_a_histogram() -> None:
    told = Histogram.of([(1, 5), (3, 2), (4, 1), (5000, 1)], REQUESTS).describe()
    assert told["counts"] == [5, 0, 3, *[0] * 10, 1]
    assert told["sum"] == 5 + 6 + 4 + 5000


class NoListener:
    label = "nobody"

    def on_status(self, *_: object) -> None: ...
    def on_progress(self, *_: object) -> None: ...
    def on_output(self, *_: object) -> None: ...


def live(name: str, arrival: float, figures: StageFigures) -> LiveRequest:
    made = LiveRequest(build_request("a", request_id=name), NoListener(), arrival)
    figures.received(made)
    return made


def start(one: LiveRequest, figures: StageFigures, now: float) -> None:
    one.started = now
    figures.started(one)


def test_the_life_of_requests_in_figures() -> None:
    figures = StageFigures()
    first, second, third = (live(name, at, figures) for at, name in enumerate("abc"))
    assert figures.oldest_waiting_s(10.0) == 10.0
    start(first, figures, 4.0)
    assert figures.oldest_waiting_s(10.0) == 9.0
    figures.advance(first, 2, 8)
    # The worker dies: the request waits from its arrival on, and its steps are done again.
    first.start_over(Death(5.0, WorkerLostError("gone")))
    figures.waits_again(first)
    assert figures.oldest_waiting_s(10.0) == 10.0
    start(first, figures, 11.0)
    figures.advance(first, 1, 8)
    figures.advance(first, 8, 8)
    done = DiffusionOutput("a", images=[None] * 3, metrics=OutputMetrics(num_steps=8))  # type: ignore[list-item]
    figures.ended(first, done, 13.0)
    figures.ended(second, second.failed(RequestAbortedError("aborted")), 14.0)
    start(third, figures, 15.0)
    figures.ended(third, third.failed(ModelError("no")), 16.0)
    told = figures.describe(20.0)
    assert told["oldest_waiting_s"] == 0.0
    assert told["requests"] == {"received": 3, "completed": 1, "failed": 1, "aborted": 1}
    assert (told["errors"], told["outputs"], told["steps"]) == ({"model_error": 1}, 3, 2 + 8)
    sums = {name: one["sum"] for name, one in told["histograms"].items()}
    assert sums == {
        "queue_s": 11.0 + 13.0 + 13.0,
        "run_s": 2.0 + 1.0,
        "total_s": 13.0 + 13.0 + 14.0,
        "batch_size": 0.0,
    }


def test_steps_that_are_told_only_at_the_end_count() -> None:
    figures = StageFigures()
    one = live("a", 0.0, figures)
    start(one, figures, 1.0)
    figures.ended(one, DiffusionOutput("a", metrics=OutputMetrics(num_steps=5)), 2.0)
    assert figures.steps == 5


def test_what_a_worker_counts_is_added_up_over_its_processes() -> None:
    worker = WorkerFigures()
    assert worker.describe_adapters(None) is None
    worker.note_forwards(5)
    worker.note_forwards(3)  # an older heartbeat
    first = AdaptersHeld(["x"], ["x", "y"], 10, 20, activations=4, load_ms=500.0, evictions=1)
    assert worker.forwards == 5
    worker.process_ended(first)
    gone = worker.describe_adapters(None)
    assert gone is not None
    assert (gone["switches"], gone["load_s"], gone["on_device"], gone["host_bytes"]) == (
        4,
        0.5,
        0,
        0,
    )
    worker.note_forwards(2)
    assert worker.forwards == 7
    again = worker.describe_adapters(AdaptersHeld(["z"], ["z"], 7, 8, activations=1, wait_ms=250.0))
    assert again == {
        "switches": 5, "device_hits": 0, "host_hits": 0, "loads": 0, "load_s": 0.5,
        "wait_s": 0.25, "evictions": 1, "on_device": 1, "in_memory": 1, "device_bytes": 7,
        "host_bytes": 8,
    }  # fmt: skip


# -- with real engines


def stage(metrics: Figures) -> Figures:
    (found,) = metrics["stages"]
    return found  # type: ignore[no-any-return]


def growth(before: Any, after: Any) -> Any:
    """What numbers have grown by, in maps and lists of numbers."""
    if isinstance(after, dict):
        return {name: growth(before.get(name, 0), value) for name, value in after.items()}
    if isinstance(after, list):
        return [growth(*pair) for pair in zip(before, after, strict=True)]
    return after - before


def check_sums(figures: Figures) -> None:
    """What must hold once nothing is under way."""
    counts, histograms = figures["requests"], figures["histograms"]
    ended = counts["completed"] + counts["failed"] + counts["aborted"]
    assert (figures["waiting"], figures["running"]) == (0, 0)
    assert figures["oldest_waiting_s"] == 0.0
    assert counts["received"] == ended
    assert sum(figures["errors"].values()) == counts["failed"]
    assert sum(histograms["queue_s"]["counts"]) == ended
    assert sum(histograms["total_s"]["counts"]) == ended
    assert counts["completed"] <= sum(histograms["run_s"]["counts"]) <= ended
    together = histograms["queue_s"]["sum"] + histograms["run_s"]["sum"]
    assert together == pytest.approx(histograms["total_s"]["sum"])
    workers = figures["workers"]
    assert figures["forwards"] == sum(worker["forwards"] for worker in workers)
    # What was aborted may have been completed all the same.
    assert counts["completed"] <= sum(worker["completed"] for worker in workers)
    units = "ticks" if figures["step_execution"] else "batches"
    ran = sum(worker[units] for worker in workers)
    assert sum(histograms["batch_size"]["counts"]) == ran


def drained(client: OmniClient | Omni) -> Figures:
    """The engine's figures once nothing is under way: an aborted run ends after its answer."""

    def idle() -> Figures | None:
        metrics = client.metrics()
        found = stage(metrics)
        return None if found["waiting"] + found["running"] else metrics

    return wait_for(idle, 60)  # type: ignore[no-any-return]


SMALL = {"height": 64, "width": 64, "num_inference_steps": 3}


@pytest.fixture(scope="module", params=[False, True], ids=["request mode", "step mode"])
def bundled(request: pytest.FixtureRequest, start_engine: Callable[..., Omni]) -> Omni:
    """One worker with the bundled model; a step with guidance takes two forwards."""
    defaults = {**SMALL, "true_cfg_scale": 3.0, "negative_prompt": " "}
    return start_engine(
        "bundled",
        threads=1,
        max_num_seqs=4,
        step_execution=request.param,
        default_sampling_params=defaults,
    )


def params(**values: Any) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(**{"seed": 1, **values})


def test_figures_of_a_known_batch(bundled: Omni) -> None:
    before, since = drained(bundled), bundled.timeline(0)["next"]
    two = params(num_outputs_per_prompt=2)
    outputs = bundled.generate(["a", "b", "c"], [params(), params(), two])
    assert all(output.ok for output in outputs)
    after = drained(bundled)
    check_sums(stage(after))
    grown = growth(
        {name: stage(before)[name] for name in ("outputs", "steps", "forwards", "requests")},
        {name: stage(after)[name] for name in ("outputs", "steps", "forwards", "requests")},
    )
    counts = {"received": 3, "completed": 3, "failed": 0, "aborted": 0}
    assert grown == {"outputs": 4, "steps": 3 * 3, "forwards": 3 * 2, "requests": counts}
    sizes = growth(stage(before)["histograms"], stage(after)["histograms"])["batch_size"]["counts"]
    stepped = stage(after)["step_execution"]
    boxes = bundled.timeline(since)["boxes"]
    assert sum(sizes) == len(boxes)
    assert sizes[2] == len([box for box in boxes if box["requests"] == 3])  # the bound is 4
    assert sizes[2] >= (6 if stepped else 1)
    assert {box["kind"] for box in boxes} == {"tick" if stepped else "batch"}
    ids = [output.request_id for output in outputs]
    assert boxes[0]["request_ids"] == ids
    grown_bytes = growth(before["bytes"], after["bytes"])
    pictures = 4 * 64 * 64 * 3
    assert grown_bytes["from_workers"] > pictures
    assert grown_bytes["to_clients"] > pictures
    assert grown_bytes["from_clients"] > 0
    assert grown_bytes["to_workers"] > 0


def test_figures_add_up_whatever_becomes_of_requests(bundled: Omni) -> None:
    before = drained(bundled)
    with OmniClient(bundled.endpoint) as client:
        good = [client.submit("a red circle", params(seed=i)) for i in range(5)]
        late = [client.submit("late", params(), timeout_s=0.001) for _ in range(2)]
        ended = [client.submit("ended", params(num_inference_steps=40)) for _ in range(3)]
        for handle in ended:
            handle.abort()
        wrong = client.submit("wrong", params(height=63))
        unknown = client.submit("unknown", params(), model="nobody's")
        assert all(handle.result(120).ok for handle in good)
        assert {handle.result(120).error.code for handle in late} == {"timeout"}  # type: ignore[union-attr]
        assert all(handle.result(120).aborted for handle in ended)
        assert not wrong.result(120).ok
        assert not unknown.result(120).ok
        after = drained(client)
    assert after["clients"] >= 1
    check_sums(stage(after))
    names = ("requests", "errors", "outputs")
    grown = growth(*[{name: stage(told)[name] for name in names} for told in (before, after)])
    counts = {"received": 10, "completed": 5, "failed": 2, "aborted": 3}
    assert grown == {"requests": counts, "errors": {"timeout": 2}, "outputs": 5}
    assert growth(before["refused"], after["refused"]) == {"invalid_request": 1, "unknown_model": 1}
    status = bundled.status()
    assert status["rejected"] == sum(after["refused"].values())
    assert status["stages"][0]["requests"] == stage(after)["requests"]
    assert status["stages"][0]["default_sampling_params"]["true_cfg_scale"] == 3.0


@pytest.mark.parametrize(("side", "expected"), [(None, 64), (24, 24), (4096, 64)])
def test_previews_are_as_large_as_wanted(bundled: Omni, side: int | None, expected: int) -> None:
    handle = bundled.submit("a blue star", params(), preview_every=1, preview_max_side=side)
    shapes = {event.preview.shape for event in handle.events() if event.preview is not None}
    assert shapes == {(expected, expected, 3)}
    assert handle.result(60).ok


def test_a_size_of_previews_without_previews_is_refused(bundled: Omni) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        bundled.submit("a blue star", preview_max_side=64)
    assert refused.value.field == "preview_max_side"


def test_the_asynchronous_client_asks_the_same(bundled: Omni) -> None:
    async def ask() -> tuple[Figures, Figures]:
        async with AsyncOmniClient(bundled.endpoint) as client:
            return await client.metrics(), await client.timeline(0)

    metrics, timeline = asyncio.run(ask())
    assert stage(metrics)["name"] == "bundled"
    assert timeline["boxes"] == bundled.timeline(0)["boxes"]


# -- hand-written pipelines: cheap, and they can fail and die


def test_errors_by_code_and_the_oldest_that_waits(pattern_engine: Omni) -> None:
    before = drained(pattern_engine)
    with OmniClient(pattern_engine.endpoint) as client:
        slow = client.submit("slow", params(extra_args={"sleep_ms": 500}))
        wait_for(lambda: stage(client.metrics())["running"] == 1)
        behind = client.submit("behind", params())
        seen = wait_for(lambda: (now := stage(client.metrics()))["waiting"] == 1 and now)
        assert seen["oldest_waiting_s"] > 0
        (box,) = client.timeline()["running"]
        assert (box["seq"], box["end_s"], box["requests"]) == (None, None, 1)
        assert slow.result(60).ok
        assert behind.result(60).ok
        bad = [client.submit("b", params(extra_args={"raise_text": "no"})) for _ in range(3)]
        assert {handle.result(60).error.code for handle in bad} == {"model_error"}  # type: ignore[union-attr]
        after = drained(client)
        assert client.timeline()["running"] == []
    check_sums(stage(after))
    assert growth(stage(before)["errors"], stage(after)["errors"]) == {"model_error": 3}
    grown = stage(after)["forwards"] - stage(before)["forwards"]
    assert grown == 2, "as the pipeline says of each batch; one that failed says nothing"


def test_a_killed_workers_batches_end_and_its_figures_stay(
    start_own_engine: Callable[..., Omni],
) -> None:
    engine = start_own_engine(
        "bundled",
        pipeline=PATTERN,
        lora_modules=[],
        default_sampling_params={},
        worker_restart_backoff_s=0.05,
    )
    assert engine.generate("before").pop().ok
    forwards = [stage(engine.metrics())["forwards"]]
    (killer,) = engine.generate("killer", params(extra_args={"exit_code": 3}))
    assert killer.error is not None
    assert killer.error.code == "worker_died_repeatedly"
    forwards.append(stage(engine.metrics())["forwards"])
    assert engine.generate("after").pop().ok
    after = drained(engine)
    forwards.append(stage(after)["forwards"])
    assert forwards == [1, 1, 2]
    check_sums(stage(after))
    assert stage(after)["errors"] == {"worker_died_repeatedly": 1}
    assert stage(after)["workers"][0]["restarts"] == 2
    timeline = engine.timeline(0)
    assert timeline["running"] == []
    assert len(timeline["boxes"]) == 4, "two of them of the request that killed"
    for box in timeline["boxes"]:
        assert box["start_s"] <= box["end_s"] <= timeline["now_s"]


def test_a_killed_workers_ticks_are_counted(
    start_own_engine: Callable[..., Omni], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = start_own_engine("bundled", worker_restart_backoff_s=0.05, **GATED)
    held = params(num_inference_steps=4, extra_args={"holds": [[2, str(gate)]]})
    handle = engine.submit("held", held)
    wait_for(lambda: stage(engine.metrics())["steps"] == 2, 60)
    (worker,) = engine.status()["stages"][0]["workers"]
    os.kill(worker["pid"], signal.SIGKILL)
    gate.touch()
    assert handle.result(120).ok
    after = stage(drained(engine))
    check_sums(after)
    assert (after["steps"], after["forwards"]) == (2 + 4, 2 + 4)
    assert after["workers"][0]["ticks"] == len(engine.timeline(0)["boxes"]) >= 6
