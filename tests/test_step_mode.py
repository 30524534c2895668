"""Step execution end to end: joining, leaving, turns, aborts, lost workers, the same pictures."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_pipelines import pattern

from omni_engine import DiffusionOutput, LoRARequest, Omni, OmniDiffusionSamplingParams
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.keys import request_key
from omni_engine.protocol.adapters import Adapter, AdapterActivation
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import build_request

Params = OmniDiffusionSamplingParams
GATED = {
    "pipeline": "gated_pipelines:GatedSteps",
    "lora_modules": [],
    "default_sampling_params": {},
    "step_execution": True,
}


@pytest.fixture(scope="module")
def gated(start_engine: Callable[..., Omni]) -> Omni:
    """One worker with room for two requests a group; runs can be held at a step."""
    return start_engine("bundled", max_num_seqs=2, **GATED)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that lets held requests go on once it exists."""
    return tmp_path / "gate"


def held(steps: int, *holds: tuple[int, Path], **params: Any) -> Params:
    """Parameters of a run that is held at some of its steps until a file exists."""
    extra = {"holds": [[step, str(gate)] for step, gate in holds]}
    return Params(num_inference_steps=steps, extra_args=extra, **params)


def until(handle: RequestHandle, reached: Callable[[RequestEvent], bool]) -> RequestEvent:
    for event in handle.events():
        if reached(event):
            return event
    pytest.fail(f"it ended before: {handle.result(0)}")


def until_running(handle: RequestHandle) -> None:
    until(handle, lambda event: event.status == "running")


def submit_held(omni: Omni, prompt: str, params: Params) -> RequestHandle:
    """Submit a request and wait until its run is held; the preview before it is always told."""
    at = params.extra_args["holds"][0][0]
    handle = omni.submit(prompt, params, preview_every=at)
    until(handle, lambda event: event.preview is not None and event.step == at)
    return handle


def picture(handle: RequestHandle) -> np.ndarray[Any, Any]:
    output = handle.result(timeout_s=60).raise_for_error()
    assert output.images is not None
    return output.images[0]


def worker(omni: Omni) -> dict[str, Any]:
    found: dict[str, Any] = omni.status()["stages"][0]["workers"][0]
    return found


# -- joining, leaving, turns


def test_a_late_request_joins_between_steps_and_shares_the_rest(gated: Omni, gate: Path) -> None:
    ticks = worker(gated)["ticks"]
    long = submit_held(gated, "long", held(60, (5, gate), seed=1))
    late = gated.submit("late", Params(num_inference_steps=20, seed=2))
    until_running(late)
    (group,) = worker(gated)["groups"]
    states = {r["request_id"]: (r["step_index"], r["num_steps"]) for r in group["requests"]}
    assert states == {long.request_id: (5, 60), late.request_id: (0, 0)}
    gate.touch()
    np.testing.assert_array_equal(picture(late), pattern("late", 2, 16, 16))
    np.testing.assert_array_equal(picture(long), pattern("long", 1, 16, 16))
    metrics = late.result(0).metrics
    assert (metrics.num_steps, metrics.num_forwards, metrics.max_batch_size) == (20, 20, 2)
    assert metrics.mean_batch_size > 1.5
    assert long.result(0).metrics.num_forwards == 60
    assert worker(gated)["ticks"] - ticks < 60 + 20, "forwards were shared"


def test_a_short_request_leaves_early_and_a_newcomer_takes_its_place(
    gated: Omni, gate: Path
) -> None:
    second_gate = gate.with_name("second gate")
    long = submit_held(gated, "long", held(60, (10, gate), (40, second_gate)))
    short = gated.submit("short", Params(num_inference_steps=4))
    until_running(short)
    third = gated.submit("third", Params(num_inference_steps=50))
    until(third, lambda event: event.status == "waiting")
    gate.touch()
    assert picture(short).any()
    until_running(third)
    assert not long.done
    second_gate.touch()
    assert picture(third).any()
    assert picture(long).any()
    assert short.result(0).metrics.mean_batch_size == 2.0
    assert third.result(0).metrics.max_batch_size == 2


def test_groups_of_other_sizes_take_turns(gated: Omni, gate: Path) -> None:
    heard: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    first = submit_held(gated, "first", held(80, (2, gate)))
    second = gated.submit(
        "second", Params(num_inference_steps=80, height=24), preview_every=8, on_event=heard.put
    )
    third = gated.submit(
        "third", Params(num_inference_steps=80, height=32), preview_every=8, on_event=heard.put
    )
    for handle in (second, third):
        until(handle, lambda event: event.status == "waiting")
    gate.touch()
    for handle in (first, second, third):
        assert picture(handle).any()
    events = [heard.get() for _ in range(heard.qsize())]
    firsts = {h: next(i for i, e in enumerate(events) if e.request_id == h.request_id and e.step)
              for h in (second, third)}  # fmt: skip
    lasts = {h: next(i for i, e in enumerate(events)
                     if e.request_id == h.request_id and e.status.startswith("finished"))
             for h in (second, third)}  # fmt: skip
    assert firsts[second] < lasts[third]
    assert firsts[third] < lasts[second]
    assert third.result(0).metrics.max_batch_size == 1


def test_outputs_of_one_request_are_stepped_together(gated: Omni) -> None:
    (output,) = gated.generate("a", Params(seed=5, num_outputs_per_prompt=3))
    for index, made in enumerate(output.raise_for_error().images or ()):
        np.testing.assert_array_equal(made, pattern("a", 5 + index, 16, 16))
    assert output.metrics.num_forwards == 4


# -- ends


def test_an_abort_is_answered_at_once_and_frees_the_place(gated: Omni, gate: Path) -> None:
    stays = submit_held(gated, "stays", held(60, (4, gate), seed=3))
    goes = gated.submit("goes", Params(num_inference_steps=1000))
    until_running(goes)
    next_one = gated.submit("next", Params(seed=4))
    until(next_one, lambda event: event.status == "waiting")
    goes.abort()
    assert goes.result(timeout_s=20).aborted, "though the worker is held"
    assert not next_one.done
    gate.touch()
    np.testing.assert_array_equal(picture(next_one), pattern("next", 4, 16, 16))
    np.testing.assert_array_equal(picture(stays), pattern("stays", 3, 16, 16))
    assert [event.status for event in goes.events()][-1] == "finished_aborted"


def test_an_abort_of_everything_leaves_the_worker_idle(gated: Omni, gate: Path) -> None:
    held_one = submit_held(gated, "a", held(1000, (1, gate)))
    others = [gated.submit(f"{i}", Params(height=size, num_inference_steps=1000))
              for i, size in enumerate((16, 24, 32, 40, 48))]  # fmt: skip
    gated.abort([handle.request_id for handle in (held_one, *others)])
    for handle in (held_one, *others):
        assert handle.result(timeout_s=20).aborted
    gate.touch()
    assert gated.generate("after")[0].ok
    assert gated.status()["stages"][0]["running"] == 0
    assert worker(gated)["groups"] == []


def test_a_request_that_raises_ends_alone(gated: Omni) -> None:
    good, bad = gated.generate(["a", "b"], [Params(), Params(extra_args={"raise_text": "no"})])
    assert good.ok
    assert bad.error is not None
    assert (bad.error.code, "no" in str(bad.error)) == ("model_error", True)


def test_a_lost_workers_requests_run_again_and_no_others(
    start_own_engine: Callable[..., Omni], gate: Path
) -> None:
    omni = start_own_engine("bundled", max_num_seqs=2, replicas=2, **GATED)
    other_gate = gate.with_name("other")
    stays = submit_held(omni, "stays", held(40, (1, gate), seed=1))
    lost = submit_held(omni, "lost", held(40, (1, other_gate), seed=2))
    workers = omni.status()["stages"][0]["workers"]
    groups = {w["worker_id"]: [r["request_id"] for g in w["groups"] for r in g["requests"]]
              for w in workers}  # fmt: skip
    assert sorted(groups.values()) == sorted([[stays.request_id], [lost.request_id]]), "spread"
    (victim,) = [w for w in workers if groups[w["worker_id"]] == [lost.request_id]]
    os.kill(victim["pid"], signal.SIGKILL)
    gate.touch()
    np.testing.assert_array_equal(picture(stays), pattern("stays", 1, 16, 16))
    other_gate.touch()
    output = lost.result(timeout_s=120).raise_for_error()
    np.testing.assert_array_equal(output.images[0], pattern("lost", 2, 16, 16))
    assert all(output.ok for output in omni.generate(["b"] * 5))
    stage = omni.status()["stages"][0]
    assert sum(worker["restarts"] for worker in stage["workers"]) <= 1
    assert stage["running"] == 0


def test_an_exclusive_pipeline_has_one_request_at_a_time(
    start_own_engine: Callable[..., Omni],
) -> None:
    options = {**GATED, "pipeline": "gated_pipelines:ExclusiveSteps"}
    omni = start_own_engine("bundled", max_num_seqs=4, **options)
    params = [Params(seed=i, height=16 + 8 * (i % 2)) for i in range(6)]
    outputs = omni.generate(["a"] * 6, params)
    assert [output.raise_for_error().metrics.max_batch_size for output in outputs] == [1] * 6
    stage = omni.status()["stages"][0]
    assert (stage["max_num_seqs"], stage["effective_max_num_seqs"]) == (4, 1)
    assert stage["batch_sizes"] == {"1": 24}


def test_busy_time_counts_overlapping_plans_once(gated: Omni) -> None:
    params = [Params(height=size, num_inference_steps=40) for size in (16, 24, 32, 16)]
    assert all(output.ok for output in gated.generate(["a"] * 4, params))
    found = gated.status()
    assert found["stages"][0]["step_execution"] is True
    seen = worker(gated)
    assert seen["busy_s"] <= found["uptime_s"]
    assert seen["mean_requests_per_tick"] >= 1
    assert seen["mean_tick_ms"] * seen["ticks"] / 1000 <= seen["busy_s"]


# -- the bundled model


@pytest.fixture(scope="module")
def stepped(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine(step_execution=True, max_num_seqs=4, threads=1)


@pytest.fixture(scope="module")
def in_batches(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine(max_num_seqs=4, threads=1)


PROMPTS = (
    "a red circle on a white background",
    "a large blue star left of a small yellow square on a pink background",
    "a green ring on a gray background",
    "a purple heart above a white cross on a black background",
)
MIXED = [
    Params(num_inference_steps=3, seed=1, height=32, width=32),
    Params(num_inference_steps=6, seed=2, height=32, width=32, num_outputs_per_prompt=2),
    Params(num_inference_steps=9, seed=3, height=32, width=32, true_cfg_scale=1.5,
           negative_prompt="blue"),
    Params(num_inference_steps=12, seed=4, height=32, width=32),
]  # fmt: skip


def grey_levels(one: DiffusionOutput, other: DiffusionOutput) -> int:
    pairs = zip(one.images or (), other.images or (), strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def mixed_in_batches(in_batches: Omni) -> list[DiffusionOutput]:
    outputs = in_batches.generate(PROMPTS, MIXED)
    return [output.raise_for_error() for output in outputs]


def test_mixed_step_counts_share_forwards_and_give_the_pictures_of_request_mode(
    stepped: Omni, mixed_in_batches: list[DiffusionOutput]
) -> None:
    outputs = stepped.generate(PROMPTS, MIXED)
    for output, expected, params in zip(outputs, mixed_in_batches, MIXED, strict=True):
        assert grey_levels(output.raise_for_error(), expected) <= 1
        assert output.metrics.num_steps == params.num_inference_steps
        assert output.seed == params.seed
    assert outputs[0].metrics.mean_batch_size > 2
    assert outputs[0].metrics.max_batch_size == 4
    assert outputs[3].metrics.mean_batch_size > 1


def test_aborting_one_leaves_the_others_pictures_as_they_are(
    stepped: Omni, mixed_in_batches: list[DiffusionOutput]
) -> None:
    doomed = stepped.submit(PROMPTS[0], dataclasses.replace(MIXED[0], num_inference_steps=1000))
    others = [stepped.submit(prompt, params) for prompt, params in
              zip(PROMPTS[1:], MIXED[1:], strict=True)]  # fmt: skip
    until(doomed, lambda event: (event.step or 0) >= 1)
    doomed.abort()
    assert doomed.result(timeout_s=20).aborted
    for handle, expected in zip(others, mixed_in_batches[1:], strict=True):
        assert grey_levels(handle.result(timeout_s=60).raise_for_error(), expected) <= 1


def test_many_requests_with_mixed_adapters_sizes_and_steps_all_complete(stepped: Omni) -> None:
    adapters = [None, LoRARequest("night"), LoRARequest("outline", 0.5)]
    params = [
        Params(num_inference_steps=1 + i % 5, seed=i, height=32, width=(32, 64)[i % 2],
               lora_request=adapters[i % 3])
        for i in range(64)
    ]  # fmt: skip
    outputs = stepped.generate([PROMPTS[i % 4] for i in range(64)], params, timeout_s=240)
    for output, asked in zip(outputs, params, strict=True):
        (made,) = output.raise_for_error().images or ()
        assert made.shape == (32, asked.width, 3)
        assert output.metrics.num_steps == asked.num_inference_steps
        names = [lora.name for lora in output.applied_loras]
        assert names == ([] if asked.lora_request is None else [asked.lora_request.name])
    assert max(output.metrics.max_batch_size for output in outputs) == 4
    stage = stepped.status()["stages"][0]
    assert (stage["waiting"], stage["running"]) == (0, 0)


# -- the key


def step_key(capabilities: PipelineCapabilities, prompt: str = "a", **params: Any) -> Any:
    request = build_request(prompt, Params(**params))
    return request_key(request, capabilities, None, step_execution=True)


def test_what_is_private_to_a_stepped_request_is_not_in_its_key() -> None:
    native = PipelineCapabilities("P", extra_args=frozenset({"x", "y"}), per_request=frozenset("x"))
    plain = step_key(native)
    for private in (
        {"num_inference_steps": 9},
        {"sigmas": [1.0, 0.5]},
        {"strength": 0.5},
        {"eta": 0.5},
        {"sampler": "euler"},
        {"num_outputs_per_prompt": 3},
        {"seed": 1},
        {"extra_args": {"x": 1}},
    ):
        assert step_key(native, **private) == plain, private
        request = build_request("a", Params(**private))
        if not {"seed", "extra_args"} & set(private):
            assert request_key(request, native, None) != request_key(
                build_request("a"), native, None
            )
    for shared in (
        {"height": 64},
        {"num_frames": 9},
        {"guidance_scale": 2.0},
        {"true_cfg_scale": 2.0},
        {"negative_prompt": "b"},
        {"output_type": "latent"},
        {"extra_args": {"y": 1}},
    ):
        assert step_key(native, **shared) != plain, shared


def test_declared_guidance_is_private_to_a_stepped_request_and_adapters_never_are() -> None:
    declared = PipelineCapabilities(
        "P", per_request=frozenset({"true_cfg_scale", "negative_prompt"})
    )
    guided = step_key(declared, true_cfg_scale=4.0, negative_prompt="b")
    assert guided == step_key(declared)
    activation = AdapterActivation((Adapter("n", "p", "d"),), (1.0,))
    request = build_request("a")
    with_adapter = request_key(request, declared, activation, step_execution=True)
    assert with_adapter != step_key(declared)
