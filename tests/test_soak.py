"""Minutes of everything at once: nothing is lost, nothing is left, nothing grows.

``OMNI_ENGINE_SOAK_S`` sets the length in seconds, 300 unless given.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from omni_engine import LoRARequest, Omni, OmniClient, OmniDiffusionSamplingParams

SOAK_S = float(os.environ.get("OMNI_ENGINE_SOAK_S", "300"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 600)]

KILL_EVERY_S = 20.0
GROWTH = 1.05
WORDS = ["a red circle on a white background", "a blue square on a yellow background",
         "a green star on a black background"]  # fmt: skip
SIZES = [(64, 64), (64, 96), (96, 64)]
ADAPTERS = [None, "outline", "night", "studio", "silhouette", "chalk", "tiny"]
NEXT_TO_EQUAL = 4
"""Of 255: pictures of one request in different company."""


def growth(samples: list[float]) -> float:
    """Return how much the last quarter is above the third."""
    quarter = len(samples) // 4
    third, last = samples[2 * quarter : 3 * quarter], samples[3 * quarter :]
    return statistics.median(last) / statistics.median(third)


class Traffic:
    """Clients that ask, abort and go; every end is counted."""

    def __init__(self, endpoint: str, until: float) -> None:
        self._endpoint, self._until = endpoint, until
        self._lock = threading.Lock()
        self._pictures: dict[Any, Any] = {}
        self.submitted = 0
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []

    def steady(self, seed: int) -> None:
        """Ask, wait, now and then abort."""
        rng = random.Random(seed)
        with OmniClient(self._endpoint, reconnect_timeout_s=60) as client:
            while time.monotonic() < self._until:
                asked = [self._ask(client, rng) for _ in range(rng.randint(1, 4))]
                for what, handle, aborted in asked:
                    self._account(what, handle.result(120), aborted)

    def fleeting(self, seed: int) -> None:
        """Connect, ask, and leave without waiting."""
        rng = random.Random(seed)
        while time.monotonic() < self._until:
            with OmniClient(self._endpoint) as client:
                for _ in range(rng.randint(1, 3)):
                    self._ask(client, rng)[1].events().__next__()

    def _ask(self, client: OmniClient, rng: random.Random) -> tuple[Any, Any, bool]:
        prompt, (height, width), adapter = (rng.choice(x) for x in (WORDS, SIZES, ADAPTERS))
        steps, seed = rng.randint(1, 4), rng.randint(0, 2)
        what = (prompt, height, width, adapter, steps, seed)
        params = OmniDiffusionSamplingParams(
            height=height, width=width, num_inference_steps=steps, seed=seed,
            lora_request=None if adapter is None else LoRARequest(adapter),
        )  # fmt: skip
        with self._lock:
            self.submitted += 1
        handle = client.submit(prompt, params)
        if aborted := rng.random() < 0.2:
            handle.abort()
        return what, handle, aborted

    def _account(self, what: Any, output: Any, aborted: bool) -> None:
        code = "completed" if output.error is None else output.error.code
        with self._lock:
            self.ends[code] += 1
            if code not in ("completed", "worker_died_repeatedly") and not (
                aborted and code == "aborted"
            ):
                self.problems.append(f"{what}: {output.error}")
            if code == "completed":
                picture = output.images[0].astype(int)
                known = self._pictures.setdefault(what, picture)
                if np.abs(known - picture).max() > NEXT_TO_EQUAL:
                    self.problems.append(f"{what}: another picture than before")


def test_soak(start_own_engine: Callable[..., Omni]) -> None:
    omni = start_own_engine(
        replicas=2, threads=1, max_num_seqs=4, step_execution=True, worker_restart_backoff_s=0.1,
        max_worker_deaths=1000, result_ttl_s=5,
    )  # fmt: skip
    began = time.monotonic()
    traffic = Traffic(omni.endpoint, began + SOAK_S)
    threads = [threading.Thread(target=traffic.steady, args=(i,)) for i in range(4)]
    threads.append(threading.Thread(target=traffic.fleeting, args=(99,)))
    for thread in threads:
        thread.start()
    engine = psutil.Process(omni._engine.pid)
    engine_memory: list[float] = []
    worker_memory: list[float] = []
    kills, next_kill = 0, began + KILL_EVERY_S
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < began + SOAK_S + 180, "traffic does not come to its end"
        engine_memory.append(engine.memory_info().rss)
        if time.monotonic() >= next_kill and time.monotonic() < traffic._until:
            worker = omni.status()["stages"][0]["workers"][kills % 2]
            if worker["state"] in ("idle", "busy"):
                worker_memory.append(psutil.Process(worker["pid"]).memory_info().rss)
                os.kill(worker["pid"], signal.SIGKILL)
                kills, next_kill = kills + 1, next_kill + KILL_EVERY_S
        time.sleep(0.2)

    def left() -> dict[str, int]:
        """What is still kept anywhere, the worker's own count included, which beats tell."""
        status = omni.status()
        held: dict[str, int] = status["stages"][0]["held"]
        kept = {name: status[name] for name in ("kept_results", "kept_result_bytes")}
        others = {"other_clients": status["clients"] - 1}
        return {name: n for name, n in (held | kept | others).items() if n}

    deadline = time.monotonic() + 90
    while remains := left():
        assert time.monotonic() < deadline, remains
        time.sleep(0.1)
    assert traffic.problems == []
    counts = omni.status()["stages"][0]["requests"]
    assert counts["received"] == counts["completed"] + counts["aborted"] + counts["failed"]
    assert counts["received"] == traffic.submitted
    assert counts["failed"] == traffic.ends["worker_died_repeatedly"]
    assert traffic.ends["completed"] > SOAK_S / 5
    assert kills >= int(SOAK_S / KILL_EVERY_S) - 2
    if SOAK_S >= 120:
        for samples in (engine_memory, worker_memory):
            assert growth(samples) <= GROWTH, [round(size / 1e6) for size in samples][-2000:]
