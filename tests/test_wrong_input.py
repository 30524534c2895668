"""What a user sees when things go wrong: one test per row, a real engine, real sockets.

All rows share one engine with several models, some of which can't be loaded. After every row the
same engine still serves, and nothing is left waiting or running in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import yaml
import zmq
from raw_client import Array, Message, RawClient, encode

from omni_engine import LoRARequest, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine import connection
from omni_engine.engine.process import EngineProcess
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import (
    ERRORS_BY_CODE,
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelLoadError,
    OmniError,
    ProtocolVersionError,
    StageUnavailableError,
)
from omni_engine.protocol.sampling import SAMPLING_FIELDS
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.settings import load_settings

PATTERN = "support_pipelines:PatternPipeline"
GIB = 2**30
INTERNAL = "internal_error"

_ids = itertools.count()


def stage(name: str, replicas: int = 1, **arguments: object) -> dict[str, object]:
    return {
        "name": name,
        "engine_args": {"model": "bundled", "max_num_seqs": 4, **arguments},
        "runtime": {"devices": "cpu", "replicas": replicas, "threads": 1},
    }


ODD_PIPELINE = """
import dataclasses
from support_pipelines import PatternPipeline

class OddMetrics:
    pass

class OddPipeline(PatternPipeline):
    extra_args = PatternPipeline.extra_args | {"field"}
    per_request = PatternPipeline.per_request | {"field"}

    def forward(self, batch):
        outputs = super().forward(batch)
        for request, output in zip(batch.requests, outputs):
            match request.sampling_params.extra_args.get("field"):
                case "images":
                    output.images = [picture / 255 for picture in output.images]
                case "error":
                    output.error = ValueError("not an OmniError")
                case "metrics":
                    output.metrics = OddMetrics()
                case "surrogate":
                    raise ValueError("\\udcff")
        return outputs
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine with good models and models that can't be loaded; all workers are settled."""
    folder = tmp_path_factory.mktemp("deploy")
    unknown, empty, guided = (folder / name for name in ("unknown-class", "empty", "guided"))
    for path in (unknown, empty):
        path.mkdir()
    guided.symlink_to(
        MODEL_DIR
    )  # under another name the engine knows no defaults of its own for it
    (unknown / "model_index.json").write_text(json.dumps({"_class_name": "QwenImagePipelin"}))
    loras = [{"name": name, "path": f"bundled:{name}"} for name in ("outline", "night")]
    stages = [
        stage("pattern", pipeline="odd_pipelines:OddPipeline"),
        stage("guided", model=str(guided), lora_modules=loras, default_sampling_params={
            "height": 64, "width": 64, "num_inference_steps": 2}),
        stage("pair", replicas=2, pipeline=PATTERN, max_worker_deaths=1),
        stage("no-class", pipeline="support_pipelines:Nope"),
        stage("no-forward", pipeline="support_pipelines:NoForward"),
        stage("unknown-class", model=str(unknown)),
        stage("empty-folder", model=str(empty)),
    ]  # fmt: skip
    (folder / "odd_pipelines.py").write_text(ODD_PIPELINE)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{folder}")
    deploy = folder / "deploy.yaml"
    deploy.write_text(
        yaml.safe_dump({"stage_args": [{"stage_id": i, **s} for i, s in enumerate(stages)]})
    )
    engine = EngineProcess(load_settings(config_path=deploy).config)
    try:
        with RawClient(engine.endpoint, timeout_s=240) as client:
            client.call("wait_ready")
        yield engine.endpoint
    finally:
        engine.close()
        monkeypatch.undo()


@pytest.fixture
def raw(endpoint: str) -> Iterator[RawClient]:
    with RawClient(endpoint) as client:
        yield client


@pytest.fixture
def client(endpoint: str) -> Iterator[OmniClient]:
    with OmniClient(endpoint) as client:
        yield client


@pytest.fixture(autouse=True)
def the_engine_goes_on(endpoint: str) -> Iterator[None]:
    """After every row: the same engine, idle, and a good request completes."""
    with RawClient(endpoint) as client:
        pid = client.call("status")["status"]["pid"]
        yield
        assert completes(client, "pattern")
        assert settled(client)["pid"] == pid


def settled(client: RawClient, timeout_s: float = 60.0) -> Message:
    """The status, once nothing waits and nothing runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status: Message = client.call("status")["status"]
        if not any(stage["waiting"] or stage["running"] for stage in status["stages"]):
            return status
    raise AssertionError(f"not idle after {timeout_s:g} s: {status}")


def wire(model: str = "pattern", **changes: Any) -> Message:
    """A good request, but for the changes; fields of the request or sampling parameters."""
    request: Message = {"request_id": f"row-{next(_ids)}", "model": model, "prompt": "a red circle"}
    for name, value in changes.items():
        if name in SAMPLING_FIELDS:
            request.setdefault("sampling_params", {})[name] = value
        else:
            request[name] = value
    return request


def completes(client: RawClient, model: str = "pattern") -> bool:
    """Whether a good request completes with a picture."""
    request = wire(model)
    client.submit(request)
    output = client.output(request["request_id"])
    assert output["error"] is None, output["error"]
    return len(output["images"]) == 1


def refused_beside_a_good_one(client: RawClient, bad: Any) -> Message:
    """Submit a bad and a good request in one message; the bad one's error."""
    good = wire()
    message_id = client.submit(bad, good)
    refusal = client.reply(message_id)
    assert (refusal["type"], refusal.get("request_index")) == ("error", 0), refusal
    accepted = client.reply(message_id)
    assert accepted["request_ids"] == [good["request_id"]]
    assert client.output(good["request_id"])["error"] is None
    error: Message = refusal["error"]
    return error


def told_to_python(client: OmniClient, request: Message) -> OmniError | None:
    """The error that a user of the Python client gets for the same request beside a good one."""
    try:
        params = OmniDiffusionSamplingParams(**request.get("sampling_params", {}))
    except OmniError as error:
        return error
    good_params = OmniDiffusionSamplingParams()
    outputs = client.generate(
        [request["prompt"], "a blue square"], [params, good_params],
        model=request["model"], timeout_s=60,
    )  # fmt: skip
    assert outputs[1].ok, outputs[1].error
    return outputs[0].error


def matches(error: Message, code: str, field: str, **parts: str | None) -> None:
    """Check an error map: its code and field, and what value, expected and hint contain."""
    assert (error["code"], error.get("field")) == (code, field), error
    for name, part in parts.items():
        assert part is None or part in error.get(name, ""), (name, error)


# -- requests that are wrong

Row = tuple[Message, str, str, str | None, str | None, str | None]

INVALID, LIMIT, UNKNOWN = "invalid_request", "limit_exceeded", "unknown_field"
BIG_INTEGER = "an integer from 1 to 2147483647"
SEEDS = "an integer from 0 to 9223372036854775807"
PLAIN = "finite numbers"

# what: (request, code, field, value, expected, hint)
ROWS: dict[str, Row] = {
    "size not divisible": (
        wire(height=63), INVALID, "height", "63", "a multiple of 8, such as 64", None),
    "million pixels a side": (
        wire(width=10**6), LIMIT, "width", "1000000", "at most 4096", None),
    "too many pixels": (
        wire(width=4096, height=4096), LIMIT, "height x width", "16777216", "4194304", None),
    "no steps": (
        wire(num_inference_steps=0), INVALID, "num_inference_steps", "0", BIG_INTEGER, None),
    "too many steps": (
        wire(num_inference_steps=1001), LIMIT, "num_inference_steps", "1001", "1000", None),
    "empty prompt": (
        wire(prompt=" \n"), INVALID, "prompt", r"' \n'", "at least one visible character", None),
    "list of prompts": (
        wire(prompt=["a", "b"]), INVALID, "prompt", "a list of 2", "a string or one dict",
        "Submit several requests"),
    "number for a prompt": (
        wire(prompt=5), INVALID, "prompt", "5 (int)", "a string", None),
    "prompt too long": (
        wire(prompt="x" * 20_001), LIMIT, "prompt", "20001 characters", "at most 20000", None),
    "negative prompt too long": (
        wire(negative_prompt="x" * 20_001), LIMIT, "negative_prompt", "20001", "20000", None),
    "too many outputs": (
        wire(num_outputs_per_prompt=65), LIMIT, "num_outputs_per_prompt", "65", "at most 64", None),
    "unknown extra argument": (
        wire(extra_args={"sleep_s": 1}), UNKNOWN, "extra_args.sleep_s", None, "sleep_ms",
        "Did you mean 'sleep_ms'?"),
    "adapter where there are none": (
        wire(lora_request={"name": "night"}), "unknown_adapter", "lora_request.name", "night",
        "no adapter", "lora_modules"),
    "unknown adapter": (
        wire("guided", lora_request={"name": "nihgt"}), "unknown_adapter", "lora_request.name",
        "nihgt", "one of night, outline", "Did you mean 'night'?"),
    "wrong model name": (
        wire("patern"), "unknown_model", "model", "patern", "one of pattern, guided, pair",
        "Did you mean 'pattern'?"),
    "scale that is no number": (
        wire("guided", lora_request={"name": "night", "scale": math.nan}), INVALID,
        "lora_request.scale", "nan", "a finite number from -100 to 100", None),
    "NaN for a number": (
        wire(guidance_scale=math.nan), INVALID, "guidance_scale", "nan", "a finite number", None),
    "infinity for a number": (
        wire(eta=math.inf), INVALID, "eta", "inf", "a finite number of at least 0", None),
    "NaN in sigmas": (
        wire(sigmas=[1.0, math.nan]), INVALID, "sigmas", "nan", "finite numbers", None),
    "NaN in extra_args": (
        wire(extra_args={"sleep_ms": math.nan}), INVALID, "extra_args.sleep_ms", "nan", PLAIN,
        None),
    "NaN deep in extra_args": (
        wire(extra_args={"raise_text": [{"x": -math.inf}]}), INVALID, "extra_args.raise_text",
        "-inf", PLAIN, None),
    "boolean for an integer": (
        wire(num_inference_steps=True), INVALID, "num_inference_steps", "True (bool)", BIG_INTEGER,
        None),
    "boolean for a number": (
        wire(strength=True), INVALID, "strength", "True (bool)", "a finite number from 0 to 1",
        None),
    "float for an integer": (
        wire(height=64.0), INVALID, "height", "64.0 (float)", BIG_INTEGER, None),
    "negative seed": (
        wire(seed=-1), INVALID, "seed", "-1", SEEDS, None),
    "seed too large": (
        wire(seed=2**63), INVALID, "seed", str(2**63), SEEDS, None),
    "seed too large for its outputs": (
        wire(seed=2**63 - 1, num_outputs_per_prompt=2), INVALID, "seed", str(2**63 - 1),
        "num_outputs_per_prompt", None),
    "no sigmas": (
        wire(sigmas=[]), INVALID, "sigmas", "[]", "a list of 1 to 10000", None),
    "sigmas that contradict the steps": (
        wire(sigmas=[1.0, 0.5], num_inference_steps=4), INVALID, "num_inference_steps", "4",
        "2, the number of sigmas", None),
    "unknown output type": (
        wire(output_type="pil"), INVALID, "output_type", "'pil'", "one of 'np', 'latent'", None),
    "nesting too deep": (
        wire(extra_args={"raise_text": json.loads("[" * 900 + "]" * 900)}), INVALID,
        "extra_args.raise_text", "[[[", "nested at most 16 deep", None),
    "guidance_scale that has no effect": (
        wire("guided", guidance_scale=3.5), INVALID, "guidance_scale", "3.5", "true_cfg_scale",
        "isn't guidance-distilled; use true_cfg_scale"),
    "parameter that the model lacks": (
        wire("guided", strength=0.5), INVALID, "strength", "0.5", "num_inference_steps", None),
    "negative prompt without guidance": (
        wire("guided", negative_prompt="blue", true_cfg_scale=1), INVALID, "negative_prompt",
        "blue", "true_cfg_scale > 1", None),
    "guidance without negative prompt": (
        wire("guided", true_cfg_scale=4), INVALID, "true_cfg_scale", "4", "negative_prompt",
        '(" ")'),
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_a_wrong_request(what: str, raw: RawClient, client: OmniClient) -> None:
    request, code, field, value, expected, hint = ROWS[what]
    error = refused_beside_a_good_one(raw, request)
    matches(error, code, field, value=value, expected=expected, hint=hint)
    if request["model"] not in ("pattern", "guided"):
        return
    python = told_to_python(client, request)
    assert type(python) is ERRORS_BY_CODE[code]
    assert python.to_wire() == error


WIRE_ROWS: dict[str, Row] = {
    "unknown field of a request": (
        wire(promt="x"), UNKNOWN, "promt", None, "prompt", "Did you mean 'prompt'?"),
    "unknown sampling parameter": (
        wire(sampling_params={"hieght": 64}), UNKNOWN, "sampling_params.hieght", None, "height",
        "Did you mean 'height'?"),
    "unknown field of an adapter": (
        wire(lora_request={"name": "night", "scal": 1}), UNKNOWN, "lora_request.scal", None,
        "scale", "Did you mean 'scale'?"),
    "adapter without a name": (
        wire(lora_request={"scale": 1}), INVALID, "lora_request.name", None, "name", None),
    "unknown field of a prompt": (
        wire(prompt={"prompt": "a", "negativ": "b"}), UNKNOWN, "prompt.negativ", None,
        "negative_prompt", "negative_prompt"),
    "unknown input": (
        wire(multi_modal_data={"imag": 1}), UNKNOWN, "multi_modal_data.imag", None, "image",
        "Did you mean 'image'?"),
    "input that the model lacks": (
        wire(multi_modal_data={"image": Array("uint8", (1, 1, 3), bytes(3))}), UNKNOWN,
        "multi_modal_data.image", None, "no input at all", None),
    "input of floats": (
        wire(multi_modal_data={"image": Array("float32", (1, 1, 3), bytes(12))}), INVALID,
        "multi_modal_data.image", "dtype float32", "a uint8 array of shape", None),
    "inputs given twice": (
        wire(prompt={"prompt": "a", "multi_modal_data": {"image": 1}},
             multi_modal_data={"image": 1}),
        INVALID, "multi_modal_data", None, "not both", None),
    "no prompt": (
        {"request_id": "no-prompt"}, INVALID, "prompt", None, "a string", None),
    "unknown field of a megabyte": (
        wire(**{"x" * 2**20: 1}), UNKNOWN, "x" * 199 + "…", None, "prompt", None),
    "model's name of a megabyte": (
        wire("x" * 2**20), INVALID, "model", "xxx", "at most 1000 characters", None),
    "request id of a megabyte": (
        wire(request_id="x" * 2**20), INVALID, "request_id", "xxx", "1 to 200 printable", None),
    "request id with a line feed": (
        wire(request_id="a\nb"), INVALID, "request_id", r"a\nb", "1 to 200 printable", None),
}  # fmt: skip


@pytest.mark.parametrize("what", WIRE_ROWS)
def test_a_wrong_request_on_the_wire(what: str, raw: RawClient) -> None:
    request, code, field, value, expected, hint = WIRE_ROWS[what]
    error = refused_beside_a_good_one(raw, request)
    matches(error, code, field, value=value, expected=expected, hint=hint)
    assert len(msgpack.packb(error)) < 3000


# What each field takes; everything else in WRONG is refused there.
TEXT, WHOLE, NUMBER, LIST, MAP = "text", "whole", "number", "list", "map"
TAKES: dict[str, set[str]] = {
    **{name: {WHOLE, NUMBER} for name in SAMPLING_FIELDS},
    **{name: {WHOLE} for name in ("height", "width", "num_frames", "num_inference_steps",
                                  "num_outputs_per_prompt", "max_sequence_length", "seed")},
    "negative_prompt": {TEXT}, "output_type": set(), "sigmas": {LIST},
    "lora_request": set(), "extra_args": set(),
    "request_id": {TEXT}, "prompt": {TEXT}, "model": set(),
    "multi_modal_data": set(), "sampling_params": set(), "detached": {"flag"},
}  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    ("flag", True), (WHOLE, 8), (NUMBER, 0.5), (TEXT, "8"), ("binary", b"8"), (LIST, [8]),
    (MAP, {"8": 8}), ("array", Array("uint8", (2,), b"\x08\x08")),
    ("array of one", Array("int64", (1,), bytes(8))), ("empty array", Array("bool", (0,), b"")),
    ("bfloat16", Array("bfloat16", (), bytes(2))),
]  # fmt: skip


@pytest.mark.parametrize("field", sorted(TAKES))
def test_a_wrong_type_in_a_field_of_a_request(field: str, raw: RawClient) -> None:
    for kind, value in WRONG:
        accepted_arrays = field == "sigmas" and kind in ("array", "array of one")
        if kind in TAKES[field] or accepted_arrays:
            continue
        error = refused_beside_a_good_one(raw, wire(**{field: value}))
        assert error["code"] in (INVALID, UNKNOWN, "unknown_model"), (kind, error)
        assert error["field"].partition(".")[0] == field, (kind, error)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("hello", "client"), ("submit", "requests"), ("abort", "request_ids"), ("ping", "id"),
     ("ping", "type"), ("ping", "v")],
)  # fmt: skip
def test_a_wrong_type_in_a_field_of_a_message(kind: str, field: str, raw: RawClient) -> None:
    more = [("negative", -1), ("nothing", []), ("too many", [{}] * 5000), ("texts", ["a"] * 5000)]
    takes = {"client": {TEXT}, "id": {WHOLE}, "request_ids": set(), "requests": set()}
    for what, value in WRONG + more:
        if what in takes.get(field, set()):
            continue
        message = {"v": 1, "type": kind, "id": 4, field: value}
        raw.send_frames(encode(message))
        answer = raw.reply(None if field == "id" else 4)
        assert answer["type"] == "error", what
        assert answer["error"]["field"] == field, (what, answer)
        assert answer["error"]["code"] in (
            INVALID, "malformed_message", "protocol_version_mismatch"), answer  # fmt: skip


def test_a_duplicate_request_id(raw: RawClient, endpoint: str, client: OmniClient) -> None:
    first = wire(extra_args={"sleep_ms": 3000})
    assert raw.reply(raw.submit(first))["type"] == "accepted"
    handle = client.submit("a", request_id=first["request_id"])
    with RawClient(endpoint) as other:
        error = refused_beside_a_good_one(other, {**first, "detached": True})
    matches(error, "duplicate_request_id", "request_id", value=first["request_id"],
            expected="no live request has")  # fmt: skip
    refused = handle.result(60)
    assert refused.error is not None
    assert refused.error.to_wire() == error
    assert raw.output(first["request_id"])["error"] is None
    twice = [client.submit("a", request_id="twice") for _ in range(2)]
    assert [handle.result(60).error is None for handle in twice] == [True, False]


SURROGATE = "a\ud800"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda c: c.submit(SURROGATE), "prompt"),
        (lambda c: c.submit("a", request_id=SURROGATE), "request_id"),
        (lambda c: c.submit("a", model=SURROGATE), "model"),
        (lambda c: OmniDiffusionSamplingParams(negative_prompt=SURROGATE), "negative_prompt"),
        (lambda c: OmniDiffusionSamplingParams(extra_args={"x": [SURROGATE]}), "extra_args.x"),
        (lambda c: OmniDiffusionSamplingParams(extra_args={"x": {SURROGATE: 1}}), "extra_args.x"),
        (lambda c: LoRARequest(SURROGATE), "lora_request.name"),
        (lambda c: c.load_lora(SURROGATE, "a.safetensors"), "name"),
        (lambda c: c.load_lora("a", f"{SURROGATE}.safetensors"), "path"),
        (lambda c: c.loras(model=SURROGATE), "model"),
        (lambda c: c.unload_lora(SURROGATE), "name"),
    ],
    ids=[
        "prompt",
        "request_id",
        "model",
        "negative_prompt",
        "value",
        "key",
        "adapter",
        "loaded name",
        "loaded path",
        "model of adapters",
        "unloaded name",
    ],
)
def test_a_lone_surrogate(
    make: Callable[[OmniClient], object], field: str, client: OmniClient
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(client)
    assert caught.value.field == field
    assert r"\ud800" in (caught.value.value or "")
    str(caught.value).encode()
    assert client.generate("a", timeout_s=60)[0].ok


@pytest.mark.parametrize(
    "value", [2**64, 10**5000, 1j, object(), np.zeros(2, complex), np.array(["a"]), {1: 2}],
    ids=["integer", "vast integer", "complex", "object", "complex array", "text array", "key"],
)  # fmt: skip
def test_an_extra_argument_that_can_not_be_sent(value: object, client: OmniClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        OmniDiffusionSamplingParams(extra_args={"x": value})
    assert caught.value.field == "extra_args.x"
    assert "64-bit integers" in (caught.value.expected or "")
    assert client.generate("a", timeout_s=60)[0].ok


# -- messages that are wrong


def invalid_text(message: Message) -> list[bytes]:
    """The message with every `#` replaced by a byte that is no UTF-8."""
    return [msgpack.packb(message).replace(b"#", b"\xff")]


@pytest.mark.parametrize(
    "message",
    [
        {"v": 1, "type": "submit", "id": 9, "requests": [{"prompt": "a # circle"}]},
        {"v": 1, "type": "submit", "id": 9, "requests": [{"prompt": "a", "#": 1}]},
        {"v": 1, "type": "#", "id": 9},
        {"#": 1, "v": 1, "type": "ping", "id": 9},
    ],
    ids=["prompt", "key", "type", "field"],
)
def test_text_that_is_no_utf8(message: Message, raw: RawClient) -> None:
    raw.send_frames(invalid_text(message))
    matches(raw.reply(9)["error"], "malformed_message", "header", expected="UTF-8")


@pytest.mark.parametrize("version", [0, 2, -1, 2**63, "1", 1.0, None, [1]], ids=repr)
def test_another_protocol_version(version: object, raw: RawClient) -> None:
    answer = raw.call("submit", v=version, requests=[wire()])
    matches(answer["error"], "protocol_version_mismatch", "v", value=str(version),
            expected="1", hint="same omni-engine version")  # fmt: skip


class FakeEngine:
    """An engine's socket without an engine: says what a test wants it to."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._identity = b""

    def receive(self, kind: str) -> Message:
        """The next message of a type."""
        while True:
            assert self._socket.poll(30_000), f"no {kind} came"
            self._identity, header = self._socket.recv_multipart()
            message: Message = msgpack.unpackb(header)
            if message["type"] == kind:
                return message

    def answer(self, message: Message, kind: str, **fields: Any) -> None:
        answer = {"v": 1, "type": kind, "reply_to": message["id"], **fields}
        self._socket.send_multipart([self._identity, msgpack.packb(answer)])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    with contextlib.closing(FakeEngine()) as engine:
        yield engine


@pytest.fixture
def fooled(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[OmniClient]:
    """A client of the fake engine; it pings often."""
    monkeypatch.setattr(connection, "PING_INTERVAL_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(OmniClient, fake.endpoint, connect_timeout_s=30)
        hello = fake.receive("hello")
        fake.answer(hello, "welcome", session="first", max_message_bytes=10**6, models=[])
        with connecting.result(30) as client:
            yield client


def test_the_python_client_meets_another_version(fake: FakeEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(OmniClient, fake.endpoint, connect_timeout_s=30)
        fake.answer(fake.receive("hello"), "welcome", v=2)
        with pytest.raises(ProtocolVersionError, match="expected: 1"):
            connecting.result(30)


def test_the_python_client_learns_that_it_was_forgotten(
    fake: FakeEngine, fooled: OmniClient
) -> None:
    handle, call = fooled.submit("a"), fooled._connection.call_soon("status")
    (asked,) = fake.receive("submit")["requests"]
    assert asked["request_id"] == handle.request_id
    for number in range(3):
        fake.answer(fake.receive("ping"), "pong", session=f"another {number}")
        assert fake.receive("submit")["requests"] == [asked]
        assert type(call.exception(30)) is EngineClosedError
    fake.answer(fake.receive("ping"), "pong", session="and one more")
    error = handle.result(30).error
    assert type(error) is EngineClosedError
    assert "4 times" in str(error)


def test_the_python_client_learns_that_a_whole_message_was_refused(
    fake: FakeEngine, fooled: OmniClient
) -> None:
    handles = [fooled.submit("a"), fooled.submit("b")]
    error = MessageTooLargeError("too large", field="message").to_wire()
    for _ in handles:
        submit = fake.receive("submit")
        fake.answer(submit, "error", request_id=None, request_index=None, error=error)
    assert [type(handle.result(30).error) for handle in handles] == [MessageTooLargeError] * 2


def test_the_python_client_survives_an_engine_that_talks_nonsense(
    fake: FakeEngine, fooled: OmniClient
) -> None:
    for nonsense in ({}, {"event": 1}, {"output": {}}):
        handle = fooled.submit("a")
        fake.answer(fake.receive("submit"), "output", **nonsense)
        error = handle.result(30).error
        assert error is not None
        assert error.code == "malformed_message"


def test_a_callback_that_fails_costs_nothing(client: OmniClient) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("in the user's code")

    assert client.submit("a", on_event=fail).result(60).ok
    assert client.generate("a", timeout_s=60)[0].ok


def test_the_python_client_finds_no_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineClosedError, match="no engine answers") as caught:
        OmniClient(f"ipc://{tmp_path}/nobody", connect_timeout_s=0.2)
    assert caught.value.field == "endpoint"
    assert "omni-engine serve" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", ["sumbit", "", "welcome", "x" * 10**6])
def test_an_unknown_message_type(kind: str, raw: RawClient) -> None:
    answer = raw.call(kind)
    matches(answer["error"], "malformed_message", "type", value=kind[:100],
            expected="hello, submit, abort")  # fmt: skip


@pytest.mark.parametrize("kind", sorted(messages.CLIENT_FIELDS))
def test_an_unknown_field_of_a_message(kind: str, raw: RawClient) -> None:
    answer = raw.call(kind, requsts=[], **({"requests": [wire()]} if kind == "submit" else {}))
    matches(answer["error"], UNKNOWN, "requsts", expected="id, ")


def zeros(size: int) -> mmap.mmap:
    """Zeros that take no memory until someone writes them."""
    return mmap.mmap(-1, size)


@pytest.mark.parametrize("cut", ["header", "buffer", "buffers"])
def test_a_message_just_beyond_the_limit(cut: str, raw: RawClient) -> None:
    size = (GIB // 4 + 100) if cut == "header" else GIB // 4 if cut == "buffer" else GIB // 8
    picture = Array("uint8", (size,), zeros(size))
    images: Any = picture if cut == "buffer" else [picture, picture]
    message = {"v": 1, "type": "submit", "id": 5, "requests": [wire(multi_modal_data=images)]}
    raw.send_frames([picture.data] if cut == "header" else encode(message))
    error = raw.reply(None if cut == "header" else 5)["error"]
    matches(error, "message_too_large", "message", value="26843", expected="at most 268435456")


def test_a_gigabyte_is_refused_by_the_python_client(client: OmniClient, raw: RawClient) -> None:
    rejected = raw.call("status")["status"]["rejected"]
    picture = np.zeros((1024, 349525, 3), np.uint8)
    huge = {"prompt": "a", "multi_modal_data": {"image": picture}}
    bad, good = client.generate([huge, "a blue square"], timeout_s=60)
    assert type(bad.error) is MessageTooLargeError
    matches(
        bad.error.to_wire(), "message_too_large", "message", value="10737", expected="268435456"
    )
    assert good.ok
    assert raw.call("status")["status"]["rejected"] == rejected


def test_a_text_of_too_many_megabytes_is_refused_by_the_python_client(client: OmniClient) -> None:
    bad, good = client.generate(["x" * (codec.MAX_HEADER_BYTES + 1), "a"], timeout_s=60)
    assert type(bad.error) is MessageTooLargeError
    most = f"{codec.MAX_HEADER_BYTES} bytes of text"
    matches(bad.error.to_wire(), "message_too_large", "message", expected=most)
    assert good.ok


def test_many_requests_of_much_text_are_split_into_messages(client: OmniClient) -> None:
    prompts = ["\N{SNOWMAN}" * 19_000 + str(i) for i in range(400)]  # 22 MB
    outputs = client.generate(prompts, timeout_s=120)
    assert all(output.ok for output in outputs)


def test_many_frames_beyond_the_limit(raw: RawClient) -> None:
    pictures = [Array("uint8", (1024, 1024), zeros(2**20))] * 300
    request = wire(multi_modal_data={"image": pictures})
    error = raw.reply(raw.submit(request))["error"]
    matches(error, "message_too_large", "message", value="3145", expected="268435456 bytes in all")


def test_too_many_frames(raw: RawClient) -> None:
    error = raw.reply(raw.submit(wire(extra_args={"x": [Array("uint8", (0,), b"")] * 4096})))
    matches(error["error"], "malformed_message", "frames", value="4097", expected="at most 4096")


def test_too_many_frames_from_the_python_client(client: OmniClient) -> None:
    params = OmniDiffusionSamplingParams(extra_args={"sleep_ms": [np.zeros(0)] * 4096})
    (output,) = client.generate("a", params, timeout_s=60)
    assert output.error is not None
    matches(output.error.to_wire(), "message_too_large", "message", value="4097 frames",
            expected="at most 4096 frames")  # fmt: skip


def test_a_frame_beyond_all_measure_costs_the_connection_only(raw: RawClient) -> None:
    session = raw.call("hello")["session"]
    raw.send_frames([zeros(3 * GIB)])
    raw.send("ping")
    assert raw.find(lambda message: message["type"] == "pong")["session"] != session


def test_an_array_of_too_many_dimensions(raw: RawClient) -> None:
    error = raw.reply(raw.submit(wire(extra_args={"x": Array("uint8", (1,) * 50_000, b"\0")})))
    matches(error["error"], "malformed_message", "header", expected="at most 32 dimensions")


# -- models, pipelines and workers that fail

BROKEN: dict[str, tuple[str, str, str, str]] = {
    "no-class": ("model_load_failed", "pipeline", "support_pipelines:Nope", "'module:Class'"),
    "no-forward": ("pipeline_contract", "pipeline", "NoForward", "forward(batch)"),
    "unknown-class": (
        "model_load_failed", "model_index.json:_class_name", "QwenImagePipelin",
        "a pipeline class of diffusers"),
    "empty-folder": ("model_load_failed", "model", "empty", "a local diffusers folder"),
}  # fmt: skip


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_that_can_not_be_loaded(model: str, raw: RawClient, client: OmniClient) -> None:
    code, field, value, expected = BROKEN[model]
    (found,) = [m for m in raw.call("hello")["models"] if m["name"] == model]
    assert found["state"] == "down"
    matches(found["error"], code, field, value=value, expected=expected)
    if model == "unknown-class":
        assert found["error"]["hint"] == "Did you mean 'QwenImagePipeline'?"
    error = refused_beside_a_good_one(raw, wire(model))
    matches(error, "stage_unavailable", "model", value=model)
    assert found["error"]["message"] in error["message"]
    (output,) = client.generate("a", model=model, timeout_s=60)
    assert type(output.error) is StageUnavailableError
    with pytest.raises(ModelLoadError):
        client.wait_until_ready(60)


def test_a_model_folder_that_is_missing(tmp_path: Path, client: OmniClient) -> None:
    with pytest.raises(ConfigError, match="there is no folder") as caught:
        Omni(str(tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert client.generate("a", timeout_s=60)[0].ok


def test_a_request_that_makes_its_batch_fail(raw: RawClient) -> None:
    requests = [wire(seed=i) for i in range(3)]
    requests.insert(1, wire(extra_args={"raise_text": "the third law"}))
    raw.submit(*requests)
    outputs = [raw.output(request["request_id"]) for request in requests]
    assert [output["error"] is None for output in outputs] == [True, False, True, True]
    error = outputs[1]["error"]
    assert error["code"] == "model_error"
    assert "RuntimeError: the third law" in error["message"]
    assert [len(outputs[i]["images"]) for i in (0, 2, 3)] == [1, 1, 1]


def test_a_pipeline_that_returns_too_few(raw: RawClient) -> None:
    bad, good = wire(extra_args={"wrong_count": True}), wire()
    raw.submit(bad, good)
    error = raw.output(bad["request_id"])["error"]
    matches(error, "pipeline_contract", "forward", value="0", expected="exactly 1")
    assert raw.output(good["request_id"])["error"] is None


def test_an_extra_argument_that_the_pipeline_can_not_use(raw: RawClient) -> None:
    bad, good = wire(extra_args={"sleep_ms": "long"}), wire()
    raw.submit(bad, good)
    error = raw.output(bad["request_id"])["error"]
    assert error["code"] == "model_error"
    assert "TypeError" in error["message"]
    assert raw.output(good["request_id"])["error"] is None


@pytest.mark.parametrize(
    ("field", "expected"),
    [("images", "a list of uint8 arrays of shape"), ("error", "None or an OmniError"),
     ("metrics", "OutputMetrics")],
)  # fmt: skip
def test_a_pipeline_whose_output_is_unusable(field: str, expected: str, raw: RawClient) -> None:
    bad, good = wire(extra_args={"field": field}), wire()
    raw.submit(bad, good)
    error = raw.output(bad["request_id"])["error"]
    matches(error, "pipeline_contract", f"DiffusionOutput.{field}", expected=expected)
    assert raw.output(good["request_id"])["error"] is None


def test_a_pipeline_that_raises_text_that_can_not_be_sent(raw: RawClient) -> None:
    bad, good = wire(extra_args={"field": "surrogate"}), wire()
    raw.submit(bad, good)
    error = raw.output(bad["request_id"])["error"]
    assert error["code"] == "model_error"
    assert r"ValueError: \udcff" in error["message"]
    assert raw.output(good["request_id"])["error"] is None


def state_of(client: RawClient, model: str) -> str:
    (found,) = [m["state"] for m in client.call("hello")["models"] if m["name"] == model]
    return str(found)


def kill_a_worker(client: RawClient, number: int) -> None:
    """Kill a worker of the pair, which the breaker leaves dead; another model goes on."""
    (pair,) = [s for s in client.call("status")["status"]["stages"] if s["name"] == "pair"]
    os.kill(pair["workers"][number]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while pair["workers"][number]["state"] != "dead":
        assert time.monotonic() < deadline
        (pair,) = [s for s in client.call("status")["status"]["stages"] if s["name"] == "pair"]
    assert completes(client, "pattern")


def test_workers_die_one_after_the_other(raw: RawClient, client: OmniClient) -> None:
    assert state_of(raw, "pair") == "ready"
    kill_a_worker(raw, 0)
    assert state_of(raw, "pair") == "degraded"
    assert completes(raw, "pair")
    kill_a_worker(raw, 1)
    assert state_of(raw, "pair") == "down"
    error = refused_beside_a_good_one(raw, wire("pair"))
    matches(error, "stage_unavailable", "model", value="pair", hint="status")
    assert "SIGKILL" in error["message"]
    (output,) = client.generate("a", model="pair", timeout_s=60)
    assert type(output.error) is StageUnavailableError


# -- robustness: whatever comes, the engine serves on

SAMPLES: list[Message] = [
    {"v": 1, "type": "hello", "id": 1, "client": "fuzz"},
    {"v": 1, "type": "submit", "id": 2, "requests": [
        {"prompt": "a", "sampling_params": {"seed": 1, "sigmas": [1.0, 0.5], "lora_request": None,
                                            "extra_args": {"sleep_ms": 1}}},
        {"prompt": {"prompt": "b", "negative_prompt": "c"}, "detached": True}]},
    {"v": 1, "type": "abort", "id": 3, "request_ids": ["nobody", "row-1"]},
    {"v": 1, "type": "status", "id": 4},
    {"v": 1, "type": "wait_ready", "id": 5},
    {"v": 1, "type": "ping", "id": 6},
]  # fmt: skip


def no_internal_error(client: RawClient) -> None:
    """Read everything that came so far: no answer may tell of a fault of the engine itself."""
    last = client.send("ping")
    for message in client.messages():
        error = message.get("error") or (message.get("output") or {}).get("error") or {}
        assert error.get("code") != INTERNAL, message
        if message["reply_to"] == last and message["type"] == "pong":
            return


def spoiled(rng: random.Random) -> list[bytes]:
    """Random bytes, or a valid message with a few bytes or frames changed."""
    if rng.random() < 0.3:
        return [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 5))]
    frames = [bytearray(frame) for frame in encode(rng.choice(SAMPLES))]
    for _ in range(rng.randrange(1, 4)):
        frame = rng.choice(frames)
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(5):
            case 0:
                del frame[at:]
            case 1:
                frame[at:at] = rng.randbytes(rng.randrange(4))
            case 2:
                frames.append(bytearray(rng.randbytes(rng.randrange(9))))
            case _ if at < len(frame):
                frame[at] = rng.randrange(256)
    return [bytes(frame) for frame in frames]


def test_random_messages(raw: RawClient) -> None:
    rng = random.Random(20)
    for _ in range(200):
        raw.send_frames(spoiled(rng))
    no_internal_error(raw)


def test_every_truncation_of_a_message(raw: RawClient) -> None:
    (header,) = encode(SAMPLES[1])
    for size in range(len(header)):
        raw.send_frames([header[:size]])
    answers = [raw.reply(None) for _ in range(len(header))]
    assert {answer["error"]["code"] for answer in answers} == {"malformed_message"}


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"", b""], [b"", *encode(SAMPLES[0])], [b""] * 100, [*encode(SAMPLES[0]), b""],
     [*encode(SAMPLES[0]), *encode(SAMPLES[0])], [b"\x80"], [b"\xc0"], [b"\x90"]],
    ids=["empty", "two empty", "delimiter first", "many empty", "empty last", "two headers",
         "no fields", "nil", "list"],
)  # fmt: skip
def test_malformed_multipart_messages(frames: list[bytes], raw: RawClient) -> None:
    raw.send_frames(frames)
    answer = next(raw.messages())
    assert answer["type"] == "error"
    assert answer["error"]["code"] in ("malformed_message", "protocol_version_mismatch")


@pytest.mark.parametrize("extension", [-1, 0, 1, 2, 127])
def test_extension_types_where_they_do_not_belong(extension: int, raw: RawClient) -> None:
    value = msgpack.ExtType(extension, bytes(4)) if extension >= 0 else msgpack.Timestamp(1)
    for field in ("v", "type", "id", "requests"):
        raw.send_frames([msgpack.packb({"v": 1, "type": "submit", "id": 7, field: value})])
        assert next(raw.messages())["type"] == "error"


def test_huge_lists_of_requests(raw: RawClient) -> None:
    most = messages.MAX_REQUESTS_PER_MESSAGE
    error = raw.call("submit", requests=[wire()] * (most + 1))["error"]
    matches(error, INVALID, "requests", expected=f"a list of 1 to {most} request maps")
    assert raw.call("submit", requests=[])["error"]["field"] == "requests"
    requests = [wire() if i % 2 else wire(height=1) for i in range(most)]
    message_id = raw.submit(*requests)
    answers = [raw.reply(message_id) for _ in range(most // 2 + 1)]
    assert [answer["type"] for answer in answers] == ["error"] * (most // 2) + ["accepted"]
    raw.send("abort", request_ids=answers[-1]["request_ids"])
    for request in requests[1::2]:
        error = raw.output(request["request_id"])["error"]
        assert error is None or error["code"] == "aborted"


def test_aborting_what_is_unknown(raw: RawClient) -> None:
    raw.send("abort", request_ids=["nobody", "", "\0", "x" * 10**6])
    raw.send("abort", request_ids=["nobody"] * 4096)
    assert raw.call("ping")["type"] == "pong"


def test_aborting_twice(raw: RawClient) -> None:
    slow = wire(extra_args={"sleep_ms": 100})
    raw.submit(slow)
    raw.find(lambda message: message.get("status") == "running")
    for _ in range(3):
        raw.send("abort", request_ids=[slow["request_id"]] * 2)
    assert raw.output(slow["request_id"])["aborted"]
    last = raw.send("ping")
    assert [m["type"] for m in itertools.takewhile(
        lambda m: m["reply_to"] != last, raw.messages())] == []  # fmt: skip


def test_messages_after_bye(raw: RawClient) -> None:
    for _ in range(3):
        raw.send("bye")
        assert raw.call("ping")["type"] == "pong"
        assert completes(raw)


def test_a_client_that_leaves_without_a_word(endpoint: str) -> None:
    for detached in (False, True):
        gone = RawClient(endpoint)
        gone.submit(*(wire(extra_args={"sleep_ms": 20}, detached=detached) for _ in range(10)))
        gone.call("ping")
        gone.close()


def random_client(endpoint: str, seed: int, stop: threading.Event) -> None:
    rng = random.Random(seed)
    submitted: list[str] = []
    with RawClient(endpoint) as client:
        for _ in range(60):
            match rng.randrange(8):
                case 0 | 1:
                    requests = [
                        wire(
                            seed=rng.randrange(5),
                            height=rng.choice([8, 16, 17]),
                            detached=rng.random() < 0.1,
                            extra_args={"sleep_ms": rng.randrange(4)},
                        )
                        for _ in range(rng.randrange(1, 12))
                    ]
                    submitted += [request["request_id"] for request in requests]
                    client.submit(*requests)
                case 2 if submitted:
                    client.send("abort", request_ids=rng.choices(submitted, k=3))
                case 3:
                    client.send_frames(spoiled(rng))
                case 4:
                    client.send("status")
                case 5 if rng.random() < 0.2:
                    client.send("bye")
                case 6:
                    client.send_frames([rng.randbytes(rng.randrange(10**5))])
                case _:
                    client.send("ping")
            if stop.is_set():
                return
        no_internal_error(client)


def test_five_clients_doing_random_things(endpoint: str) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(random_client, endpoint, seed, stop) for seed in range(5)]
        try:
            for future in futures:
                future.result(120)
        finally:
            stop.set()
