"""A request's life and everybody's death: events, aborts, vanished clients, signals, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import PATTERN, started_processes
from support_pipelines import pattern

from omni_engine import AsyncOmni, AsyncOmniClient, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.protocol.errors import (
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    PipelineContractError,
    RequestAbortedError,
    RequestTimeoutError,
)

NO_END = OmniDiffusionSamplingParams(extra_args={"sleep_ms": 600_000})
SLOW = OmniDiffusionSamplingParams(extra_args={"sleep_ms": 1500})


def waiting_and_running(client: OmniClient) -> tuple[int, int]:
    (stage,) = client.status()["stages"]
    return stage["waiting"], stage["running"]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def until_running(handle: Any) -> None:
    for event in handle.events():
        if event.status == "running":
            return
    pytest.fail(f"it never ran: {handle.result(0)}")


@pytest.fixture
def own_engine(start_own_engine: Callable[..., Omni]) -> Omni:
    return start_own_engine("bundled", pipeline=PATTERN, max_num_seqs=1, lora_modules=[],
                            default_sampling_params={})  # fmt: skip


def test_outputs_come_in_order_with_their_own_pictures(client: OmniClient) -> None:
    params = [OmniDiffusionSamplingParams(seed=seed) for seed in range(8)]
    outputs = client.generate([f"prompt {i}" for i in range(8)], params)
    for i, output in enumerate(outputs):
        assert output.raise_for_error().images is not None
        np.testing.assert_array_equal(output.images[0], pattern(f"prompt {i}", i, 16, 16))
    assert [output.metrics.max_batch_size for output in outputs] == [4] * 8


def test_two_hundred_shuffled_requests_each_get_their_own(client: OmniClient) -> None:
    rng = np.random.default_rng(0)
    asked = [(f"p{rng.integers(9)}", int(rng.integers(5)), int(rng.integers(1, 4)))
             for _ in range(200)]  # fmt: skip
    outputs = client.generate(
        [prompt for prompt, _, _ in asked],
        [OmniDiffusionSamplingParams(seed=s, num_outputs_per_prompt=n) for _, s, n in asked],
    )
    for (prompt, seed, n), output in zip(asked, outputs, strict=True):
        assert output.raise_for_error().images is not None
        assert len(output.images) == n
        for i, picture in enumerate(output.images):
            np.testing.assert_array_equal(picture, pattern(prompt, seed + i, 16, 16))


def test_a_drawn_seed_is_reported_and_makes_the_same_picture_again(client: OmniClient) -> None:
    first, second = client.generate(["same", "same"])
    assert first.seed != second.seed
    (again,) = client.generate("same", OmniDiffusionSamplingParams(seed=first.seed))
    assert first.images is not None
    assert again.images is not None
    np.testing.assert_array_equal(again.images[0], first.images[0])


def test_life_can_be_followed(client: OmniClient) -> None:
    heard: list[str] = []
    handle = client.submit("a", on_event=lambda event: heard.append(event.status))
    assert [event.status for event in handle.events()] == heard
    assert heard == ["waiting", "running", "finished_completed"]
    assert handle.done
    assert handle.result().ok


def test_one_bad_item_does_not_lose_the_others(client: OmniClient) -> None:
    outputs = client.generate(["good", "", "good too"])
    assert [output.ok for output in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        outputs[1].raise_for_error()


def test_prompts_may_come_from_a_generator(client: OmniClient) -> None:
    outputs = client.generate(f"prompt {i}" for i in range(3))
    assert [output.ok for output in outputs] == [True] * 3


def test_lists_of_different_length_are_refused(client: OmniClient) -> None:
    with pytest.raises(InvalidRequestError, match="differ in number"):
        client.generate(["a", "b"], [OmniDiffusionSamplingParams()])


def test_abort_of_a_waiting_request_takes_effect_at_once(client: OmniClient) -> None:
    running = client.submit("a", SLOW)
    until_running(running)
    waiting = client.submit("b", NO_END)
    assert next(waiting.events()).status == "waiting"
    waiting.abort()
    output = waiting.result(timeout_s=10)
    assert output.aborted
    assert isinstance(output.error, RequestAbortedError)
    assert not running.done, "the running one goes on"
    assert running.result(timeout_s=20).ok


def test_abort_of_a_running_request_is_reported_at_once_and_others_go_on(
    client: OmniClient,
) -> None:
    first, second = (client.submit(name, SLOW) for name in "ab")
    until_running(first)
    first.abort()
    assert first.result(timeout_s=10).aborted
    assert second.result(timeout_s=20).ok
    wait_until(lambda: waiting_and_running(client) == (0, 0), "the batch's slot is free")


def test_abort_of_an_unknown_id_is_harmless(client: OmniClient) -> None:
    client.abort(["nobody"])
    assert client.generate("a")[0].ok


def test_an_aborted_batch_stops_between_steps(start_own_engine: Callable[..., Omni]) -> None:
    """1000 steps would take minutes; the next request does not wait for them."""
    omni = start_own_engine(max_num_seqs=2, threads=1)
    handle = omni.client.submit("a red star on a white background",
                                OmniDiffusionSamplingParams(num_inference_steps=1000))  # fmt: skip
    until_running(handle)
    handle.abort()
    assert handle.result(timeout_s=10).aborted
    quick = OmniDiffusionSamplingParams(num_inference_steps=1)
    assert omni.generate("a", quick, timeout_s=20)[0].ok


def test_a_client_that_closes_aborts_its_requests_unless_detached(own_engine: Omni) -> None:
    with OmniClient(own_engine.endpoint) as other:
        other.submit("blocks", SLOW)
        lost = other.submit("lost", NO_END)
        kept = other.submit("kept", detached=True)
        assert next(lost.events()).status == "waiting"
        assert next(kept.events()).status == "waiting"
    wait_until(lambda: waiting_and_running(own_engine.client) == (0, 0), "all ended")
    (stage,) = own_engine.status()["stages"]
    assert stage["requests"] == {"received": 3, "completed": 1, "failed": 0, "aborted": 2}


def test_a_client_that_is_killed_is_noticed(own_engine: Omni) -> None:
    code = (
        "import sys; from omni_engine import OmniClient, OmniDiffusionSamplingParams as P\n"
        "client = OmniClient(sys.argv[1])\n"
        "handle = client.submit('a', P(extra_args={'sleep_ms': 600000}))\n"
        "next(handle.events()); print('submitted', flush=True); handle.result()"
    )
    doomed = subprocess.Popen(
        [sys.executable, "-c", code, own_engine.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert doomed.stdout is not None
    assert doomed.stdout.readline() == "submitted\n"
    doomed.kill()
    doomed.communicate()

    def aborted() -> bool:
        (stage,) = own_engine.status()["stages"]
        return bool(stage["requests"]["aborted"] == 1)

    wait_until(aborted, "the engine gave the silent client up", timeout_s=30)


def test_generate_with_a_timeout_aborts_what_is_late(client: OmniClient) -> None:
    late, fine = client.generate(["late", "fine"], [SLOW, OmniDiffusionSamplingParams()],
                                 timeout_s=1.0)  # fmt: skip
    assert isinstance(late.error, RequestTimeoutError)
    wait_until(lambda: waiting_and_running(client) == (0, 0), "nothing is left in the engine")
    assert fine.ok or isinstance(fine.error, RequestTimeoutError)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, "soon"])
def test_generate_takes_no_impossible_timeout(client: OmniClient, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate("a", timeout_s=timeout_s)
    assert caught.value.field == "timeout_s"


def test_no_engine_at_the_endpoint() -> None:
    with pytest.raises(EngineClosedError, match="no engine answers") as caught:
        OmniClient(f"ipc://{os.environ['TMPDIR']}/nobody", connect_timeout_s=0.5)
    assert caught.value.field == "endpoint"


def test_every_pending_call_ends_when_the_engine_stops(own_engine: Omni) -> None:
    with OmniClient(own_engine.endpoint) as client:
        running, waiting = client.submit("a", NO_END), client.submit("b")
        until_running(running)
        own_engine.close()
        for handle in (running, waiting):
            assert isinstance(handle.result(timeout_s=20).error, EngineClosedError)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A process that owns an engine which runs a request without end."""
    code = (
        "from omni_engine import Omni, OmniDiffusionSamplingParams as P\n"
        f"omni = Omni('bundled', pipeline={PATTERN!r}, devices='cpu', lora_modules=[],\n"
        "            default_sampling_params={})\n"
        "handle = omni.client.submit('a', P(extra_args={'sleep_ms': 600000}))\n"
        "for event in handle.events():\n"
        "    print(omni._engine.pid, event.status, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().endswith("running\n"):
        assert process.poll() is None
    yield process
    process.kill()
    process.communicate()


def test_nothing_outlives_a_killed_owner(owner: subprocess.Popen[str]) -> None:
    family = {process.pid for process in psutil.Process(owner.pid).children(recursive=True)}
    assert len(family) == 2, "an engine and its worker"
    owner.kill()
    owner.wait()
    wait_until(lambda: not family & started_processes(), "engine and worker are gone")


def test_a_worker_leaves_when_its_engine_is_killed(own_engine: Omni) -> None:
    handle = own_engine.client.submit("a", NO_END)
    until_running(handle)
    (worker,) = psutil.Process(own_engine._engine.pid).children()
    os.kill(own_engine._engine.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE,
               "the worker is gone")  # fmt: skip


def test_a_pipeline_without_the_contract_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(PipelineContractError, match="lacks forward"):
        Omni("bundled", pipeline="support_pipelines:NoForward", devices="cpu", lora_modules=[],
             default_sampling_params={})  # fmt: skip


def test_a_model_folder_without_an_index_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ModelLoadError, match="can't load model"):
        Omni(str(tmp_path), devices="cpu")


def test_requests_sent_while_the_model_loads_are_served(
    start_own_engine: Callable[..., Omni], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OmniClient, "wait_until_ready", lambda *_: None)
    omni = start_own_engine("bundled", pipeline=PATTERN, max_num_seqs=4, lora_modules=[],
                            default_sampling_params={})  # fmt: skip
    assert omni.status()["stages"][0]["state"] == "loading"
    good, bad = omni.generate(
        ["early", "odd"], [OmniDiffusionSamplingParams(), OmniDiffusionSamplingParams(height=9)]
    )
    assert good.ok
    assert isinstance(bad.error, InvalidRequestError)
    assert bad.error.field == "height"


def test_async_client_follows_aborts_and_generates(pattern_engine: Omni) -> None:
    async def scenario() -> None:
        async with AsyncOmniClient(pattern_engine.endpoint) as client:
            handle = await client.submit("a")
            assert [event.status async for event in handle.events()] == [
                "waiting",
                "running",
                "finished_completed",
            ]
            assert (await handle.result()).ok
            outputs = await client.generate(["b", "", "c"])
            assert [output.ok for output in outputs] == [True, False, True]
            endless = await client.submit("d", SLOW)
            task = asyncio.create_task(endless.result())
            async for event in endless.events():
                if event.status == "running":
                    task.cancel()
                if event.status.startswith("finished"):
                    assert event.status == "finished_aborted"
            for _ in range(20):  # a cancelled call must not harm the connection
                call = asyncio.create_task(client.status())
                await asyncio.sleep(0)
                call.cancel()
            assert (await client.status())["stages"][0]["name"] == "pattern"
            assert [model["name"] for model in await client.models()] == ["pattern"]

    asyncio.run(scenario())


def test_async_omni_owns_an_engine() -> None:
    async def scenario() -> None:
        options = {"pipeline": PATTERN, "lora_modules": [], "default_sampling_params": {}}
        async with AsyncOmni("bundled", devices="cpu", **options) as omni:
            first, second = await asyncio.gather(omni.generate("a"), omni.generate(["b", "c"]))
            assert [output.ok for output in (*first, *second)] == [True] * 3

    asyncio.run(scenario())
