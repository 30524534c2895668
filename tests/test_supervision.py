"""Workers that die, stall or never start; requests that kill them; deadlines; the engine's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import PATTERN
from fault_pipelines import LOAD_VARIABLE, REQUESTS, STEPS
from support_pipelines import pattern

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.deadlines import Deadlines
from omni_engine.engine.restarts import Death, RestartPolicy
from omni_engine.protocol.errors import WorkerLostError

MODES = [pytest.param(REQUESTS, False, id="requests"), pytest.param(STEPS, True, id="steps")]


def settings(pipeline: str, step_execution: bool, **more: Any) -> dict[str, Any]:
    plain = {"lora_modules": [], "default_sampling_params": {}, "worker_restart_backoff_s": 0.05}
    return {"model": "bundled", "pipeline": pipeline, "step_execution": step_execution,
            **plain, **more}  # fmt: skip


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def stage_of(client: OmniClient | Omni) -> dict[str, Any]:
    (stage,) = client.status()["stages"]
    return dict(stage)


def params(seed: int) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(seed=seed)


def is_right(output: Any, prompt: str, seed: int) -> None:
    assert output.raise_for_error().images is not None
    np.testing.assert_array_equal(output.images[0], pattern(prompt, seed, 16, 16))


@pytest.mark.parametrize(("pipeline", "steps"), MODES)
def test_requests_of_a_killed_worker_run_again_with_the_same_result(
    start_own_engine: Callable[..., Omni], tmp_path: Path, pipeline: str, steps: bool
) -> None:
    omni = start_own_engine(**settings(pipeline, steps, max_num_seqs=3))
    prompts = [f"{name} [hang] [once={tmp_path / name}]" for name in "abc"]
    with ThreadPoolExecutor() as pool:  # all in one message, so that they start together
        asked = pool.submit(omni.generate, prompts, [params(i) for i in range(3)], timeout_s=300)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 3, "all have begun, one hangs")
        (worker,) = stage_of(omni)["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        for seed, (output, prompt) in enumerate(zip(asked.result(), prompts, strict=True)):
            is_right(output, prompt, seed)
    stage = stage_of(omni)
    (worker,) = stage["workers"]
    assert worker["restarts"] >= 1
    assert worker["deaths"][0]["error"]["code"] == "worker_lost"
    assert "SIGKILL" in worker["deaths"][0]["error"]["message"]
    assert stage["state"] == "ready"
    assert stage["error"] is None
    assert stage["requests"] == {"received": 3, "completed": 3, "failed": 0, "aborted": 0}


@pytest.mark.parametrize(("pipeline", "steps"), MODES)
def test_a_poisonous_request_fails_alone_among_fifty(
    start_own_engine: Callable[..., Omni], pipeline: str, steps: bool
) -> None:
    omni = start_own_engine(**settings(pipeline, steps, max_num_seqs=8))
    prompts = [f"prompt {i}" for i in range(50)]
    prompts[17] = "poison [exit=9]"
    outputs = omni.generate(prompts, [params(seed) for seed in range(50)], timeout_s=300)
    for seed, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if seed == 17:
            assert output.error is not None
            assert output.error.code == "worker_died_repeatedly"
            assert "exit code 9" in str(output.error)
        else:
            is_right(output, prompt, seed)
    assert omni.generate("after")[0].ok
    stage = stage_of(omni)
    assert stage["state"] == "ready"
    assert stage["workers"][0]["restarts"] == 2
    assert (stage["waiting"], stage["running"]) == (0, 0)


@pytest.mark.parametrize(("pipeline", "steps"), MODES)
def test_several_poisonous_requests_shut_nobody_out(
    start_own_engine: Callable[..., Omni], pipeline: str, steps: bool
) -> None:
    """Each kills two workers, more than the stage bears: but what they explain doesn't count."""
    omni = start_own_engine(**settings(pipeline, steps, max_num_seqs=4, max_worker_deaths=3))
    assert omni.generate("before")[0].ok
    prompts = [f"poison {i} [exit=9]" if i % 3 == 0 else f"prompt {i}" for i in range(6)]
    outputs = omni.generate(prompts, [params(seed) for seed in range(6)], timeout_s=300)
    codes = [None if output.error is None else output.error.code for output in outputs]
    assert codes == ["worker_died_repeatedly", None, None] * 2
    assert len(stage_of(omni)["workers"][0]["deaths"]) >= 3


def test_another_worker_goes_on_while_one_is_replaced(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(
        **settings(REQUESTS, False, max_num_seqs=1, replicas=2, worker_restart_backoff_s=30)
    )
    first = stage_of(omni)["workers"][0]
    os.kill(first["pid"], signal.SIGTERM)
    wait_until(lambda: stage_of(omni)["state"] == "degraded", "the death is noticed")
    assert all(output.ok for output in omni.generate(["a", "b", "c"]))
    stage = stage_of(omni)
    assert [worker["state"] for worker in stage["workers"]] == ["restarting", "idle"]
    assert 0 < stage["workers"][0]["next_start_s"] <= 30
    assert stage["workers"][0]["pid"] is None
    assert "SIGTERM" in stage["error"]["message"]


def test_a_worker_that_dies_again_and_again_is_left_dead(
    start_own_engine: Callable[..., Omni],
) -> None:
    """The stage is down then, tells why with the worker's last words, and refuses fast."""
    omni = start_own_engine(
        **settings(REQUESTS, False, max_worker_deaths=3, worker_death_window_s=3600)
    )
    for _ in range(3):
        wait_until(lambda: stage_of(omni)["workers"][0]["state"] == "idle", "it is up")
        os.kill(stage_of(omni)["workers"][0]["pid"], signal.SIGABRT)
        wait_until(lambda: stage_of(omni)["workers"][0]["state"] != "idle", "its death is noticed")
    stage = stage_of(omni)
    assert stage["state"] == "down"
    (worker,) = stage["workers"]
    assert (worker["state"], worker["restarts"], len(worker["deaths"])) == ("dead", 2, 3)
    assert "Fatal Python error: Aborted" in worker["deaths"][-1]["stderr_tail"]
    (output,) = omni.generate("a")
    assert output.error is not None
    assert output.error.code == "stage_unavailable"
    assert output.error.retry_after_ms is not None
    assert 0 < output.error.retry_after_ms <= 3_600_000


def test_a_stage_that_was_down_comes_back_once_the_window_has_passed(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(
        **settings(REQUESTS, False, max_worker_deaths=1, worker_death_window_s=2)
    )
    os.kill(stage_of(omni)["workers"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: stage_of(omni)["state"] == "down", "it is down")
    wait_until(lambda: stage_of(omni)["state"] == "ready", "it is back")
    is_right(omni.generate("a", params(3))[0], "a", 3)


@pytest.mark.parametrize("ending", ["exit=3", "segfault"])
def test_a_worker_that_dies_while_it_loads_is_started_again(
    start_own_engine: Callable[..., Omni],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ending: str,
) -> None:
    monkeypatch.setenv(LOAD_VARIABLE, f"[{ending}] [once={tmp_path / 'tried'}]")
    omni = start_own_engine(**settings(REQUESTS, False))
    is_right(omni.generate("a", params(3))[0], "a", 3)
    assert stage_of(omni)["workers"][0]["restarts"] == 1


def test_requests_wait_while_the_only_worker_is_replaced(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(**settings(REQUESTS, False, worker_restart_backoff_s=1.0))
    os.kill(stage_of(omni)["workers"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: stage_of(omni)["state"] == "degraded", "the death is noticed")
    is_right(omni.submit("a", params(3)).result(60), "a", 3)


def test_an_aborted_request_of_a_dead_worker_does_not_run_again(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(**settings(REQUESTS, False))
    handle = omni.submit("a [hang]")
    wait_until(lambda: stage_of(omni)["running"] == 1, "it runs")
    handle.abort()
    assert handle.result(20).aborted
    os.kill(stage_of(omni)["workers"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: stage_of(omni)["workers"][0]["restarts"] == 1, "the worker is replaced")
    assert omni.generate("b")[0].ok
    stage = stage_of(omni)
    assert (stage["waiting"], stage["running"]) == (0, 0)
    assert stage["requests"] == {"received": 2, "completed": 1, "failed": 0, "aborted": 1}


@pytest.mark.parametrize(("pipeline", "steps"), MODES)
def test_a_request_whose_time_is_over_is_ended(
    start_own_engine: Callable[..., Omni], pipeline: str, steps: bool
) -> None:
    omni = start_own_engine(**settings(pipeline, steps, max_num_seqs=1))
    with OmniClient(omni.endpoint) as client:
        running = client.submit("a [sleep=0.6]", timeout_s=0.5)
        waiting = client.submit("b", params(1), timeout_s=0.6)
        patient = client.submit("c", params(2), timeout_s=3600)
        outputs = [handle.result(60) for handle in (running, waiting, patient)]
    assert [None if o.error is None else o.error.code for o in outputs] == [
        "timeout", "timeout", None,
    ]  # fmt: skip
    assert outputs[0].error is not None
    assert outputs[0].error.field == "timeout_s"
    is_right(outputs[2], "c", 2)
    assert stage_of(omni)["requests"]["failed"] == 2


def test_what_was_taken_in_is_finished_before_the_end(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine(**settings(REQUESTS, False, max_num_seqs=1, shutdown_timeout_s=60))
    handles = [omni.submit(f"{i} [sleep=0.05]", params(i)) for i in range(4)]
    wait_until(lambda: stage_of(omni)["running"] == 1, "the first runs")
    os.kill(omni._engine.pid, signal.SIGTERM)
    for i, handle in enumerate(handles):
        is_right(handle.result(60), f"{i} [sleep=0.05]", i)


def test_the_end_does_not_wait_longer_than_it_may(start_own_engine: Callable[..., Omni]) -> None:
    omni = start_own_engine(**settings(REQUESTS, False, max_num_seqs=1, shutdown_timeout_s=0.5))
    running, waiting = omni.submit("a [hang]"), omni.submit("b")
    wait_until(lambda: stage_of(omni)["running"] == 1, "it runs")
    engine = psutil.Process(omni._engine.pid)
    engine.send_signal(signal.SIGTERM)
    for handle in (running, waiting):
        error = handle.result(20).error
        assert error is not None
        assert error.code == "engine_closed"
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE,
               "the engine is gone", 20)  # fmt: skip


def test_a_process_that_can_not_be_started_is_tried_again(
    start_own_engine: Callable[..., Omni],
) -> None:
    """The engine has no file descriptor left for a worker; it goes on, and so does the worker."""
    omni = start_own_engine(**settings(REQUESTS, False, max_worker_deaths=1000))
    engine = psutil.Process(omni._engine.pid)
    before = engine.rlimit(psutil.RLIMIT_NOFILE)
    worker = stage_of(omni)["workers"][0]["pid"]
    engine.rlimit(psutil.RLIMIT_NOFILE, (engine.num_fds(), before[1]))
    os.kill(worker, signal.SIGKILL)

    def told() -> bool:
        deaths = stage_of(omni)["workers"][0]["deaths"]
        return any("can't be started" in death["error"]["message"] for death in deaths)

    wait_until(told, "it was tried in vain")
    engine.rlimit(psutil.RLIMIT_NOFILE, before)
    is_right(omni.submit("a", params(3)).result(120), "a", 3)


def test_an_engine_whose_log_nobody_reads_goes_on(tmp_path: Path) -> None:
    """More than a pipe holds: it answers, and ends when it is told to."""
    endpoint = f"ipc://{tmp_path}/engine"
    executable = str(Path(sys.executable).with_name("omni-engine"))
    command = [executable, "serve", "bundled", "--pipeline", PATTERN, "--devices", "cpu",
               "--endpoint", endpoint]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as engine:
        try:
            assert engine.stdout is not None
            while "is ready" not in engine.stdout.readline():
                assert engine.poll() is None
            with OmniClient(endpoint) as client:
                for _ in range(6):
                    assert all(output.ok for output in client.generate(["a"] * 60, timeout_s=60))
                assert stage_of(client)["requests"]["completed"] == 360
            engine.terminate()
            assert engine.wait(30) == 0
        finally:
            engine.kill()


# -- pure parts


def died(at: float, **more: Any) -> Death:
    return Death(at, WorkerLostError("it died"), **more)


def test_the_delay_doubles_up_to_half_a_minute() -> None:
    policy = RestartPolicy(backoff_s=0.5, max_deaths=20, window_s=1000)
    delays = []
    for _ in range(10):
        policy.note(died(100.0))
        delays.append(policy.next_start(100.0)[0] - 100.0)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]


def test_after_too_many_deaths_the_window_has_to_pass() -> None:
    policy = RestartPolicy(backoff_s=0.5, max_deaths=3, window_s=60)
    for at in (0.0, 10.0, 20.0):
        policy.note(died(at))
    assert policy.next_start(20.0) == (60.0, True)
    policy.note(died(61.0))
    assert policy.next_start(61.0) == (70.0, True)
    policy.note(died(200.0))
    assert policy.next_start(200.0) == (200.5, False)


def test_deaths_that_a_request_explains_do_not_count_unless_nothing_else_happens() -> None:
    policy = RestartPolicy(backoff_s=0.5, max_deaths=2, window_s=600)
    for at in range(7):
        policy.note(died(float(at), explained=True))
    assert policy.next_start(7.0) == (7.5, False)
    policy.note(died(8.0, explained=True))
    assert policy.next_start(8.0) == (606.0, True), "eight in a row, and nothing completed"
    policy.note(died(9.0, explained=True, was_useful=True))
    assert policy.next_start(9.0) == (9.5, False)


def test_deadlines_come_in_order_and_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    rng = np.random.default_rng(0)
    times = {f"r{i}": float(at) for i, at in enumerate(rng.permutation(2000))}
    for request_id, at in times.items():
        deadlines.add(request_id, at)
    kept = {request_id for request_id in times if rng.random() < 0.05}
    for request_id in times:
        if request_id not in kept:
            deadlines.discard(request_id)
    deadlines.discard("nobody")
    assert len(deadlines) == len(kept)
    assert len(deadlines._heap) <= 2 * len(kept) + 64
    assert deadlines.next() == min(times[one] for one in kept)
    assert deadlines.take_due(-1.0) == []
    assert deadlines.take_due(1000.0) == sorted((i for i in kept if times[i] <= 1000.0),
                                                key=times.__getitem__)  # fmt: skip
    deadlines.add("r0", 1.0)
    deadlines.add("r0", 5.0)
    assert deadlines.take_due(2.0) == [], "added again, later"
    assert "r0" in deadlines.take_due(5.0)
    deadlines.take_due(1e9)
    assert (len(deadlines), deadlines.next(), deadlines._heap) == (0, None, [])
