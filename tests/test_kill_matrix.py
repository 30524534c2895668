"""Every kind of end, of every process, at every moment: what can come out right does; no hangs.

30 requests are in flight on 2 workers. Pictures are compared with those of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fault_pipelines import REQUESTS, STEPS
from support_pipelines import pattern

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams

pytestmark = pytest.mark.slow

COUNT = 30
BOUND_S = 90.0
"""Within which everything has ended, on two cores that do other things as well."""

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
PROMPTS = [f"prompt {i} [sleep=0.05]" for i in range(COUNT)]
SEEDS = [OmniDiffusionSamplingParams(seed=i) for i in range(COUNT)]

Start = Callable[..., Omni]


BOTH_MODES = pytest.mark.parametrize(
    "mode", [REQUESTS, STEPS], indirect=True, ids=["requests", "steps"]
)


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", REQUESTS)


@pytest.fixture
def start(mode: str, start_own_engine: Start) -> Start:
    """Start engines with two workers."""

    def started(**options: Any) -> Omni:
        return start_own_engine(
            "bundled", pipeline=mode, step_execution=mode == STEPS, replicas=2,
            max_num_seqs=4, threads=1, lora_modules=[], default_sampling_params={},
            worker_restart_backoff_s=0.05, **options,
        )  # fmt: skip

    return started


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def stage_of(client: Omni | OmniClient) -> dict[str, Any]:
    (stage,) = client.status()["stages"]
    return dict(stage)


def is_right(output: Any, index: int) -> bool:
    picture = pattern(PROMPTS[index], index, 16, 16)
    return output.ok and bool(np.array_equal(output.images[0], picture))


def codes(outputs: list[Any]) -> list[str | None]:
    return [None if output.error is None else output.error.code for output in outputs]


def ended(handles: list[Any]) -> list[Any]:
    deadline = time.monotonic() + BOUND_S
    return [handle.result(max(0.1, deadline - time.monotonic())) for handle in handles]


def submit_all(client: OmniClient) -> list[Any]:
    return [client.submit(*one) for one in zip(PROMPTS, SEEDS, strict=True)]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_are_right_and_both_workers_back(omni: Omni, outputs: list[Any], deaths: int) -> None:
    assert codes(outputs) == [None] * COUNT
    assert all(is_right(output, i) for i, output in enumerate(outputs))
    wait_until(lambda: stage_of(omni)["state"] == "ready", "both workers are back")
    stage = stage_of(omni)
    assert sum(worker["restarts"] for worker in stage["workers"]) == deaths
    assert (stage["waiting"], stage["running"]) == (0, 0)
    assert stage["requests"]["completed"] == stage["requests"]["received"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_worker_that_is_idle(start: Start, number: signal.Signals) -> None:
    omni = start()
    os.kill(stage_of(omni)["workers"][0]["pid"], number)
    deaths = 0 if number == signal.SIGINT else 1
    if deaths:
        wait_until(lambda: stage_of(omni)["workers"][0]["deaths"], "its death is noticed")
    all_are_right_and_both_workers_back(omni, ended(submit_all(omni.client)), deaths)


@BOTH_MODES
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_worker_in_a_forward(start: Start, number: signal.Signals) -> None:
    omni = start()
    handles = submit_all(omni.client)
    wait_until(lambda: stage_of(omni)["workers"][0]["state"] == "busy", "it has work")
    os.kill(stage_of(omni)["workers"][0]["pid"], number)
    deaths = 0 if number == signal.SIGINT else 1
    all_are_right_and_both_workers_back(omni, ended(handles), deaths)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_worker_while_it_loads(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(OmniClient, "wait_until_ready", lambda *_: None)
    omni = start()
    handles = submit_all(omni.client)
    (first, _) = stage_of(omni)["workers"]
    assert first["state"] == "loading"
    os.kill(first["pid"], number)
    outputs = ended(handles)
    stage = stage_of(omni)
    # An interpreter that has just started does not know yet that Ctrl-C is not for it.
    deaths = stage["workers"][0]["restarts"] + (stage["workers"][0]["next_start_s"] is not None)
    assert deaths == 1 or (deaths == 0 and number == signal.SIGINT)
    all_are_right_and_both_workers_back(omni, outputs, deaths)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_the_engine_is_asked_to_end(start: Start, number: signal.Signals) -> None:
    """What it has taken in is finished; nothing is left of it."""
    omni = start(shutdown_timeout_s=60)
    family = psutil.Process(omni._engine.pid).children(recursive=True)
    handles = submit_all(omni.client)
    wait_until(lambda: stage_of(omni)["running"], "some run")
    os.kill(omni._engine.pid, number)
    outputs = ended(handles)
    assert all(is_right(output, i) for i, output in enumerate(outputs)), codes(outputs)
    wait_until(lambda: not omni._engine.running, "the engine is gone")
    assert omni._engine._process.returncode == 0
    assert all(map(is_gone, family))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_the_engine_has_no_time_to_end(start: Start, number: signal.Signals) -> None:
    """What it can't finish ends with a typed error."""
    omni = start(shutdown_timeout_s=0.2)
    handles = submit_all(omni.client)
    wait_until(lambda: stage_of(omni)["running"], "some run")
    os.kill(omni._engine.pid, number)
    outputs = ended(handles)
    for i, output in enumerate(outputs):
        assert is_right(output, i) or output.error.code == "engine_closed", output.error
    assert "engine_closed" in codes(outputs)
    wait_until(lambda: not omni._engine.running, "the engine is gone")


@BOTH_MODES
def test_the_engine_is_killed(start: Start) -> None:
    """Its workers leave within two seconds and take its socket file along; clients are told."""
    folder = Path(os.environ["TMPDIR"], "killed")
    folder.mkdir()
    omni = start(endpoint=f"ipc://{folder}/engine")
    family = psutil.Process(omni._engine.pid).children(recursive=True)
    assert len(family) == 2
    handles = submit_all(omni.client)
    wait_until(lambda: stage_of(omni)["running"], "some run")
    os.kill(omni._engine.pid, signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, family)), "the workers are gone", 5.0)
    for i, output in enumerate(ended(handles)):
        assert is_right(output, i) or output.error.code == "engine_closed", output.error
    assert list(folder.iterdir()) == []
    folder.rmdir()


_CLIENT = """
import sys
from omni_engine import OmniClient, OmniDiffusionSamplingParams
with OmniClient(sys.argv[1]) as client:
    prompts = [f"of the doomed {i} [sleep=0.3]" for i in range(30)]
    handles = [client.submit(prompt) for prompt in prompts]
    while not any(handle.status == "running" for handle in handles):
        pass
    print("running", flush=True)
    for handle in handles:
        handle.result()
"""


@pytest.fixture
def doomed() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start client processes, each with 30 requests in flight."""
    started = []

    def start_client(endpoint: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, endpoint], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        return process

    yield start_client
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_client(
    start: Start, doomed: Callable[[str], subprocess.Popen[str]], number: signal.Signals
) -> None:
    """Its requests make room; those of another come out right."""
    omni = start()
    process = doomed(omni.endpoint)
    handles = submit_all(omni.client)
    process.send_signal(number)
    process.wait(20)
    outputs = ended(handles)
    assert all(is_right(output, i) for i, output in enumerate(outputs)), codes(outputs)

    def is_drained() -> bool:
        stage = stage_of(omni)
        return (stage["waiting"], stage["running"]) == (0, 0)

    wait_until(is_drained, "nothing of the client is left")
    counts = stage_of(omni)["requests"]
    assert counts["received"] == 2 * COUNT, json.dumps(counts)
    assert counts["completed"] + counts["aborted"] == 2 * COUNT
    assert counts["aborted"] > 0
