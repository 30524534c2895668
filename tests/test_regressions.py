"""Bugs that were found by attacking real engines; each test fails without its fix."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import PATTERN
from safetensors.numpy import load_file, save_file
from support_pipelines import pattern

from omni_engine import (
    AsyncOmniClient,
    DiffusionOutput,
    LoRARequest,
    Omni,
    OmniClient,
    OmniDiffusionSamplingParams,
)
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.handles import RequestEvent
from omni_engine.engine.prompts import build_requests
from omni_engine.protocol.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    OmniError,
)
from omni_engine.stages.bundled import ADAPTER_DIR
from omni_engine.stages.config import EngineArgs
from omni_engine.worker.abort import AbortFlags

NO_END = OmniDiffusionSamplingParams(extra_args={"sleep_ms": 60_000})
PATTERN_OPTIONS: dict[str, Any] = {
    "pipeline": PATTERN,
    "lora_modules": [],
    "default_sampling_params": {},
}


def is_right(output: DiffusionOutput, prompt: str) -> bool:
    output.raise_for_error()
    assert output.images is not None
    assert output.seed is not None
    return bool((output.images[0] == pattern(prompt, output.seed, 16, 16)).all())


def test_a_callback_may_abort_any_number_of_requests(
    start_own_engine: Callable[..., Omni],
) -> None:
    """Each abort wakes the connection's own thread; so many wake-ups once filled their pipe."""
    number, waiting = 1000, []
    omni = start_own_engine("bundled", max_num_seqs=1, **PATTERN_OPTIONS)
    with OmniClient(omni.endpoint) as client:
        client.submit("blocks", NO_END)

        def abort_all_once_the_last_waits(event: RequestEvent) -> None:
            if event.status == "waiting":
                waiting.append(event.request_id)
            if event.status == "waiting" and len(waiting) == number:
                for request_id in waiting:
                    client.abort([request_id])

        handles = client._connection.submit(
            build_requests(["a"] * number, NO_END), abort_all_once_the_last_waits
        )
        assert all(handle.result(timeout_s=60).aborted for handle in handles)


def test_any_number_of_requests_can_be_aborted_at_once(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine("bundled", max_num_seqs=1, **PATTERN_OPTIONS)
    handles = omni.client._connection.submit(build_requests(["a"] * 5000, NO_END))
    omni.client.abort([handle.request_id for handle in handles])
    assert all(handle.result(timeout_s=60).aborted for handle in handles)


def test_events_can_be_asked_for_again(client: OmniClient) -> None:
    handle = client.submit("a")
    heard = [event.status for event in handle.events()]
    assert heard[-1] == "finished_completed"
    assert list(handle.events()) == list(handle.events()) == []


def test_events_can_be_awaited_again(pattern_engine: Omni) -> None:
    async def scenario() -> None:
        async with AsyncOmniClient(pattern_engine.endpoint) as client:
            handle = await client.submit("a")
            async for event in handle.events():
                if event.status.startswith("finished"):
                    break
            assert [event async for event in handle.events()] == []
            assert [event async for event in handle.events()] == []

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", [{"height": 16}, "height", 5])
def test_parameters_of_a_wrong_type_are_refused(client: OmniClient, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params is not acceptable"):
        client.submit("a", wrong)
    bad, good = client.generate(["a", "b"], [wrong, OmniDiffusionSamplingParams()])
    assert isinstance(bad.error, InvalidRequestError)
    assert good.ok


def test_a_late_abort_does_not_reach_the_next_request_of_the_same_id() -> None:
    aborts = AbortFlags()
    aborts.expect(["a", "b"])
    aborts.set(["a", "unknown"])
    assert [aborts.is_set(name) for name in ("a", "b", "unknown")] == [True, False, False]
    aborts.clear(["a", "b"])
    aborts.set(["a"])  # crossed the request's end on its way
    aborts.expect(["a"])
    assert not aborts.is_set("a")


def test_aborts_that_race_with_the_end_spare_the_next_request(client: OmniClient) -> None:
    for _ in range(200):
        first = client.submit("a", request_id="again")
        for event in first.events():
            if event.status == "running":
                first.abort()
        first.result(timeout_s=20)
        output = client.submit("a", request_id="again").result(timeout_s=20)
        refused = output.error is not None and output.error.code == "duplicate_request_id"
        assert refused or is_right(output, "a")


def _use_in_child(omni: Omni, pipe: Pipe) -> None:
    try:
        omni.client.status()
    except OmniError as error:
        pipe.send(error.code)
    pipe.recv()  # lives on until the parent has closed the engine


def test_a_forked_child_neither_uses_nor_keeps_its_parents_engine(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine("bundled", **PATTERN_OPTIONS)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_use_in_child, args=(omni, theirs))
    child.start()
    assert ours.recv() == EngineClosedError.code
    assert omni.generate("a")[0].ok
    omni.close()
    assert omni._engine._process.returncode == 0, "it left by itself, before the timeout"
    ours.send("done")
    child.join()
    assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_engine_ends_with_its_forgotten_owner() -> None:
    omni = Omni("bundled", devices="cpu", **PATTERN_OPTIONS)
    engine = psutil.Process(omni._engine.pid)
    connection = omni.client._connection
    del omni
    gc.collect()
    engine.wait(60)
    connection.close()


def test_a_client_that_was_stopped_still_gets_its_result(pattern_engine: Omni) -> None:
    """Ctrl-Z and fg: its own silence is not the engine's."""
    code = (
        "import sys; from omni_engine import OmniClient, OmniDiffusionSamplingParams as P\n"
        "from omni_engine.engine import connection\n"
        "connection.PING_INTERVAL_S = 0.1\n"
        "client = OmniClient(sys.argv[1], reconnect_timeout_s=0.5)\n"
        "handle = client.submit('a', P(extra_args={'sleep_ms': 2000}))\n"
        "next(e for e in handle.events() if e.status == 'running'); print('runs', flush=True)\n"
        "print(handle.result().error)"
    )
    stopped = subprocess.Popen(
        [sys.executable, "-c", code, pattern_engine.endpoint], stdout=subprocess.PIPE, text=True
    )
    assert stopped.stdout is not None
    try:
        assert stopped.stdout.readline() == "runs\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        while pattern_engine.status()["stages"][0]["running"]:
            pass
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.communicate(timeout=60)[0] == "None\n"
    finally:
        stopped.kill()
        stopped.communicate()


def test_unsuitable_default_parameters_end_the_start() -> None:
    with pytest.raises(ConfigError, match="default_sampling_params don't suit PatternPipeline"):
        Omni("bundled", pipeline=PATTERN, devices="cpu", lora_modules=[],
             default_sampling_params={"extra_args": {"unheard_of": 1}})  # fmt: skip


def test_a_batch_may_be_larger_than_any_message_of_a_client(
    start_own_engine: Callable[..., Omni],
) -> None:
    """More frames and a larger header than clients may send, both ways."""
    omni = start_own_engine(
        "bundled", max_num_seqs=4096, request_batch_max_wait_ms=120_000, **PATTERN_OPTIONS
    )
    prompts = [f"{i}" + "\N{CJK UNIFIED IDEOGRAPH-6F22}" * 1500 for i in range(4096)]
    outputs = omni.generate(prompts, timeout_s=120)
    assert omni.status()["stages"][0]["batch_sizes"] == {"4096": 1}
    assert all(map(is_right, outputs, prompts))


def test_members_run_alone_keep_their_pictures_if_the_pipeline_reuses_its_arrays(
    start_own_engine: Callable[..., Omni],
) -> None:
    options = PATTERN_OPTIONS | {"pipeline": "support_pipelines:ReusingPipeline"}
    omni = start_own_engine("bundled", max_num_seqs=4, request_batch_max_wait_ms=60_000, **options)
    culprit = OmniDiffusionSamplingParams(extra_args={"raise_text": "no"})
    others = [OmniDiffusionSamplingParams()] * 3
    *outputs, failed = omni.generate(["a", "b", "c", "d"], [*others, culprit])
    assert failed.error is not None
    assert all(map(is_right, outputs, ["a", "b", "c"]))


@pytest.fixture
def night_twice(tmp_path: Path, start_own_engine: Callable[..., Omni]) -> Omni:
    """The bundled model with room for one adapter; two names mean the same content."""
    names = {"first": "night", "second": "night", "outline": "outline"}
    for name, source in names.items():
        shutil.copy(ADAPTER_DIR / f"{source}.safetensors", tmp_path / f"{name}.safetensors")
    modules = [{"name": n, "path": str(tmp_path / f"{n}.safetensors")} for n in names]
    return start_own_engine(max_num_seqs=2, max_loras=1, threads=1, lora_modules=modules,
                            request_batch_max_wait_ms=60_000)  # fmt: skip


def test_each_output_names_the_adapter_that_its_request_named(
    night_twice: Omni, tmp_path: Path
) -> None:
    params = [
        OmniDiffusionSamplingParams(num_inference_steps=1, lora_request=LoRARequest(name))
        for name in ("first", "second")
    ]
    outputs = night_twice.generate(["a", "a"], params)
    assert [output.applied_loras[0].name for output in outputs] == ["first", "second"]
    assert [output.metrics.max_batch_size for output in outputs] == [2, 2]


def test_an_adapter_that_changes_on_disk_is_never_taken_for_what_was_registered(
    night_twice: Omni, tmp_path: Path
) -> None:
    def run(name: str) -> DiffusionOutput:
        params = OmniDiffusionSamplingParams(
            num_inference_steps=1, seed=1, lora_request=LoRARequest(name)
        )
        return night_twice.generate(["a", "a"], params)[0]

    digests = {run("outline").raise_for_error().applied_loras[0].digest}
    assert run("first").ok, "which takes the only place"
    weights = load_file(tmp_path / "outline.safetensors")
    save_file({k: v * 2 for k, v in weights.items()}, tmp_path / "outline.safetensors")
    (before,) = digests
    changed = run("outline")
    assert changed.ok
    digests.add(changed.applied_loras[0].digest)
    assert len(digests) == 2, f"the output says that it is not {before}"
    assert run("first").ok


def test_a_broken_adapters_error_does_not_grow_with_every_request() -> None:
    registry = AdapterRegistry(
        EngineArgs.model_validate(
            {"model": "bundled", "lora_modules": [{"name": "x", "path": "bundled:night"}]}
        )
    )
    registry.refuse_checks(ModelLoadError("broken"))

    def depth() -> int:
        with pytest.raises(ModelLoadError) as caught:
            registry.resolve([LoRARequest("x")])
        return len(caught.traceback)

    assert [depth() for _ in range(3)] == [depth()] * 3


def test_a_temporary_directory_too_deep_for_sockets_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 110)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        Omni("bundled", devices="cpu")
