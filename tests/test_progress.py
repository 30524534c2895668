"""Progress and previews on their way to Python callers, in both modes; what may get lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from test_step_mode import GATED, held, until

from omni_engine import AsyncOmniClient, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.live_request import PROGRESS_INTERVAL_S, LiveRequest
from omni_engine.engine.outbox import QUEUE_MESSAGES, Outbox
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import InvalidRequestError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import build_request

Params = OmniDiffusionSamplingParams
SMALL = Params(num_inference_steps=7, height=32, width=32, seed=3)
PROMPT = "a red circle on a white background"


@pytest.fixture(scope="module", params=[True, False], ids=["step mode", "request mode"])
def bundled(request: pytest.FixtureRequest, start_engine: Callable[..., Omni]) -> Iterator[Omni]:
    omni = start_engine(step_execution=request.param, max_num_seqs=2, threads=1)
    yield omni
    omni.close()


@pytest.fixture(scope="module")
def gated(start_engine: Callable[..., Omni]) -> Omni:
    return start_engine("bundled", max_num_seqs=2, **GATED)


def progress_of(events: list[RequestEvent]) -> list[tuple[int | None, int | None]]:
    return [(event.step, event.num_steps) for event in events if event.step is not None]


# -- real pictures


def test_steps_are_told_in_order_up_to_the_last(bundled: Omni) -> None:
    handle = bundled.submit(PROMPT, SMALL)
    events = list(handle.events())
    told = progress_of(events)
    assert [event.status for event in events if event.step is None] == [
        "waiting", "running", "finished_completed",
    ]  # fmt: skip
    assert all(event.status == "running" for event in events if event.step is not None)
    assert told == sorted(set(told)), "always forward, nothing twice"
    assert told[-1] == (7, 7)
    assert told[0][0] in range(1, 8)
    assert {total for _, total in told} == {7}
    assert (handle.step, handle.num_steps) == (7, 7)


def test_previews_come_and_change_no_bit_of_the_result(bundled: Omni) -> None:
    plain = bundled.generate(PROMPT, SMALL)[0].raise_for_error()
    handle = bundled.submit(PROMPT, SMALL, preview_every=3)
    previews = {e.step: e.preview for e in handle.events() if e.preview is not None}
    assert list(previews) == [3, 6]
    for preview in previews.values():
        assert (preview.dtype, preview.shape) == (np.uint8, (32, 32, 3))
    output = handle.result(0).raise_for_error()
    assert output.images is not None
    assert plain.images is not None
    np.testing.assert_array_equal(output.images[0], plain.images[0])

    def distance(step: int) -> float:
        assert output.images is not None
        return float(np.abs(previews[step].astype(int) - output.images[0].astype(int)).mean())

    assert 0 < distance(6) < 64, "an estimate of this very picture"


def test_generate_reports_progress_by_the_prompts_place(bundled: Omni) -> None:
    heard: list[tuple[int, RequestEvent]] = []
    prompts = [PROMPT, "", "a green ring on a gray background"]
    outputs = bundled.generate(
        prompts,
        SMALL,
        preview_every=7,
        on_progress=lambda place, event: heard.append((place, event)),
    )
    assert [output.ok for output in outputs] == [True, False, True]
    assert {place for place, _ in heard} == {0, 2}
    for place in (0, 2):
        told = progress_of([event for at, event in heard if at == place])
        assert told == sorted(told)
        assert told[-1] == (7, 7)


# -- every kind of caller


def test_async_callers_hear_of_progress(gated: Omni) -> None:
    async def scenario() -> None:
        async with AsyncOmniClient(gated.endpoint) as client:
            handle = await client.submit("a", Params(num_inference_steps=6), preview_every=2)
            events = [event async for event in handle.events()]
            previews = {e.step: e.preview for e in events if e.preview is not None}
            assert list(previews) == [2, 4]
            for step, preview in previews.items():
                np.testing.assert_array_equal(preview, np.full((8, 8, 3), step))
            assert (handle.step, handle.num_steps) == (6, 6)
            assert events[-1].status == "finished_completed"
            loop, heard = asyncio.get_running_loop(), []

            def on_progress(place: int, event: RequestEvent) -> None:
                assert asyncio.get_running_loop() is loop
                heard.append((place, event.step, event.num_steps))

            await client.generate(["a", "b"], on_progress=on_progress)
            await client.status()  # what was scheduled before it has run
            assert {(0, 4, 4), (1, 4, 4)} <= set(heard)

    asyncio.run(scenario())


def test_on_event_hears_what_events_yields_and_may_fail(
    gated: Omni, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[RequestEvent] = []

    def on_event(event: RequestEvent) -> None:
        heard.append(event)
        raise RuntimeError("user code")

    handle = gated.submit("a", on_event=on_event)
    assert list(handle.events()) == heard
    assert progress_of(heard)[-1] == (4, 4)
    assert [record.message for record in caplog.records] == [
        f"on_event failed for request {handle.request_id}; its further failures are not logged"
    ]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_user_code_that_fails_is_named_once_for_each_request(
    gated: Omni, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("user code")

    async def scenario() -> list[DiffusionOutput]:
        async with AsyncOmniClient(gated.endpoint) as client:
            outputs = await client.generate(["a", "b"], on_progress=failing)
            await client.status()  # what was scheduled before it has run
            return outputs

    if mode == "sync":
        outputs = gated.generate(["a", "b"], on_progress=failing, on_output=failing)
        gated.status()  # the connection's thread has called everything before it
    else:
        outputs = asyncio.run(scenario())
    assert all(output.ok for output in outputs)
    said = sorted(record.message.split(";")[0] for record in caplog.records)
    names = ["on_output", "on_progress"] if mode == "sync" else ["on_progress"]
    assert said == sorted(f"{n} failed for request {o.request_id}" for n in names for o in outputs)


def test_one_step_is_told_too(gated: Omni) -> None:
    handle = gated.submit("a", Params(num_inference_steps=1))
    assert progress_of(list(handle.events())) == [(1, 1)]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_preview_every_is_checked(gated: Omni, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        gated.submit("a", preview_every=wrong)
    assert caught.value.field == "preview_every"
    (output,) = gated.generate("a", preview_every=wrong)
    assert isinstance(output.error, InvalidRequestError)


def test_an_aborted_request_makes_no_more_progress(gated: Omni, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle = gated.submit("a", held(50, (3, gate)), preview_every=3)
    until(handle, lambda event: event.step == 3)
    handle.abort()
    assert handle.result(timeout_s=20).aborted
    gate.touch()
    assert gated.generate("after")[0].ok
    assert [event.status for event in handle.events()] == ["finished_aborted"]


def test_progress_after_the_end_is_not_told() -> None:
    handle = RequestHandle(build_request("a"), lambda _: None)
    handle.note("running")
    handle.note_progress(1, 3, None)
    handle.finish(DiffusionOutput(handle.request_id))
    handle.note_progress(2, 3, None)
    events = list(handle.events())
    assert progress_of(events) == [(1, 3)]
    assert events[-1].status == "finished_completed"


# -- how often


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[int, int, bool]] = []

    label = "00ab"

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        raise AssertionError

    def on_progress(self, request_id: str, step: int, num_steps: int, preview: Any) -> None:
        self.told.append((step, num_steps, preview is not None))

    def on_output(self, output: DiffusionOutput) -> None:
        raise AssertionError


def test_a_fast_request_tells_few_steps_but_always_first_last_and_previews() -> None:
    listener = Listener()
    live = LiveRequest(build_request("a"), listener, arrival=0.0)
    live.advance(0, 0)
    live.tell_progress(None, 0.0)
    for step in range(1001):
        live.advance(step, 1000)
        preview = np.zeros((1, 1, 3), np.uint8) if step == 5 else None
        live.tell_progress(preview, step * PROGRESS_INTERVAL_S / 100)
    live.tell_progress(None, 100.0)
    assert listener.told[:2] == [(1, 1000, False), (5, 1000, True)]
    assert listener.told[-1] == (1000, 1000, False)
    assert len(listener.told) in range(11, 14)


def test_a_request_that_is_run_again_never_goes_back() -> None:
    listener = Listener()
    live = LiveRequest(build_request("a"), listener, arrival=0.0)
    for now, step in enumerate([1, 2, 3, 0, 1, 2, 3, 4]):
        live.advance(step, 4)
        live.tell_progress(None, float(now))
    assert [step for step, _, _ in listener.told] == [1, 2, 3, 4]
    live.answered = True
    live.advance(5, 5)
    live.tell_progress(None, 99.0)
    assert len(listener.told) == 4


# -- clients that do not read


@pytest.fixture
def outbox_and_reader() -> Iterator[tuple[Outbox, bytes, zmq.Socket[bytes]]]:
    """The engine's way out, and a client that has connected but does not read."""
    context = zmq.Context()
    router, reader = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
    reader.setsockopt(zmq.RCVHWM, 10)
    try:
        router.bind("inproc://engine")
        reader.connect("inproc://engine")
        reader.send(b"hello")
        yield Outbox(router), router.recv_multipart()[0], reader
    finally:
        context.destroy(linger=0)


def numbers(reader: zmq.Socket[bytes], outbox: Outbox, last: int) -> list[int]:
    """The numbers of the messages that arrive, up to one of them."""
    found: list[int] = []
    while not found or found[-1] != last:
        outbox.flush()
        assert reader.poll(20_000), "it never came"
        found.append(codec.decode(reader.recv_multipart(copy=False))["n"])
    return found


def test_a_client_that_does_not_read_loses_progress_and_nothing_else(
    outbox_and_reader: tuple[Outbox, bytes, zmq.Socket[bytes]],
) -> None:
    outbox, identity, reader = outbox_and_reader
    picture = np.zeros((64, 64, 3), np.uint8)
    count = QUEUE_MESSAGES * 3
    for n in range(count):
        progress = n % 3 > 0
        outbox.send(identity, {"n": n, "picture": picture}, droppable=progress)
    assert 0 < outbox.backlog <= count / 3
    outbox.send(identity, {"n": -1})
    arrived = numbers(reader, outbox, last=-1)
    assert arrived[:-1] == sorted(set(arrived[:-1]))
    assert {n for n in range(count) if n % 3 == 0} <= set(arrived)
    assert len(arrived) < count, "some progress was dropped"
    assert outbox.backlog == 0
    outbox.send(identity, {"n": -2}, droppable=True)
    assert numbers(reader, outbox, last=-2) == [-2], "once it reads, it hears of progress again"


def test_progress_alone_never_piles_up(
    outbox_and_reader: tuple[Outbox, bytes, zmq.Socket[bytes]],
) -> None:
    outbox, identity, _ = outbox_and_reader
    for n in range(QUEUE_MESSAGES * 3):
        outbox.send(identity, {"n": n, "picture": np.zeros((64, 64, 3), np.uint8)}, droppable=True)
    assert outbox.backlog == 0
    outbox.send(identity, {"n": 0})
    assert outbox.backlog == 1
    outbox.forget(identity)
    assert outbox.backlog == 0


def test_a_client_that_never_was_is_reported_gone(
    outbox_and_reader: tuple[Outbox, bytes, zmq.Socket[bytes]],
) -> None:
    outbox, _, _ = outbox_and_reader
    outbox.send(b"nobody", {"n": 0})
    assert outbox.take_gone() == {b"nobody"}
    assert outbox.take_gone() == set()
    assert outbox.backlog == 0


def test_the_engine_goes_on_while_a_client_does_not_read(gated: Omni) -> None:
    """It asks for far more than its queue takes, and reads only after others were served."""
    context = zmq.Context()
    lazy = context.socket(zmq.DEALER)
    lazy.setsockopt(zmq.RCVHWM, 10)
    lazy.connect(gated.endpoint)
    large = {"num_inference_steps": 2, "height": 256, "width": 256}
    count = 600
    requests = [{"request_id": f"lazy {i}", "prompt": "a", "sampling_params": large,
                 "preview_every": 1} for i in range(count)]  # fmt: skip
    try:
        for i in range(0, count, messages.MAX_REQUESTS_PER_MESSAGE):
            some = requests[i : i + messages.MAX_REQUESTS_PER_MESSAGE]
            submit = codec.encode({"v": 1, "type": "submit", "id": i, "requests": some})
            lazy.send_multipart(submit, copy=False)
        with OmniClient(gated.endpoint) as other:
            for turn in itertools.count():  # bounded by the test's time limit
                if turn % 200 == 0:
                    ping = codec.encode({"v": 1, "type": "ping", "id": None})
                    lazy.send_multipart(ping)
                (stage,) = other.status()["stages"]
                if stage["requests"]["received"] >= count and not stage["waiting"]:
                    break
            assert other.generate("b")[0].ok
        outputs = set()
        while len(outputs) < count:
            assert lazy.poll(20_000), "it never came"
            message = codec.decode(lazy.recv_multipart(copy=False))
            if message["type"] == "output":
                assert message["output"]["error"] is None
                outputs.add(message["output"]["request_id"])
    finally:
        context.destroy(linger=0)
