"""Clients that mean no good: the others notice little, and nothing of them is left.

"Little": the median time of a valid client's requests stays within twice the undisturbed one's. Its
requests take 0.1 s on their worker, less than most real ones: an attack may cost them that much and
no more, in all that they pass on their way through the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support_pipelines import pattern

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.protocol import codec, messages

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TESTS = Path(__file__).parent
REQUESTS = 20
RUN_MS = 100
MIB = 1 << 20


OPTIONS: dict[str, Any] = {
    "pipeline": "support_pipelines:PatternPipeline",
    "max_num_seqs": 4,
    "scheduling_policy": "fifo",  # a full batch of an attacker would go before a valid one
    "lora_modules": [],
    "default_sampling_params": {},
    "threads": 1,
    "result_ttl_s": 1.0,
    "max_message_bytes": 64 * MIB,
    "max_client_backlog_bytes": MIB,
    "max_waiting_per_client": 8,
}
ENDPOINTS: dict[str, dict[str, str]] = {"ipc": {}, "tcp": {"endpoint": "tcp://127.0.0.1:*"}}


@pytest.fixture(scope="module")
def ipc(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine("bundled", **OPTIONS)


@pytest.fixture(scope="module")
def tcp(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine("bundled", **OPTIONS, **ENDPOINTS["tcp"])


@pytest.fixture(scope="module", params=["ipc", "tcp"])
def omni(request: pytest.FixtureRequest) -> Omni:
    """One engine for all tests, per transport."""
    found: Omni = request.getfixturevalue(request.param)
    return found


def median_s(client: OmniClient, requests: int = REQUESTS) -> float:
    """The median time of a request, from its submission to its picture, which must be right."""
    times = []
    for seed in range(requests):
        began = time.monotonic()
        params = OmniDiffusionSamplingParams(seed=seed, extra_args={"sleep_ms": RUN_MS})
        (output,) = client.generate("valid", params, timeout_s=60)
        times.append(time.monotonic() - began)
        (picture,) = output.raise_for_error().images or ()
        np.testing.assert_array_equal(picture, pattern("valid", seed, 16, 16))
    return statistics.median(times)


@contextlib.contextmanager
def attacking(kind: str, endpoint: str, *options: object) -> Iterator[dict[str, Any]]:
    """Run a hostile client meanwhile; what came of it is known afterwards."""
    command = [sys.executable, "-m", "hostile_clients", kind, endpoint, *map(str, options)]
    places = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": places}
    result: dict[str, Any] = {}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "under way\n"
            yield result
            said, _ = process.communicate(timeout=60)
            result.update(json.loads(said))
        finally:
            process.kill()


def engine_rss(omni: Omni) -> int:
    return int(psutil.Process(omni.client.status()["pid"]).memory_info().rss)


def assert_nothing_left(omni: Omni, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        status = omni.client.status()
        (stage,) = status["stages"]
        left = (status["clients"], stage["waiting"], stage["running"])
        if left == (1, 0, 0) and stage["state"] == "ready":
            return
        assert time.monotonic() < deadline, f"{left} are left, the stage is {stage['state']}"
        time.sleep(0.1)


def assert_others_notice_little(
    omni: Omni, kind: str, *options: object, most_growth: int = 100 * MIB
) -> dict[str, Any]:
    """Attack while a valid client works; what came of the attack."""
    with OmniClient(omni.endpoint) as valid:
        median_s(valid, 3)
        undisturbed, rss = median_s(valid), engine_rss(omni)
        with attacking(kind, omni.endpoint, *options) as result:
            disturbed = median_s(valid)
        told = f"{undisturbed * 1000:.1f} ms undisturbed, {disturbed * 1000:.1f} ms during {kind}"
        print(told, result)
        assert disturbed < 2 * undisturbed, told
        valid.close()
    assert_nothing_left(omni)
    assert engine_rss(omni) - rss < most_growth, "the attack's memory is kept"
    return result


def test_a_client_that_reads_nothing(omni: Omni) -> None:
    """Beyond ``max_client_backlog_bytes`` it is taken for gone, its waiting requests with it."""
    assert assert_others_notice_little(omni, "reads_nothing")["messages"] > 3


def test_a_header_of_two_gigabytes(omni: Omni) -> None:
    """The engine hangs up as soon as it is announced; the rest is what the kernel had taken."""
    result = assert_others_notice_little(omni, "huge_frame")
    assert result["cut_off"] > 2
    assert result["most_bytes"] < 16 * MIB


def test_a_message_that_never_ends(ipc: Omni) -> None:
    """Its 100 MiB are freed at the end; the C library may keep what lies between other things."""
    result = assert_others_notice_little(ipc, "endless_multipart", most_growth=200 * MIB)
    assert result["bytes"] > 100 * MIB


def test_five_hundred_connections(omni: Omni) -> None:
    assert assert_others_notice_little(omni, "crowd")["connections"] == 500


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_more_connections_than_files_may_be_open(
    start_own_engine: Callable[..., Omni], transport: str
) -> None:
    """The engine raises its soft limit of open files to the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4096:
        pytest.skip("the hard limit of open files is too low here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        omni = start_own_engine("bundled", **OPTIONS, **ENDPOINTS[transport])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert assert_others_notice_little(omni, "silent_crowd")["connections"] > 1000


def test_the_largest_messages_in_a_loop(ipc: Omni) -> None:
    size = OPTIONS["max_message_bytes"]
    result = assert_others_notice_little(ipc, "largest_messages", size, most_growth=5 * size)
    assert result["messages"] > 3


@pytest.mark.parametrize("kind", ["many_texts", "many_containers", "long_text"])
def test_the_costliest_headers_in_a_loop(ipc: Omni, kind: str) -> None:
    assert assert_others_notice_little(ipc, kind, codec.MAX_HEADER_BYTES)["messages"] > 3


def test_messages_full_of_wrong_requests(ipc: Omni) -> None:
    count = messages.MAX_REQUESTS_PER_MESSAGE
    assert assert_others_notice_little(ipc, "full_submits", count)["messages"] > 3


@pytest.mark.parametrize("kind", ["aborts", "statuses"])
def test_very_many_small_messages(ipc: Omni, kind: str) -> None:
    assert assert_others_notice_little(ipc, kind)["messages"] > 1000
