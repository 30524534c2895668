"""The log: one record, one line, whatever names clients choose; one line for each request."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATTERN

from omni_engine import OmniClient
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.request_log import RequestLog
from omni_engine.engine.restarts import Death
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.protocol.errors import (
    InvalidRequestError,
    ModelError,
    RequestAbortedError,
    WorkerLostError,
)
from omni_engine.protocol.logs import FORMAT_VARIABLE, passed_on
from omni_engine.protocol.outputs import AppliedLoRA, DiffusionOutput, OutputMetrics
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
LONG_TEXT = "no\n{} good " * 1000
_SCRIPT = """
import logging, threading, warnings
from omni_engine.protocol.logs import start_logging
start_logging("engine", "INFO")
log = logging.getLogger("x")
log.debug("not shown")
log.warning("adapter %s: ümlaut", "\\x1b[31mred\\n2026 ERROR engine x: made up", extra={
    "request_id": 'a"\\n{"level": "ERROR"}', "level": "FORGED", "worker_id": None,
    "ratio": float("nan"), "sizes": {(1, 2): 3}})
try:
    raise ValueError("reason\\n2026-01-01 00:00:00,000 ERROR engine x: made up\\r\\x1b[2K")
except ValueError:
    log.exception("failed")
warnings.warn("careful")
thread = threading.Thread(target=lambda: 1 / 0, name="helper")
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def log_of(script: str, **variables: str) -> list[str]:
    """The lines that a script's process logs."""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment)
    assert done.stdout == b""
    return done.stderr.decode().splitlines()


def test_what_is_not_printable_is_escaped_and_tracebacks_are_whole() -> None:
    lines = log_of(_SCRIPT)
    records = [line for line in lines if not line.startswith("  ")]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ engine ", r) for r in records)
    first, second, third, fourth, fifth = records
    assert first.endswith(
        r"WARNING engine x: adapter \x1b[31mred\n2026 ERROR engine x: made up: ümlaut"
    )
    assert second.endswith("ERROR engine x: failed")
    assert "WARNING engine py.warnings: " in third
    assert "careful" in third
    assert fourth.endswith("uncaught exception in thread helper")
    assert fifth.endswith("uncaught exception")
    traceback = lines[lines.index(second) + 1 : lines.index(third)]
    assert traceback[0].startswith("  Traceback")
    assert "  ValueError: reason" in traceback
    assert r"\x1b[2K" in traceback[-1]
    assert "  RuntimeError: the end" in lines
    assert all(line.isprintable() for line in lines)


def test_json_is_one_object_a_line() -> None:
    first, second, third, fourth, fifth = map(
        json.loads, log_of(_SCRIPT, OMNI_ENGINE_LOG_FORMAT="json")
    )
    assert first["message"] == "adapter \x1b[31mred\n2026 ERROR engine x: made up: ümlaut"
    assert (first["level"], first["process"], first["logger"]) == ("WARNING", "engine", "x")
    assert first["request_id"] == 'a"\n{"level": "ERROR"}'
    assert (first["worker_id"], first["ratio"], first["sizes"]) == (None, "nan", "{(1, 2): 3}")
    at = datetime.datetime.fromisoformat(first["ts"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["ts"])
    assert abs(datetime.datetime.now(datetime.UTC) - at) < datetime.timedelta(minutes=1)
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ERROR engine x: made up\r\x1b[2K")
    assert list(second) == ["ts", "level", "process", "logger", "message", "exception"]
    assert third["logger"] == "py.warnings"
    assert "ZeroDivisionError" in fourth["exception"]
    assert fifth["level"] == "CRITICAL"
    assert fifth["exception"].endswith("RuntimeError: the end")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OMNI_ENGINE_LOG_LEVEL", "loud", "DEBUG"),
        ("OMNI_ENGINE_LOG_FORMAT", "xml", "console, json"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, expected: str) -> None:
    lines = log_of(_SCRIPT, **{variable: value})
    assert variable in lines[-1]
    assert expected in lines[-1]


class _Nobody:
    """A listener that is told nothing here."""

    label = "00ab"

    def on_status(self, request_id: str, status: RequestStatus) -> None: ...

    def on_progress(
        self, request_id: str, step: int, num_steps: int, preview: np.ndarray[Any, Any] | None
    ) -> None: ...

    def on_output(self, output: DiffusionOutput) -> None: ...


def live_request(request_id: str, prompt: str) -> LiveRequest:
    request = DiffusionRequest(request_id, prompt, OmniDiffusionSamplingParams())
    return LiveRequest(request, _Nobody(), arrival=100.0)


def request_records(caplog: pytest.LogCaptureFixture, level: int) -> list[logging.LogRecord]:
    """What is logged of a request that completes, one that fails and one that never started."""
    caplog.set_level(level)
    log = RequestLog("bundled")
    done = live_request("r 1 completed in", "a secret cat")
    log.accepted(done, client="00ab")
    done.start_over(Death(100.1, WorkerLostError("it died")))
    done.started = 100.25
    log.started(done, "stage0-worker1", 100.25)
    metrics = OutputMetrics(num_steps=8, mean_batch_size=3.5, worker="stage0-worker1")
    loras = [AppliedLoRA("night", "d", 0.8), AppliedLoRA("out line", "e", 1.0)]
    output = DiffusionOutput(done.request_id, seed=7, applied_loras=loras, metrics=metrics)
    log.ended(done, output, 101.0, client="00ab")
    failed = live_request("r2", "a secret cat")
    failed.started = 100.5
    failed.advance(3, 8)
    error = ModelError("ValueError: can't draw a secret cat", value="a secret cat")
    log.ended(failed, failed.failed(error), 102.0, worker_id="stage0-worker0")
    waiting = live_request("r3", "a secret cat")
    log.ended(waiting, waiting.failed(RequestAbortedError("the request was aborted")), 100.5)
    refused = live_request("r4", "a secret cat")
    reason = InvalidRequestError("the prompt is too long", field="prompt", value="a secret cat")
    log.ended(refused, refused.failed(reason), 100.5)
    return caplog.records


def test_a_request_that_ends_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    done, failed, aborted, refused = request_records(caplog, logging.INFO)
    assert done.getMessage() == (
        'request "r 1 completed in" completed in 1000.0 ms (queued 250.0, ran 750.0): '
        "model bundled, 8 steps, mean batch 3.50, worker stage0-worker1, tries 2, seed 7, "
        'loras night:0.8,"out line:1", client 00ab'
    )
    fields = vars(done)
    expected = {
        "event": "request_ended", "request_id": "r 1 completed in", "model": "bundled",
        "outcome": "completed", "queue_ms": 250.0, "run_ms": 750.0, "total_ms": 1000.0,
        "steps": 8, "mean_batch_size": 3.5, "worker_id": "stage0-worker1", "tries": 2, "seed": 7,
        "loras": ["night:0.8", "out line:1"], "client": "00ab",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert "error" not in fields
    assert vars(failed) | {"outcome": "failed", "error": "model_error", "steps": 3} == vars(failed)
    assert "failed (model_error) in 2000.0 ms" in failed.getMessage()
    assert vars(aborted) | {"outcome": "aborted", "queue_ms": 500.0, "run_ms": 0.0,
                            "tries": 0, "worker_id": None} == vars(aborted)  # fmt: skip
    assert vars(refused)["error_field"] == "prompt"
    assert vars(refused)["error_message"] == "the prompt is too long"


def test_prompts_are_not_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    for record in request_records(caplog, logging.INFO):
        assert "secret" not in str(vars(record))


def test_debug_tells_more(caplog: pytest.LogCaptureFixture) -> None:
    accepted, started, _, failed, *_ = request_records(caplog, logging.DEBUG)
    assert vars(accepted)["event"] == "request_accepted"
    assert vars(started) | {"worker_id": "stage0-worker1", "queue_ms": 250.0} == vars(started)
    assert "can't draw" in failed.getMessage()


def test_what_a_child_prints_becomes_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, logged = b"Fatal Python error: \xff\x1b[2K\n", b'{"ts": "2026", "level": "INFO"}\n'
    monkeypatch.setenv(FORMAT_VARIABLE, "console")
    assert passed_on("w0", printed) == printed
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert passed_on("w0", logged) == logged
    record = json.loads(passed_on("w0", printed))
    assert record["message"] == "Fatal Python error: \ufffd\x1b[2K"
    assert (record["process"], record["logger"]) == ("w0", "stderr")


@pytest.fixture(scope="module")
def served_log(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a served engine and its worker log in JSON of three requests, one of which fails."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('logs')}/e"
    command = [COMMAND, "serve", "--pipeline", PATTERN, "--name", "pattern", "--devices", "cpu",
               "--endpoint", endpoint, "--log-format", "json"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        with OmniClient(endpoint) as client:
            client.wait_until_ready(60)
            for request_id in ("good", 'bad {"level": "ERROR"}', "other"):
                text = {"raise_text": LONG_TEXT} if request_id.startswith("bad") else {}
                params = OmniDiffusionSamplingParams(seed=3, extra_args=text)
                client.submit("a secret cat", params, request_id=request_id).result(30)
    finally:
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    return log.splitlines()


def test_every_line_of_a_served_engine_is_an_object(served_log: list[str]) -> None:
    records = [json.loads(line) for line in served_log]
    assert {record["process"] for record in records} == {"engine", "stage0-worker0"}
    for record in records:
        assert {"ts", "level", "process", "logger", "message"} <= set(record)
        assert "secret" not in str(record)


def test_a_request_is_found_by_its_id_in_every_process(served_log: list[str]) -> None:
    records = [json.loads(line) for line in served_log]
    ended = [record for record in records if record.get("event") == "request_ended"]
    assert [(r["request_id"], r["outcome"]) for r in ended] == [
        ("good", "completed"), ('bad {"level": "ERROR"}', "failed"), ("other", "completed"),
    ]  # fmt: skip
    good, bad, _ = ended
    assert good["queue_ms"] + good["run_ms"] == pytest.approx(good["total_ms"], abs=0.01)
    expected = {"model": "pattern", "steps": 4, "worker_id": "stage0-worker0", "tries": 1,
                "seed": 3, "mean_batch_size": 1.0, "loras": []}  # fmt: skip
    assert good | expected == good
    assert (bad["error"], "error_message" in bad) == ("model_error", False)
    told = [r for r in records if r["process"] == "stage0-worker0" and "bad {" in r["message"]]
    assert LONG_TEXT in told[0]["exception"]
