"""The pure parts behind "nothing is lost": kept results, pending requests, estimated waits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_engine.engine.handles import RequestHandle
from omni_engine.engine.pending import MAX_ATTEMPTS, PendingRequest, PendingRequests
from omni_engine.engine.results import KeptResult, ResultStore, same_content
from omni_engine.engine.throughput import Throughput
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    InvalidRequestError,
    OmniError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
)
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

TTL_S = 10.0
MAX_BYTES = 100
IDS = st.sampled_from([f"r{i}" for i in range(6)])
OWNERS = st.sampled_from([b"a", b"b"])
ACTIONS = st.one_of(
    st.tuples(st.just("keep"), IDS, st.integers(0, 60), st.none() | OWNERS, st.booleans()),
    st.tuples(st.just("received"), st.lists(IDS, max_size=3)),
    st.tuples(st.just("claim"), IDS, OWNERS),
    st.tuples(st.just("orphan"), OWNERS),
    st.tuples(st.just("part"), OWNERS),
    st.tuples(st.just("wait"), st.floats(0, 6)),
)


def result(request_id: str, size: int, detached: bool = False) -> KeptResult:
    request = build_request("a", request_id=request_id, detached=detached)
    return KeptResult(request, [b"x" * size])


class Model:
    """What the store should hold: a list of (id, size, owner, detached, expires), oldest first."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []

    def drop(self, *request_ids: str) -> None:
        self.rows = [row for row in self.rows if row[0] not in request_ids]

    def add(self, row: list[Any]) -> None:
        self.drop(row[0])
        self.rows.append(row)
        while sum(size for _, size, owner, *_ in self.rows if owner == row[2]) > MAX_BYTES:
            self.rows.remove(next(r for r in self.rows if r[2] == row[2]))


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_the_store_holds_what_it_should(actions: list[tuple[Any, ...]]) -> None:
    store, model, now = ResultStore(TTL_S, MAX_BYTES), Model(), 0.0
    for action in actions:
        match action:
            case ("keep", request_id, size, owner, detached):
                store.keep(result(request_id, size, detached), owner, now)
                model.add([request_id, size, owner, detached, now + TTL_S])
            case ("received", request_ids):
                store.received(request_ids)
                model.drop(*request_ids)
            case ("claim", request_id, owner):
                store.claim(request_id, owner, now)
                for row in [row for row in model.rows if row[0] == request_id]:
                    model.add([*row[:2], owner, row[3], now + TTL_S])
            case ("orphan" | "part" as kind, owner):
                getattr(store, kind)(owner)
                for row in [row for row in model.rows if row[2] == owner]:
                    model.drop(row[0])
                    if kind == "orphan" or row[3]:
                        model.add([*row[:2], None, *row[3:]])
            case ("wait", seconds):
                now += seconds
                store.expire(now)
                model.rows = [row for row in model.rows if row[4] > now]
        assert len(store) == len(model.rows)
        assert store.num_bytes == sum(row[1] for row in model.rows)
        for request_id in {row[0] for row in model.rows}:
            assert store.get(request_id) is not None
        for owner in (None, b"a", b"b"):
            assert store.bytes_of(owner) == sum(row[1] for row in model.rows if row[2] == owner)
            assert store.bytes_of(owner) <= MAX_BYTES
    store.received([f"r{i}" for i in range(6)])
    assert (len(store), store.num_bytes) == (0, 0)
    assert not store._kept
    assert not store._shelves


def test_a_store_without_time_keeps_nothing() -> None:
    store = ResultStore(0, MAX_BYTES)
    store.keep(result("r", 1), b"a", 0.0)
    assert (len(store), store.num_bytes, store.get("r")) == (0, 0, None)


def test_the_arrays_of_a_request_count() -> None:
    request = asked(extra_args={"x": [np.zeros(5, np.float32)]})
    assert KeptResult(request, [b"123"]).num_bytes == 3 + PICTURE.nbytes + 20


def test_what_is_dropped_for_want_of_room_is_counted() -> None:
    store = ResultStore(TTL_S, MAX_BYTES)
    for number in range(4):
        store.keep(result(str(number), 40), None, 0.0)
    assert [store.get(str(number)) is None for number in range(4)] == [True, True, False, False]
    assert store.dropped == 2


PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


def asked(prompt: str = "a", **changes: Any) -> DiffusionRequest:
    own = {name: changes.pop(name) for name in list(changes)
           if name in ("request_id", "model", "detached", "preview_every", "timeout_s",
                       "multi_modal_data")}  # fmt: skip
    own.setdefault("request_id", "r")
    own.setdefault("multi_modal_data", {"image": PICTURE})
    return build_request(prompt, OmniDiffusionSamplingParams(**changes), **own)


def test_the_same_content_is_known_again() -> None:
    one = asked(extra_args={"x": 1, "y": {"p": [1], "q": "2"}}, seed=1, timeout_s=3.0)
    same = asked(extra_args={"y": {"q": "2", "p": [1]}, "x": 1}, seed=1, timeout_s=2.0,
                 multi_modal_data={"image": PICTURE.copy()})  # fmt: skip
    assert same_content(one, same)
    assert same_content(DiffusionRequest.from_wire(one.to_wire()), one)


@pytest.mark.parametrize(
    "change",
    [{"prompt": "b"}, {"request_id": "s"}, {"seed": 0}, {"detached": True}, {"model": "m"},
     {"multi_modal_data": {"image": PICTURE + 1}},
     {"multi_modal_data": {"image": PICTURE.reshape(2, 8, 3)}},
     {"multi_modal_data": {"mask_image": PICTURE}}, {"extra_args": {"x": 1}}],
)  # fmt: skip
def test_other_content_is_another_request(change: dict[str, Any]) -> None:
    assert not same_content(asked(**change), asked())


# -- what a client has asked for


def pending(request_id: str = "r", **options: Any) -> PendingRequest:
    timeout_s = options.pop("timeout_s", None)
    request = build_request("a", request_id=request_id, timeout_s=timeout_s)
    return PendingRequest(request, RequestHandle(request, lambda _: None), 0.0, **options)


FULL = QueueFullError("full", retry_after_ms=500.0)
ENDING = DuplicateRequestError("in use", retry_after_ms=200.0)


@pytest.mark.parametrize(
    ("error", "waits_for_room", "attempts", "deferred"),
    [
        (FULL, True, 0, True),
        (FULL, False, 0, False),
        (FULL, False, 1, True),
        (QueueFullError("full"), True, 0, False),
        (ENDING, True, 0, False),
        (ENDING, False, 1, True),
        (DuplicateRequestError("in use"), True, 1, False),
        (InvalidRequestError("wrong", retry_after_ms=1.0), True, 1, False),
    ],
)
def test_a_refusal_is_the_end_unless_waiting_helps(
    error: OmniError, waits_for_room: bool, attempts: int, deferred: bool
) -> None:
    requests = PendingRequests()
    one = pending(waits_for_room=waits_for_room, attempts=attempts)
    assert requests.add(one)
    assert requests.defer("r", error, now=10.0) is deferred
    assert requests.next_due() == (10.0 + (error.retry_after_ms or 0) / 1000 if deferred else None)
    if deferred:
        assert requests.take_due(10.1) == []
        assert requests.take_due(11.0) == [one]
        assert requests.take_due(12.0) == []
        assert requests.handle("r") is one.handle, "it is still pending"


def test_refused_requests_go_again_in_order_and_not_all_at_once() -> None:
    requests = PendingRequests()
    everything = [pending(str(number), waits_for_room=True) for number in range(600)]
    for one in everything:
        requests.add(one)
        requests.defer(one.request.request_id, FULL, now=0.0)
    sent, now = [], 0.0
    for _ in range(20):
        now += 0.5
        due = requests.take_due(now)
        assert len(due) <= 256
        sent += due
    assert sent == everything


def test_aborted_requests_that_the_engine_has_not_got_end_here() -> None:
    requests = PendingRequests()
    with_engine, deferred = pending("with"), pending("deferred", waits_for_room=True)
    requests.add(with_engine)
    requests.add(deferred)
    requests.defer("deferred", FULL, now=0.0)
    assert not requests.note_known("with")
    assert requests.abort(["with", "deferred", "unknown"]) == ([deferred], ["with", "unknown"])
    assert len(requests) == 1
    assert requests.take_due(60.0) == []
    again, ended = requests.forgotten()
    assert (again, ended) == ([with_engine], [])
    assert isinstance(with_engine.again(1.0), RequestAbortedError)


def test_the_engine_is_told_to_end_a_request_once_it_has_taken_it_in() -> None:
    """Until then its id may be another one's, whose request must not be ended."""
    requests = PendingRequests()
    requests.add(pending("new"))
    assert requests.abort(["new"]) == ([], [])
    assert requests.owed_aborts() == ["new"]
    assert requests.note_known("new"), "now it is to be told"
    assert not requests.note_known("new"), "once"
    assert requests.owed_aborts() == []


def test_a_request_is_submitted_again_only_so_often_and_with_the_time_that_is_left() -> None:
    requests, one = PendingRequests(), pending(timeout_s=5.0)
    requests.add(one)
    for attempt in range(MAX_ATTEMPTS):
        assert requests.forgotten() == ([one], [])
        request = one.again(float(attempt))
        assert isinstance(request, DiffusionRequest)
        assert request.timeout_s == 5.0 - attempt
        assert same_content(request, one.request)
    assert isinstance(one.again(5.0), RequestTimeoutError)
    again, ((given_up, error),) = requests.forgotten()
    assert (again, given_up) == ([], one)
    assert isinstance(error, EngineClosedError)
    assert len(requests) == 0


# -- estimated waits


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 1000)), max_size=30),
    st.integers(0, 10_000),
)
def test_a_wait_is_always_a_sensible_one(steps: list[tuple[float, int]], waiting: int) -> None:
    throughput, now, ended = Throughput(), 0.0, 0
    for seconds, more in steps:
        now, ended = now + seconds, ended + more
        throughput.note(ended, now)
        assert 100 <= throughput.wait_ms(waiting, ended, now) <= 60_000


def test_a_wait_follows_from_how_fast_requests_end() -> None:
    for per_second, expected_ms in ((100, 1010), (10, 10_100), (1, 60_000)):
        throughput = Throughput()
        for tenth in itertools.count():
            now = tenth / 10
            throughput.note(int(now * per_second), now)
            if now >= 20:
                break
        assert throughput.wait_ms(1000, 20 * per_second, 20.0) == pytest.approx(expected_ms, 0.01)
    idle = Throughput()
    idle.note(5, 0.0)
    assert idle.wait_ms(1000, 5, 20.0) == 20_000, "nothing ended for so long"
