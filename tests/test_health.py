"""Health: of the loop and of stages from real liveness, and what a container's probe sees."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import PATTERN
from rich.console import Console

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.cli.health import tables
from omni_engine.cli.inspection import print_status
from omni_engine.engine.health import (
    SILENCE_S,
    STUCK_S,
    LoopHealth,
    describe_health,
    stage_health,
)
from omni_engine.stages.config import EngineArgs

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
CHECK_BOUND_S = 20.0
"""Clients wait longer than that for a silent engine; a busy machine starts programs slowly."""
LIMITS = EngineArgs(model="bundled", worker_stall_timeout_s=20, worker_heartbeat_timeout_s=10)


def worker(state: str, **more: Any) -> dict[str, Any]:
    """A worker as status shows it."""
    shown = {"worker_id": "w0", "state": state, "error": None, "since_seen_ms": 500.0,
             "working_ms": 0.0, "next_start_s": None}  # fmt: skip
    return shown | more


DIED = {"code": "worker_lost", "message": "killed by signal 9"}


@pytest.mark.parametrize(
    ("state", "workers", "expected", "reason"),
    [
        ("ready", [worker("idle")], "healthy", ""),
        ("ready", [worker("idle", since_seen_ms=SILENCE_S * 1000 + 1)], "unhealthy", "is silent"),
        ("ready", [worker("busy", working_ms=19_000.0)], "healthy", ""),
        ("ready", [worker("busy", working_ms=19_600.0)], "unhealthy", "no progress for 20.1 s"),
        ("ready", [worker("busy", since_seen_ms=9_900.0)], "healthy", ""),
        ("ready", [worker("busy", since_seen_ms=10_100.0)], "unhealthy", "silent for 10.1 s"),
        ("ready", [worker("idle", error=DIED)], "unhealthy", "killed by signal 9"),
        ("degraded", [worker("dead", error=DIED), worker("busy")], "healthy", ""),
        (
            "degraded",
            [worker("restarting", error=DIED, next_start_s=2.0)],
            "unhealthy",
            "w0 is restarting, to be started in 2.0 s (killed by signal 9)",
        ),
        ("down", [worker("dead", error=DIED)], "unhealthy", "w0 is dead"),
        ("loading", [worker("loading")], "starting", "model m is starting: w0 is loading"),
    ],
)
def test_a_stage_is_healthy_when_a_worker_works_or_answers(
    state: str, workers: list[dict[str, Any]], expected: str, reason: str
) -> None:
    found = stage_health("m", state, workers, LIMITS)
    assert found["state"] == expected
    assert reason in "".join(found["reasons"])
    assert bool(found["reasons"]) == (expected != "healthy")


def test_the_loops_figures() -> None:
    loop = LoopHealth(now=100.0)
    for start in range(100, 130):
        loop.note_turn(start + 0.1, start + 0.102)
        loop.note_turn(start + 0.2, start + 0.201)
    loop.note_turn(130.1, 131.6)
    assert loop.describe(131.7)["loop_turns"] == 61
    assert loop.describe(131.7)["last_turn_ms_ago"] == pytest.approx(100)
    assert loop.describe(131.7)["slowest_turn_ms"] == pytest.approx(1500)
    for start in range(132, 193):
        loop.note_turn(start + 0.1, start + 0.103)
    assert loop.describe(193.0)["slowest_turn_ms"] == pytest.approx(3)
    assert loop.reasons(193.0) == []
    assert "has not turned for" in loop.reasons(192.2 + STUCK_S)[0]
    assert loop.describe(300.0)["slowest_turn_ms"] == 0.0


def test_an_engine_is_healthy_when_all_of_it_is() -> None:
    good, bad = {"health": {"reasons": []}}, {"health": {"reasons": ["model m is starting"]}}
    loop = LoopHealth(now=5.0)
    assert describe_health([good], loop, 5.1)["healthy"] is True
    assert describe_health([good, bad], loop, 5.1)["reasons"] == ["model m is starting"]
    stopping = describe_health([good], loop, 5.1, stopping=True)
    assert (stopping["healthy"], stopping["reasons"]) == (False, ["the engine is stopping"])
    assert describe_health([good], loop, 60.0)["healthy"] is False


# -- with real processes


def check(endpoint: str, *more: str) -> tuple[int, str]:
    """What ``status --check`` says, and that it does so in time."""
    started = time.monotonic()
    done = subprocess.run([COMMAND, "status", "--check", "--connect", endpoint, *more],
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert time.monotonic() - started < CHECK_BOUND_S
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that hangs meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


OPTIONS = {"pipeline": PATTERN, "lora_modules": [], "name": "pattern",
           "default_sampling_params": {}, "worker_restart_backoff_s": 0.2}  # fmt: skip


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine("bundled", **OPTIONS)


def only_worker(client: OmniClient) -> dict[str, Any]:
    ((found,),) = (stage["workers"] for stage in client.status()["stages"])
    return dict(found)


def test_a_probe_sees_an_engine_that_hangs(engine: Omni) -> None:
    with OmniClient(engine.endpoint) as client:
        client.wait_until_ready(60)
        pid, first = client.status()["pid"], client.status()["health"]
        assert check(engine.endpoint) == (0, "healthy\n")
        with stopped(pid):
            code, text = check(engine.endpoint)
            assert code == 1
            assert "did not answer" in text or "no engine answers" in text
        wait_until(lambda: check(engine.endpoint)[0] == 0, "healthy again")
        code, text = check(engine.endpoint, "--json")
        health = json.loads(text)
        assert (code, health["healthy"], health["reasons"]) == (0, True, [])
        assert health["loop_turns"] > first["loop_turns"]
    assert check(f"ipc://{os.environ['TMPDIR']}/nobody")[0] == 1


def test_a_worker_that_hangs_is_no_health_though_its_process_lives(engine: Omni) -> None:
    with OmniClient(engine.endpoint) as client:
        client.wait_until_ready(60)
        pid = only_worker(client)["pid"]
        with stopped(pid):
            health = wait_until(
                lambda: (h := client.status()["health"]) and not h["healthy"] and h, "noticed"
            )
            assert "stage0-worker0 is silent for" in health["reasons"][0]
            assert check(engine.endpoint)[0] == 1
        wait_until(lambda: client.status()["health"]["healthy"], "healthy again")


def test_a_long_forward_is_healthy(engine: Omni) -> None:
    with OmniClient(engine.endpoint) as client:
        client.wait_until_ready(60)
        sleep_ms = (SILENCE_S + 1) * 1000
        handle = client.submit("a", OmniDiffusionSamplingParams(extra_args={"sleep_ms": sleep_ms}))
        wait_until(lambda: only_worker(client)["state"] == "busy", "at work")
        while not handle.done:
            assert client.status()["health"]["reasons"] == []
            time.sleep(0.1)
        assert handle.result().ok


def test_status_tells_of_a_worker_that_died(start_own_engine: Callable[..., Omni]) -> None:
    with OmniClient(start_own_engine("bundled", **OPTIONS).endpoint) as client:
        client.wait_until_ready(60)
        psutil.Process(only_worker(client)["pid"]).kill()
        gone = wait_until(
            lambda: (s := client.status()) and not s["health"]["healthy"] and s, "noticed"
        )
        assert "stage0-worker0 is" in gone["health"]["reasons"][0]
        wait_until(lambda: client.status()["health"]["healthy"], "healthy again", 60)
        assert only_worker(client)["restarts"] == 1
        shown = Console(width=200, file=io.StringIO())
        print_status(client.status(), shown)
    text = shown.file.getvalue()
    assert "last deaths of workers of pattern" in text
    assert "killed by signal 9" in text


def test_status_shows_what_was_learnt_when_memory_ran_out() -> None:
    stage = {"name": "m", "workers": [worker("idle", deaths=[], memory_caps={"64 x 64": 2})]}
    assert list(tables(stage)) == [
        ("what fits into the memory of workers of m", {"w0": "64 x 64: at most 2 rows"})
    ]


def test_an_engine_that_starts_is_not_healthy_yet(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/e"
    process = subprocess.Popen(
        [COMMAND, "serve", "--pipeline", PATTERN, "--devices", "cpu", "--endpoint", endpoint],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        with OmniClient(endpoint) as client:
            first = client.status()
            assert first["stages"][0]["health"]["state"] == "starting"
            assert first["health"]["reasons"] == [
                "model bundled is starting: stage0-worker0 is loading"
            ]
            client.wait_until_ready(60)
        assert check(endpoint) == (0, "healthy\n")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
