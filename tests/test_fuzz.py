"""100,000 broken messages: no crash, no growth, nothing left, and valid clients notice nothing.

Hypothesis changes what messages say; a byte-level fuzzer changes their bytes and frames. They go to
the clients' socket, in both modes and over both transports, and to the workers' socket: as a
stranger, as an impostor, and as a worker that has gone mad.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import psutil
import pytest
import zmq
from almost_right import almost_right
from fuzzing import SMALL, ByteFuzzer, Frames, client_messages, crafted, worker_messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_pipelines import pattern
from zmtp import connected, garbage, greeted

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams

BUILT, CHANGED = 4_000, 44_000
"""Messages of each kind per engine; with those to the workers' socket they are 100,000."""

TESTS = Path(__file__).parent
SUPPORT = TESTS / "support"
PIPELINES = {"request": "fuzzed_pipelines:PicturesIn", "step": "fuzzed_pipelines:SteppedPicturesIn"}
BUNCH = 40
QUIET: Any = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def start_fuzzed(start: Callable[..., Omni], mode: str, **options: Any) -> Omni:
    return start(
        "bundled",
        pipeline=PIPELINES[mode],
        step_execution=mode == "step",
        lora_modules=[],
        default_sampling_params={},
        threads=1,
        result_ttl_s=1.0,
        **{**SMALL, **options},
    )


class ValidClient:
    """Asks for a picture again and again in a thread of its own; every one must be right."""

    def __init__(self, endpoint: str) -> None:
        self._client = OmniClient(endpoint)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.wrong: list[object] = []
        self.right = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(90)
        alive = self._thread.is_alive()
        self._client.close()
        if error is None:
            assert not alive, "a valid request hangs"
            assert self.wrong == []
            assert self.right > 0

    def _run(self) -> None:
        for seed in itertools.count():
            if self._over.is_set() or self.wrong:
                return
            params = OmniDiffusionSamplingParams(seed=seed)
            try:
                (output,) = self._client.generate("valid", params, timeout_s=60)
                (picture,) = output.raise_for_error().images or ()
                np.testing.assert_array_equal(picture, pattern("valid", seed, 16, 16))
            except Exception as error:  # noqa: BLE001  # boundary: the thread; the test reports it
                self.wrong.append(error)
            self.right += 1


class Attackers:
    """Several raw connections that send anything, and read what the engine answers."""

    def __init__(self, endpoint: str, count: int = 4) -> None:
        self._context = zmq.Context()
        self._ids = itertools.count(2**40)
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(count)]
        self._turns = itertools.cycle(self._sockets)
        self.codes: Counter[str] = Counter()
        self.broken: list[object] = []
        self.sent = 0
        for one in self._sockets:
            one.setsockopt(zmq.SNDHWM, 0)
            one.connect(endpoint)

    def send(self, messages: list[Frames]) -> None:
        """Send messages over one of the connections; return when the engine has answered all."""
        one = next(self._turns)
        for frames in messages:
            if frames:
                one.send_multipart(frames)
                self.sent += 1
        mark = next(self._ids)
        one.send(msgpack.packb({"v": 1, "type": "ping", "id": mark}))
        while True:
            assert one.poll(30_000), "the engine answers no more"
            answer = msgpack.unpackb(one.recv_multipart()[0], ext_hook=lambda *_: None)
            if answer["type"] == "pong" and answer["reply_to"] == mark:
                break
            self._note(answer)

    def _note(self, answer: dict[str, Any]) -> None:
        error = answer.get("error") or (answer.get("output") or {}).get("error")
        if error is not None:
            self.codes[error["code"]] += 1
            if error["code"] == "internal_error":
                self.broken.append(error)

    def close(self) -> None:
        """Say good-bye; more than once does no harm."""
        while self._sockets:
            one = self._sockets.pop()
            one.send(msgpack.packb({"v": 1, "type": "bye", "id": None}))
            one.close(linger=1000)
        self._context.term()


@pytest.fixture
def attack() -> Iterator[Callable[..., Attackers]]:
    started: list[Attackers] = []

    def start(endpoint: str, count: int = 4) -> Attackers:
        started.append(Attackers(endpoint, count))
        return started[-1]

    yield start
    for attackers in started:
        attackers.close()


def status_of(omni: Omni) -> dict[str, Any]:
    return omni.client.status()


def rss_of(omni: Omni) -> int:
    """Bytes that the engine's process has in memory."""
    return int(psutil.Process(status_of(omni)["pid"]).memory_info().rss)


def assert_flat(first: int, last: int) -> None:
    assert last - first < max(0.2 * first, 30 * 2**20), f"{first >> 20} MiB -> {last >> 20} MiB"


def assert_nothing_left(omni: Omni, timeout_s: float = 40.0) -> None:
    """The engine is healthy, no request is left and no client but the engine's own."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = status_of(omni)
        (stage,) = status["stages"]
        left = (status["clients"], stage["waiting"], stage["running"])
        if left == (1, 0, 0) and stage["state"] == "ready":
            break
        assert time.monotonic() < deadline, f"{left} are left, the stage is {stage['state']}"
        time.sleep(0.1)
    counted = stage["requests"]
    assert counted["received"] == sum(counted[kind] for kind in ("completed", "failed", "aborted"))


# -- the clients' socket


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "transport"), [("request", "ipc"), ("step", "tcp")])
def test_broken_messages_of_clients(
    start_own_engine: Callable[..., Omni],
    attack: Callable[..., Attackers],
    mode: str,
    transport: str,
) -> None:
    endpoint = {"endpoint": "tcp://127.0.0.1:*"} if transport == "tcp" else {}
    omni = start_fuzzed(start_own_engine, mode, **endpoint)
    assert omni.endpoint.startswith(f"{transport}://")
    attackers = attack(omni.endpoint)
    sizes: list[int] = []

    def fuzz_bytes(seed: int, count: int) -> None:
        fuzzer = ByteFuzzer(client_messages(), seed)
        for _ in range(0, count, BUNCH):
            attackers.send([fuzzer.frames() for _ in range(BUNCH)])
        sizes.append(rss_of(omni))

    @settings(max_examples=BUILT // 10, **QUIET)
    @given(st.lists(almost_right(client_messages()), min_size=10, max_size=10))
    def fuzz_meaning(messages: list[Frames]) -> None:
        attackers.send(messages)
        assert attackers.broken == []

    with ValidClient(omni.endpoint) as valid:
        attackers.send(crafted())
        fuzz_bytes(1, CHANGED // 3)
        fuzz_meaning()
        fuzz_bytes(2, CHANGED // 3)
        fuzz_bytes(3, CHANGED // 3)
        right = valid.right
    assert attackers.broken == []
    assert attackers.sent >= BUILT + CHANGED - 2 * BUNCH
    assert right > 20, "the valid client was held up"
    for code in ("malformed_message", "unknown_field", "invalid_request", "limit_exceeded"):
        assert attackers.codes[code] > 0, f"{code} is never met: {attackers.codes}"
    assert_flat(sizes[0], sizes[-1])
    attackers.close()
    assert_nothing_left(omni)


# -- bytes that are no messages


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_garbage_and_half_open_handshakes(
    start_own_engine: Callable[..., Omni], transport: str
) -> None:
    endpoint = {"endpoint": "tcp://127.0.0.1:*"} if transport == "tcp" else {}
    omni = start_fuzzed(start_own_engine, "request", **endpoint)
    choose = random.Random(4)
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack, ValidClient(omni.endpoint):
        for count in range(600):
            one = stack.enter_context(connected(omni.endpoint))
            if count % 2:
                greeted(one)
            with contextlib.suppress(ConnectionError):  # the engine may hang up at any byte
                one.sendall(garbage(choose))
            if count % 3:
                one.close()
            else:
                held.append(one)
        assert status_of(omni)["stages"][0]["state"] == "ready"
        assert len(held) == 200
    assert_nothing_left(omni)


# -- the workers' socket


def workers_endpoint(omni: Omni) -> str:
    """Where the engine listens for its workers: beside its private socket for clients."""
    assert omni.endpoint.endswith("/clients")
    return omni.endpoint.removesuffix("clients") + "workers"


@pytest.mark.parametrize("mode", ["request", "step"])
def test_strangers_and_impostors_on_the_workers_socket(
    start_own_engine: Callable[..., Omni], mode: str
) -> None:
    omni = start_fuzzed(start_own_engine, mode)
    (worker,) = status_of(omni)["stages"][0]["workers"]
    worker_id = worker["worker_id"].encode()
    names = (
        None,
        b"x",
        b"stage0-worker1.0",
        worker_id,
        *(b"%s.%d" % (worker_id, i) for i in range(3)),
    )
    fuzzer = ByteFuzzer(worker_messages(), 5)
    sizes: list[int] = []
    with zmq.Context() as context, ValidClient(omni.endpoint):
        for name in names * 2:
            with context.socket(zmq.DEALER) as one:
                one.setsockopt(zmq.SNDHWM, 0)
                if name is not None:
                    one.setsockopt(zmq.IDENTITY, name)
                one.connect(workers_endpoint(omni))
                one.send_multipart([worker_id, *fuzzer.frames()])  # libzmq may take it for a name
                for _ in range(200):
                    one.send_multipart(fuzzer.frames())
                one.close(linger=2000)
            sizes.append(rss_of(omni))
    (after,) = status_of(omni)["stages"][0]["workers"]
    assert (after["pid"], after["state"]) == (worker["pid"], "idle")
    assert_flat(sizes[0], sizes[-1])
    assert_nothing_left(omni)


@pytest.fixture
def mad_engine(start_own_engine: Callable[..., Omni], monkeypatch: pytest.MonkeyPatch) -> Omni:
    """A real engine whose worker's process is ``mad_worker``, which does what prompts ask for."""
    places = [SUPPORT / "mad_worker", TESTS, os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    return start_own_engine(
        "bundled",
        max_num_seqs=4,
        lora_modules=[],
        default_sampling_params={},
        worker_restart_backoff_s=0.02,
        worker_death_window_s=0.02,
        max_worker_deaths=1000,
    )


def mad_and_valid(omni: Omni, deeds: list[str]) -> Counter[str]:
    """Let the worker do deeds, each among valid requests; how the requests for the deeds ended."""
    ends: Counter[str] = Counter()
    for deed in deeds:
        prompts = ["valid", f"mad {deed}", "valid"]
        params = OmniDiffusionSamplingParams(seed=3)
        first, mad, last = omni.client.generate(prompts, params, timeout_s=60)
        for output in (first, last):
            (picture,) = output.raise_for_error().images or ()
            np.testing.assert_array_equal(picture, pattern("valid", 3, 16, 16))
        ends["completed" if mad.error is None else mad.error.code] += 1
    return ends


DEEDS = (
    "answer-for-nobody", "answer-too-few", "answer-twice", "answer-nothing", "answer-unasked",
    "other-plan", "ready-again", "step-report", "step-output", "check-nobody-asked-for", "no-type",
)  # fmt: skip


@pytest.mark.parametrize("deed", DEEDS)
def test_a_worker_that_breaks_the_rules(mad_engine: Omni, deed: str) -> None:
    """Whatever it says, requests end, the others' with their picture, and a good one takes over."""
    ends = mad_and_valid(mad_engine, [deed])
    assert set(ends) <= {"completed", "worker_died_repeatedly", "worker_lost"}
    assert_nothing_left(mad_engine)


@pytest.mark.slow
def test_a_worker_that_sends_broken_messages(mad_engine: Omni) -> None:
    sizes: list[int] = []
    for seed in range(15):
        ends = mad_and_valid(mad_engine, [f"fuzz-{seed}"])
        assert set(ends) <= {"completed", "worker_died_repeatedly", "worker_lost"}
        sizes.append(rss_of(mad_engine))
    assert_flat(sizes[4], sizes[-1])
    assert_nothing_left(mad_engine)
