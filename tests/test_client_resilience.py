"""Nothing is lost between client and engine: real processes, real sockets, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from conftest import PATTERN
from raw_client import RawClient
from support_pipelines import pattern
from test_lifecycle import until_running, wait_until
from test_step_mode import GATED
from test_wrong_input import FakeEngine

from omni_engine import AsyncOmni, AsyncOmniClient, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine import connection
from omni_engine.engine.process import EngineProcess
from omni_engine.protocol import codec
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    OmniError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.stages.config import DeployConfig

BACKLOG_BYTES = 1 << 20
PER_CLIENT, IN_ALL, CLIENTS = 3, 5, 4
RESULT_TTL_S = 2.0


@contextlib.contextmanager
def engine_at(
    endpoint: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[EngineProcess]:
    """An engine that runs one request at a time and listens at a path."""
    stage = {"stage_id": 0, "engine_args": {"model": "bundled", "max_num_seqs": 1, **options},
             "runtime": {"devices": "cpu", "threads": 1}}  # fmt: skip
    config = DeployConfig.model_validate(
        {"endpoint": f"ipc://{endpoint}", "stage_args": [stage], **(settings or {})}
    )
    engine = EngineProcess(config)
    try:
        yield engine
    finally:
        engine.close()


PATTERN_STAGE: dict[str, Any] = {
    "pipeline": PATTERN, "lora_modules": [], "default_sampling_params": {}
}  # fmt: skip


@pytest.fixture(scope="module")
def gated(start_engine: Callable[..., Omni]) -> Omni:
    """One request at a time, which can be held at a step."""
    return start_engine("bundled", max_num_seqs=1, **GATED)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine with small limits; it makes patterns, one request at a time."""
    limits = {
        "max_waiting_requests": IN_ALL,
        "max_waiting_per_client": PER_CLIENT,
        "max_clients": CLIENTS,
        "max_client_backlog_bytes": BACKLOG_BYTES,
    }
    settings = {"limits": limits, "result_ttl_s": RESULT_TTL_S}
    folder = tmp_path_factory.mktemp("tight")
    with engine_at(folder / "engine", settings, **GATED) as engine:
        with OmniClient(engine.endpoint) as client:
            client.wait_until_ready(60)
        yield engine


class Gate:
    """Holds requests at step 1 until it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def held(self, **changes: Any) -> OmniDiffusionSamplingParams:
        return OmniDiffusionSamplingParams(
            extra_args={"holds": [[1, str(self._path)]]}, **{"seed": 7, **changes}
        )

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


def is_right(output: DiffusionOutput, prompt: str, seed: int, side: int = 16) -> bool:
    (picture,) = output.raise_for_error().images or ()
    return np.array_equal(picture, pattern(prompt, seed, side, side))


def counts(client: OmniClient) -> dict[str, int]:
    (stage,) = client.status()["stages"]
    found: dict[str, int] = stage["requests"]
    return found


def until_idle(client: OmniClient) -> None:
    """Nothing waits, runs or is kept any more."""

    def idle() -> bool:
        status = client.status()
        left = [status[name] for name in ("followed", "unsent", "kept_results")]
        return not any([*left, *status["stages"][0]["held"].values()])

    wait_until(idle, "the engine has nothing left")
    assert client.status()["kept_result_bytes"] == 0


# -- engines that go and come


def seeded(seeds: Sequence[int]) -> list[OmniDiffusionSamplingParams]:
    return [OmniDiffusionSamplingParams(seed=s, extra_args={"sleep_ms": 40}) for s in seeds]


def test_requests_survive_an_engine_that_is_killed_and_started_again(tmp_path: Path) -> None:
    endpoint, count = tmp_path / "engine", 12
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(engine_at(endpoint, **PATTERN_STAGE))
        client = stack.enter_context(OmniClient(first.endpoint, reconnect_timeout_s=60))
        client.wait_until_ready(60)
        params = seeded(range(count))
        handles = [client.submit(f"p{i}", p) for i, p in enumerate(params)]
        until_running(handles[3])
        assert [handle.done for handle in handles] == [True] * 3 + [False] * (count - 3)
        os.kill(first.pid, signal.SIGKILL)
        # The loss has not been noticed: what is sent now is lost, or goes to the next engine.
        handles.append(client.submit(f"p{count}", seeded([count])[0]))
        call = client._connection.call_soon("wait_ready")
        first.close()
        second = stack.enter_context(engine_at(endpoint, **PATTERN_STAGE))
        outputs = [handle.result(60) for handle in handles]
        assert all(is_right(output, f"p{i}", i) for i, output in enumerate(outputs))
        with contextlib.suppress(EngineClosedError):  # or the next engine answered it
            call.result(60)
        assert client.status()["pid"] == second.pid
        assert counts(client)["received"] == count + 1 - 3, "each of the others ran once more"
        until_idle(client)


def test_everything_pending_ends_when_the_engine_is_stopped(gated: Omni, gate: Gate) -> None:
    process = psutil.Process(gated._engine.pid)
    with OmniClient(gated.endpoint, reconnect_timeout_s=1.0) as client:
        held, waiting = client.submit("a", gate.held()), client.submit("b", gate.held())
        until_running(held)
        process.suspend()
        try:
            call = client._connection.call_soon("status")
            began = time.monotonic()
            for future in (held.future, waiting.future, call):
                with contextlib.suppress(EngineClosedError):
                    output = future.result(10)
                    assert type(output.error) is EngineClosedError
            assert time.monotonic() - began < 3.0
            assert type(call.exception(0)) is EngineClosedError
            with pytest.raises(EngineClosedError, match="has not answered"):
                client.status()
        finally:
            process.resume()
        gate.open()
        assert is_right(client.submit("c", gate.held()).result(20), "c", 7)
        until_idle(client)


def test_a_request_that_was_to_end_is_not_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)
    with contextlib.closing(FakeEngine()) as fake, contextlib.ExitStack() as stack:
        opened: list[OmniClient] = []
        thread = _in_thread(lambda: opened.append(OmniClient(fake.endpoint)))
        fake.answer(
            fake.receive("hello"), "welcome", session="1", max_message_bytes=10**6, models=[]
        )
        thread.join(20)
        client = stack.enter_context(opened[0])
        unwanted, wanted = client.submit("a"), client.submit("b")
        asked = fake.receive("submit")
        fake.answer(asked, "event", request_id=unwanted.request_id, status="waiting")
        unwanted.abort()
        fake.receive("abort")
        fake.answer(fake.receive("ping"), "pong", session="2")
        (again,) = fake.receive("submit")["requests"]
        assert again["request_id"] == wanted.request_id
        assert type(unwanted.result(20).error) is RequestAbortedError


def _in_thread(function: Callable[[], object]) -> Any:
    import threading

    thread = threading.Thread(target=function)
    thread.start()
    return thread


# -- an engine of one's own


OWN: dict[str, Any] = {"devices": "cpu", "pipeline": PATTERN, "lora_modules": [],
                       "default_sampling_params": {}}  # fmt: skip
LONG = OmniDiffusionSamplingParams(extra_args={"sleep_ms": 600_000})


def test_the_end_of_an_owned_engine_ends_everything_at_once(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine("bundled", **OWN)
    handle = omni.submit("a", LONG)
    until_running(handle)
    call = omni.client._connection.call_soon("status")
    call.result(20)
    os.kill(omni._engine.pid, signal.SIGKILL)
    began = time.monotonic()
    error = handle.result(20).error
    assert time.monotonic() - began < 3.0
    assert type(error) is EngineClosedError
    assert "signal 9 (SIGKILL)" in str(error)
    for later in (omni.status, lambda: omni.submit("b"), lambda: omni.generate("c")):
        with pytest.raises(EngineClosedError, match=r"signal 9 \(SIGKILL\)"):
            later()


def test_an_asynchronous_owner_is_told_too() -> None:
    async def scenario() -> None:
        async with AsyncOmni("bundled", **OWN) as omni:
            handle = await omni.submit("a", LONG)
            assert omni._engine is not None
            os.kill(omni._engine.pid, signal.SIGKILL)
            output = await asyncio.wait_for(handle.result(), 20)
            assert "signal 9 (SIGKILL)" in str(output.error)
            with pytest.raises(EngineClosedError, match=r"signal 9 \(SIGKILL\)"):
                await omni.status()

    asyncio.run(scenario())


# -- asking again


def test_a_request_is_attached_to_while_it_waits_runs_and_when_it_has_ended(
    gated: Omni, gate: Gate
) -> None:
    before = counts(gated.client)["received"]
    with OmniClient(gated.endpoint) as one, OmniClient(gated.endpoint) as two:
        running = one.submit("runs", gate.held(), request_id="runs")
        until_running(running)
        waiting = one.submit("waits", gate.held(), request_id="waits")
        assert next(waiting.events()).status == "waiting"
        attached = {
            name: two.submit(name, gate.held(), request_id=name) for name in ("runs", "waits")
        }
        assert next(attached["waits"].events()).status == "waiting"
        assert next(attached["runs"].events()).status == "running"
        assert next(attached["runs"].events()).step == 1
        for handle in (running, waiting):
            assert type(handle.result(20).error) is DuplicateRequestError, "taken over"
        one.close()  # which ends none of them
        gate.open()
        for name, handle in attached.items():
            assert is_right(handle.result(20), name, 7)
    with RawClient(gated.endpoint) as raw, OmniClient(gated.endpoint) as two:
        raw.submit({"request_id": "ended", "prompt": "ended", "sampling_params": {"seed": 7}})
        assert raw.output("ended")["error"] is None
        again = two.submit("ended", OmniDiffusionSamplingParams(seed=7), request_id="ended")
        assert [event.status for event in again.events()] == ["finished_completed"]
        assert is_right(again.result(20), "ended", 7)
        until_idle(two)
    assert counts(gated.client)["received"] == before + 3, "nothing ran twice"


def test_another_request_of_the_same_id_is_refused(gated: Omni, gate: Gate) -> None:
    with OmniClient(gated.endpoint) as one, OmniClient(gated.endpoint) as two:
        held = one.submit("a", gate.held(), request_id="taken")
        until_running(held)
        refused = two.submit("a", gate.held(seed=8), request_id="taken").result(20)
        assert type(refused.error) is DuplicateRequestError
        assert refused.error.retry_after_ms is None
        held.abort()
        assert held.result(20).aborted
        ending = two.submit("a", gate.held(seed=8), request_id="taken").result(20)
        gate.open()
        until_idle(two)
        if ending.error is not None:  # it still occupied its worker
            assert type(ending.error) is DuplicateRequestError
            assert ending.error.retry_after_ms == 200.0
        assert is_right(two.submit("a", gate.held(seed=8), request_id="taken").result(20), "a", 8)


def test_a_detached_result_waits_for_whoever_asks_again(gated: Omni, gate: Gate) -> None:
    with OmniClient(gated.endpoint) as client:
        left = client.submit("a", gate.held(), request_id="left", detached=True)
        until_running(left)
    assert type(left.result(0).error) is EngineClosedError
    gate.open()
    wait_until(lambda: gated.status()["kept_results"] == 1, "it has ended")
    assert gated.status()["kept_result_bytes"] > 16 * 16 * 3
    with OmniClient(gated.endpoint) as client:
        fetched = client.submit("a", gate.held(), request_id="left", detached=True)
        assert [event.status for event in fetched.events()] == ["finished_completed"]
        assert is_right(fetched.result(20), "a", 7)
        until_idle(client)


def test_results_of_a_client_that_never_says_received_age_out(tight: EngineProcess) -> None:
    with RawClient(tight.endpoint) as raw, OmniClient(tight.endpoint) as client:
        raw.submit({"request_id": "old", "prompt": "a", "sampling_params": {"seed": 1}})
        assert raw.output("old")["error"] is None
        assert client.status()["kept_results"] == 1
        until_idle(client)
        raw.submit({"request_id": "old", "prompt": "a", "sampling_params": {"seed": 2}})
        assert raw.output("old")["seed"] == 2, "the id is free again"


# -- clients that stop, or do not read


@pytest.mark.slow
@pytest.mark.parametrize("ends_meanwhile", [True, False])
def test_a_client_that_was_stopped_for_long_gets_its_result(
    gated: Omni, gate: Gate, tmp_path: Path, ends_meanwhile: bool
) -> None:
    """It is taken for gone; when it goes on it asks again, and nothing it misses is lost."""
    code = (
        "import sys; from omni_engine import OmniClient, OmniDiffusionSamplingParams as P\n"
        "client = OmniClient(sys.argv[1])\n"
        "params = P(seed=7, extra_args={'holds': [[1, sys.argv[2]]]})\n"
        "handle = client.submit('a', params, detached=sys.argv[3] == 'True')\n"
        "next(e for e in handle.events() if e.status == 'running'); print('runs', flush=True)\n"
        "print(handle.result().raise_for_error().images[0].tobytes().hex())\n"
        "client.close()"
    )
    dropped = gated.status()["clients_dropped"]
    path = str(tmp_path / "gate")
    arguments = [gated.endpoint, path, str(ends_meanwhile)]
    stopped = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert stopped.stdout is not None
    try:
        assert stopped.stdout.readline() == "runs\n"
        os.kill(stopped.pid, signal.SIGSTOP)
        wait_until(lambda: gated.status()["clients_dropped"] > dropped, "it is given up", 30)
        if ends_meanwhile:
            gate.open()
            wait_until(lambda: gated.status()["kept_results"] == 1, "the result is kept")
        os.kill(stopped.pid, signal.SIGCONT)
        gate.open()
        picture = stopped.communicate(timeout=60)[0].strip()
        assert picture == pattern("a", 7, 16, 16).tobytes().hex()
        assert stopped.returncode == 0
        until_idle(gated.client)
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_client_that_does_not_read_is_dropped_before_it_costs_memory(
    tight: EngineProcess,
) -> None:
    """It asks for far more than may be kept for it; the engine stays small, others are served."""
    side, rounds = 1024, 8
    engine = psutil.Process(tight.pid)
    context = zmq.Context()
    lazy = context.socket(zmq.DEALER)
    lazy.setsockopt(zmq.RCVHWM, 1)
    lazy.setsockopt(zmq.RCVBUF, 4096)
    lazy.connect(tight.endpoint)
    try:
        with OmniClient(tight.endpoint) as other:
            dropped, before = other.status()["clients_dropped"], engine.memory_info().rss
            largest = 0
            for number in range(rounds):
                asked = [
                    {"request_id": f"lazy {number} {i}", "prompt": "a",
                     "sampling_params": {"height": side, "width": side, "num_inference_steps": 1,
                                         "num_outputs_per_prompt": 1}}
                    for i in range(PER_CLIENT)
                ]  # fmt: skip
                lazy.send_multipart(
                    codec.encode({"v": 1, "type": "submit", "id": number, "requests": asked})
                )
                wait_until(lambda: _is_idle(other), "they have ended")
                status = other.status()
                assert status["kept_result_bytes"] <= 2 * BACKLOG_BYTES
                largest = max(largest, engine.memory_info().rss - before)
            wait_until(lambda: other.status()["clients_dropped"] > dropped, "it is given up")
            assert largest < 48 << 20, f"{rounds * PER_CLIENT * side * side * 3} bytes were made"
            assert is_right(
                other.submit("b", OmniDiffusionSamplingParams(seed=1)).result(20), "b", 1
            )
    finally:
        context.destroy(linger=0)


def _is_idle(client: OmniClient) -> bool:
    (stage,) = client.status()["stages"]
    return not stage["waiting"] and not stage["running"]


# -- limits


def test_the_queue_is_bounded_per_client_and_in_all(tight: EngineProcess, gate: Gate) -> None:
    with OmniClient(tight.endpoint) as one, OmniClient(tight.endpoint) as two:
        running = one.submit("running", gate.held())
        until_running(running)
        mine = one._connection.submit(_requests(6, gate, "a"))
        mine[-1].result(20)  # refused: all of its own are there before the other's
        theirs = two._connection.submit(_requests(6, gate, "b"))
        for handles, fits, limit in (
            (mine, PER_CLIENT, "max_waiting_per_client"),
            (theirs, IN_ALL - PER_CLIENT, "max_waiting_requests"),
        ):
            for refused in handles[fits:]:
                error = refused.result(20).error
                assert type(error) is QueueFullError
                assert error.field == limit
                assert error.retry_after_ms is not None
                assert 100 <= error.retry_after_ms <= 60_000
            assert [handle.done for handle in handles[:fits]] == [False] * fits
        gate.open()
        for handle in (running, *mine[:PER_CLIENT], *theirs[: IN_ALL - PER_CLIENT]):
            handle.result(20).raise_for_error()
        until_idle(one)


def test_ending_a_request_at_once_does_not_end_another_of_its_id(
    tight: EngineProcess, gate: Gate
) -> None:
    with OmniClient(tight.endpoint) as owner, OmniClient(tight.endpoint) as other:
        owned = owner.submit("owned", gate.held(), request_id="contested")
        until_running(owned)
        for _ in range(20):
            refused = other.submit("other", gate.held(), request_id="contested")
            refused.abort()
            assert isinstance(refused.result(20).error, DuplicateRequestError)
        mine = other.submit("mine", gate.held())
        mine.abort()
        assert mine.result(20).aborted
        gate.open()
        assert is_right(owned.result(20), "owned", 7)
        until_idle(owner)


def _requests(count: int, gate: Gate, prompt: str) -> list[Any]:
    from omni_engine.engine.prompts import build_requests

    built = build_requests([f"{prompt}{i}" for i in range(count)], gate.held())
    assert not any(isinstance(request, OmniError) for request in built)
    return built


def test_generate_takes_more_prompts_than_the_queue_holds(tight: EngineProcess) -> None:
    prompts = [f"p{i}" for i in range(10 * IN_ALL)]
    params = [OmniDiffusionSamplingParams(seed=i) for i in range(len(prompts))]

    async def generate() -> list[DiffusionOutput]:
        async with AsyncOmniClient(tight.endpoint) as client:
            return await client.generate(prompts, params)

    with OmniClient(tight.endpoint) as client:
        for outputs in (client.generate(prompts, params), asyncio.run(generate())):
            assert all(is_right(o, p, i) for i, (o, p) in enumerate(zip(outputs, prompts)))  # noqa: B905
        until_idle(client)


def test_generate_gives_up_what_found_no_room_in_time(tight: EngineProcess, gate: Gate) -> None:
    with OmniClient(tight.endpoint) as client:
        outputs = client.generate(["a"] * 12, gate.held(), timeout_s=1.0)
        assert [type(output.error) for output in outputs] == [RequestTimeoutError] * 12
        gate.open()
        until_idle(client)
        assert len(client._connection._conversation._pending) == 0


def test_a_client_beyond_the_limit_is_turned_away_and_costs_nothing(tight: EngineProcess) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(OmniClient(tight.endpoint)) for _ in range(CLIENTS)]
        with pytest.raises(QueueFullError) as caught:
            OmniClient(tight.endpoint, connect_timeout_s=20)
        assert caught.value.field == "max_clients"
        assert caught.value.retry_after_ms == 1000
        assert clients[0].status()["clients"] == CLIENTS
        clients.pop().close()
        wait_until(lambda: clients[0].status()["clients"] == CLIENTS - 1, "one has left")
        with OmniClient(tight.endpoint) as late:
            assert late.generate("a")[0].ok


def test_a_request_has_a_deadline_of_its_own(gated: Omni, gate: Gate) -> None:
    running = gated.submit("a", gate.held(), timeout_s=0.5)
    waiting = gated.submit("b", gate.held(), timeout_s=0.5)
    for handle in (running, waiting):
        error = handle.result(20).error
        assert type(error) is RequestTimeoutError
        assert error.field == "timeout_s"
    gate.open()
    until_idle(gated.client)
