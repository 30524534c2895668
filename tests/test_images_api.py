"""``/v1/images/generations``: the official client, plain HTTP, and clients that go away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from http_server import HttpServer, http_server
from PIL import Image
from support_pipelines import pattern
from waiting import wait_for

from omni_engine import OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.engine.gateway import streaming
from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.encoders import EncoderPool
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.image_jobs import (
    ImageJob,
    checked_params,
    pictures_of,
    preview_interval,
    sampling_params,
)
from omni_engine.engine.gateway.image_schemas import ImageGenerationRequest
from omni_engine.engine.gateway.kept_files import KeptFiles
from omni_engine.engine.gateway.mailbox import Mailbox, Partial
from omni_engine.engine.gateway.weights import is_light
from omni_engine.engine.handles import RequestEvent
from omni_engine.protocol.outputs import DiffusionOutput

QUEUE = 220
STAGES = f"""
limits:
  max_waiting_requests: {QUEUE}
http:
  port: 0
  max_kept_bytes: 100000
stage_args:
  - stage_id: 0
    name: shapes
    engine_args:
      model: bundled
      step_execution: true
      default_sampling_params: {{height: 64, width: 64, num_inference_steps: 4}}
      lora_modules:
        - {{name: night, path: "bundled:night"}}
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 1
    name: gated
    engine_args:
      model: bundled
      pipeline: gated_pipelines:GatedSteps
      step_execution: true
    runtime: {{devices: cpu, threads: 1}}
  - stage_id: 2
    name: clear
    engine_args: {{model: bundled, pipeline: "http_pipelines:ClearPipeline"}}
    runtime: {{devices: cpu, threads: 1}}
"""
PROMPT = "a red circle on a white background"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    file = tmp_path_factory.mktemp("http") / "stages.yaml"
    file.write_text(STAGES)
    with http_server("--config", str(file)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none is needed", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def engine(server: HttpServer) -> Iterator[OmniClient]:
    with OmniClient(server.endpoint) as client:
        yield client


def opened(b64_json: str | None) -> Image.Image:
    assert b64_json is not None
    picture = Image.open(io.BytesIO(base64.b64decode(b64_json)))
    picture.load()
    return picture


def figures(engine: OmniClient, stage: str) -> dict[str, Any]:
    return next(s for s in engine.metrics()["stages"] if s["name"] == stage)


# -- pictures


def test_the_official_client_draws(client: openai.OpenAI) -> None:
    made = client.images.generate(
        model="shapes", prompt=PROMPT, n=2, size="64x64",
        extra_body={"seed": 7, "lora": {"name": "night", "scale": 0.5}},
    )  # fmt: skip
    assert made.data is not None
    pictures = [np.asarray(opened(item.b64_json)) for item in made.data]
    assert [picture.shape for picture in pictures] == [(64, 64, 3)] * 2
    assert not np.array_equal(*pictures)
    told = made.model_dump()
    assert (made.size, made.output_format, made.background) == ("64x64", "png", "opaque")
    assert (told["seed"], [item["seed"] for item in told["data"]]) == (7, [7, 8])
    assert [(lora["name"], lora["scale"]) for lora in told["applied_loras"]] == [("night", 0.5)]
    assert (told["metrics"]["num_steps"], told["model"]) == (4, "shapes")
    assert made.usage is not None
    assert made.usage.total_tokens == 0


def test_the_same_seed_draws_the_same_pixels_as_over_zeromq(
    client: openai.OpenAI, engine: OmniClient
) -> None:
    made = client.images.generate(prompt=PROMPT, extra_body={"seed": 11})
    params = OmniDiffusionSamplingParams(seed=11)
    output = engine.submit(PROMPT, params, model="shapes").result().raise_for_error()
    assert made.data is not None
    assert output.images is not None
    assert np.array_equal(np.asarray(opened(made.data[0].b64_json)), output.images[0])


@pytest.mark.parametrize(
    ("fields", "kind", "mode"),
    [
        ({}, "PNG", "RGB"),
        ({"output_format": "jpeg", "output_compression": 80}, "JPEG", "RGB"),
        ({"output_format": "webp", "background": "opaque"}, "WEBP", "RGB"),
    ],
)
def test_files_are_of_the_kind_that_was_asked_for(
    client: openai.OpenAI, fields: Any, kind: str, mode: str
) -> None:
    made = client.images.generate(
        model="gated", prompt="x", size="16x24", extra_body={"seed": 5}, **fields
    )
    assert made.data is not None
    picture = opened(made.data[0].b64_json)
    assert (picture.format, picture.mode, picture.size) == (kind, mode, (16, 24))
    assert not picture.info.keys() & {"parameters", "prompt", "exif", "Software"}
    if kind == "PNG":
        assert np.array_equal(np.asarray(picture), pattern("x", 5, 24, 16))


@pytest.mark.parametrize(
    ("fields", "background", "mode"),
    [
        ({}, "transparent", "RGBA"),
        ({"background": "transparent", "output_format": "webp"}, "transparent", "RGBA"),
        ({"background": "opaque"}, "opaque", "RGB"),
        ({"output_format": "jpeg"}, "opaque", "RGB"),
    ],
)
def test_transparency_is_kept_or_becomes_white(
    client: openai.OpenAI, fields: Any, background: str, mode: str
) -> None:
    made = client.images.generate(model="clear", prompt="x", **fields)
    assert made.data is not None
    picture = opened(made.data[0].b64_json)
    assert (made.background, picture.mode) == (background, mode)
    left = np.asarray(picture)[:, :4]
    if mode == "RGBA":
        assert (left[..., 3] == 0).all()
    else:
        assert (left > 230).all()


def test_a_picture_by_url_is_served_without_a_key_until_others_need_its_room(
    client: openai.OpenAI, server: HttpServer
) -> None:
    def drawn(seed: int, size: str) -> str:
        made = client.images.generate(
            model="gated", prompt="x", response_format="url", size=size, extra_body={"seed": seed}
        )
        assert made.data is not None
        assert made.data[0].url is not None
        return made.data[0].url

    url = drawn(1, "16x16")
    assert url.startswith(f"{server.url}/v1/files/")
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["content-type"] == "image/png"
        assert re.fullmatch(r"private, max-age=\d+", answer.headers["cache-control"])
        shown = np.asarray(Image.open(io.BytesIO(answer.read())))
    assert np.array_equal(shown, pattern("x", 1, 16, 16))
    for _ in range(1200):  # each some 100 bytes
        if _status(url) == 404:
            return
        drawn(2, "256x256")
    pytest.fail("nothing makes room")


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_callers_id_is_the_requests(client: openai.OpenAI) -> None:
    raw = client.images.with_raw_response.generate(
        model="gated", prompt="x", extra_headers={"X-Request-Id": "order-1"}
    )
    assert raw.headers["x-request-id"] == "order-1"
    assert raw.headers["openai-processing-ms"].isdecimal()
    assert json.loads(raw.text)["request_id"] == "order-1"


def test_an_id_that_is_in_use_is_refused_and_its_owner_goes_on(
    client: openai.OpenAI, server: HttpServer, engine: OmniClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    same: dict[str, Any] = {"model": "gated", "extra_headers": {"X-Request-Id": "order-2"}}
    held = {"extra_args": {"holds": [[1, str(gate)]]}}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.images.generate, prompt="x", extra_body=held, **same)
        try:
            wait_for(lambda: figures(engine, "gated")["running"] == 1)
            for stream in (False, True):
                with pytest.raises(openai.ConflictError) as caught:
                    client.images.generate(prompt="y", stream=stream, **same)
                assert caught.value.code == "duplicate_request_id"
        finally:
            gate.touch()
        assert first.result(60).data


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert list(models) == ["shapes", "gated", "clear"]
    assert [model["makes_transparency"] for model in models.values()] == [False, False, True]
    assert models["shapes"]["makes"] == "image"
    assert models["shapes"]["defaults"]["height"] == 64
    assert client.models.retrieve("gated").id == "gated"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gate")
    assert "Did you mean 'gated'?" in caught.value.message


# -- what is wrong


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"sed": 1}, "sed", "Did you mean 'seed'?"),
        ({"steps": 1}, "steps", "Did you mean 'num_inference_steps'?"),
        ({"height": 64}, "height", "Did you mean 'size'?"),
        ({"style": "vivid"}, "style", "not served"),
        ({"quality": "hd"}, "quality", "'standard'"),
        ({"size": "64"}, "size", "64"),
        ({"size": "65x64"}, "size", "multiple of 16"),
        ({"size": "99999x64"}, "size", "at most 4096"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 65}, "n", "at most 64"),
        ({"seed": "1"}, "seed", "integer"),
        ({"seed": -1}, "seed", "greater"),
        ({"num_inference_steps": 5000}, "num_inference_steps", "at most 1000"),
        ({"guidance_scale": 3}, "guidance_scale", "true_cfg_scale"),
        ({"sampler": "eulr"}, "sampler", "euler"),
        ({"lora": {"nam": "night"}}, "lora.nam", "'name'"),
        ({"lora": {"name": "night", "scale": 1000}}, "lora.scale", "100"),
        ({"lora": [{"name": "night"}, {}]}, "lora.1.name", "missing"),
        ({"extra_args": {"oops": 1}}, "extra_args.oops", "oops"),
        ({"partial_images": 2}, "partial_images", "stream"),
        ({"output_compression": 50}, "output_compression", "jpeg or webp"),
        ({"background": "transparent"}, "background", "makes no transparency"),
        ({"background": "transparent", "output_format": "jpeg"}, "background", "jpeg"),
        ({"output_format": "gif"}, "output_format", "'png'"),
        ({"prompt": "  "}, "prompt", "empty"),
        ({"stream": True, "response_format": "url"}, "response_format", "b64_json"),
        ({"timeout_s": -1}, "timeout_s", "0.001"),
    ],
)
def test_a_wrong_field_is_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, part: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, extra_body=fields)
    assert caught.value.param == param
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_args": {"x": [1] * 70_000}}, None),
        ({"extra_args": {"x": [[]] * 40_000}}, None),
        ({"prompt": "x" * (5 << 20)}, None),
        ({"extra_args": {"x": "y" * (3 << 20)}}, "message"),
    ],
)
def test_more_than_a_request_may_hold_is_refused_at_once(
    client: openai.OpenAI, fields: Any, param: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(prompt=PROMPT, extra_body=fields)
    assert (caught.value.status_code, caught.value.code) == (413, "message_too_large")
    assert caught.value.param == param


def test_what_holds_much_is_served_without_holding_up_the_event_loop(
    client: openai.OpenAI, server: HttpServer
) -> None:
    much = {"holds": [[1000, "never reached"]] * 1000}
    made = client.images.generate(model="gated", prompt="x", extra_body={"extra_args": much})
    assert made.data is not None
    threads: set[int] = set()

    class Watched(dict[str, Any]):
        def items(self) -> Any:
            threads.add(threading.get_ident())
            return super().items()

    fields = ImageGenerationRequest.model_construct(prompt="x", extra_args=Watched(much))
    assert not fields.is_light

    async def prepare_and_submit() -> None:
        with contextlib.closing(EncoderPool(1)) as encoders:
            gateway: Any = SimpleNamespace(encoders=encoders)
            params = await checked_params(gateway, fields)
        prompt: Any = Watched(prompt="x")
        async with AsyncOmniClient(server.endpoint) as engine:
            handle = await engine.submit(prompt, params, model="gated", in_thread=True)
            (await handle.result()).raise_for_error()

    asyncio.run(prepare_and_submit())
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("value", "light"),
    [
        ({"a": [1] * 900}, True),
        ({"a": [1] * 1001}, False),
        ({str(key): key for key in range(1001)}, False),
        ([[]] * 1001, False),
        ([[[1] * 400] * 2] * 2, False),
        (["x" * 70_000], False),
        ([None, 7, "x"], True),
    ],
)
def test_what_is_light(value: Any, light: bool) -> None:
    assert is_light(value) is light


def test_an_unknown_adapter_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt=PROMPT, extra_body={"lora": {"name": "nigt"}})
    assert (caught.value.param, caught.value.code) == ("lora.name", "unknown_adapter")
    assert "'night'" in caught.value.message


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="shape", prompt=PROMPT)
    assert (caught.value.param, caught.value.code) == ("model", "unknown_model")
    assert "Did you mean 'shapes'?" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"prompt": NaN}',
        b"[" * 9999,
        b'{"\\ud800": 1}',
        b'{"prompt": "x", "model": 7}',
        b'{"prompt": "x", "extra_args": {"\\ud800": 1}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "lora": [7]}',
    ],
)
def test_what_is_no_request_is_refused(server: HttpServer, body: bytes) -> None:
    request = urllib.request.Request(
        f"{server.url}/v1/images/generations", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request):
        pass
    with caught.value as answer:
        assert answer.code == 400
        assert json.load(answer)["error"]["type"] == "invalid_request_error"


def test_an_error_of_the_model_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(
            model="gated", prompt="x", extra_body={"extra_args": {"raise_text": "it broke"}}
        )
    assert caught.value.code == "model_error"
    assert "it broke" in caught.value.message


def test_time_that_is_up_is_told(client: openai.OpenAI, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = {"extra_args": {"holds": [[1, str(gate)]]}, "timeout_s": 0.3}
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.images.generate(model="gated", prompt="x", extra_body=held)
    finally:
        gate.touch()
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")


def test_a_full_queue_is_a_rate_limit(
    client: openai.OpenAI, engine: OmniClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = OmniDiffusionSamplingParams(extra_args={"holds": [[1, str(gate)]]})
    try:
        handles = [engine.submit("x", held, model="gated") for _ in range(QUEUE + 8)]
        wait_for(lambda: figures(engine, "gated")["waiting"] >= QUEUE)
        with pytest.raises(openai.RateLimitError) as caught:
            client.images.generate(model="gated", prompt="x")
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        gate.touch()
        for handle in handles:
            handle.abort()
    for handle in handles:
        handle.result(60)


# -- streams


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    stream = client.images.generate(
        model="shapes", prompt=PROMPT, stream=True, partial_images=3, size="64x32",
        extra_body={"seed": 3, "num_inference_steps": 8},
    )  # fmt: skip
    events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[-1] == "image_generation.completed"
    assert set(kinds[:-1]) == {"image_generation.partial_image"}
    assert 1 <= len(kinds[:-1]) <= 3  # a slow reader misses some
    for index, event in enumerate(events[:-1]):
        assert event.type == "image_generation.partial_image"
        assert event.partial_image_index >= index
    assert {opened(event.b64_json).size for event in events} == {(64, 32)}
    whole = client.images.generate(
        model="shapes",
        prompt=PROMPT,
        size="64x32",
        extra_body={"seed": 3, "num_inference_steps": 8},
    )
    assert whole.data is not None
    assert whole.data[0].b64_json == events[-1].b64_json
    assert events[-1].model_dump()["seed"] == 3


def events_of(server: HttpServer, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    body = json.dumps({"prompt": "x", "stream": True, **fields}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/images/generations", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    found = re.findall(r"event: (\S+)\ndata: (.*)\n\n", text)
    return [(name, json.loads(data)) for name, data in found]


def test_a_stream_tells_progress_and_every_picture(server: HttpServer) -> None:
    found = events_of(server, model="gated", n=3, seed=5, stream_options={"include_progress": True})
    progress = [data for name, data in found if name == "image_generation.progress"]
    assert progress
    assert all(data["type"] == "image_generation.progress" for data in progress)
    assert {data["status"] for data in progress} <= {"waiting", "running"}
    completed = [data for name, data in found if name == "image_generation.completed"]
    assert [(data["index"], data["seed"]) for data in completed] == [(0, 5), (1, 6), (2, 7)]
    for data in completed:
        shown = np.asarray(opened(data["b64_json"]))
        assert np.array_equal(shown, pattern("x", data["seed"], 16, 16))


def test_partial_pictures_are_spread_over_the_steps(server: HttpServer, tmp_path: Path) -> None:
    """Each is taken before the next step begins, so that none can be missed."""
    gates = [tmp_path / str(step) for step in range(4)]
    holds = {"holds": [[step, str(gate)] for step, gate in enumerate(gates)]}
    body = json.dumps(
        {
            "prompt": "x", "model": "gated", "stream": True, "partial_images": 3,
            "extra_args": holds, "stream_options": {"include_progress": True},
        }
    )  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/images/generations", body.encode(), {"Content-Type": "application/json"}
    )
    partials: list[tuple[int, int]] = []
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            gates[0].touch()
            name = ""
            for line in answer:
                if line.startswith(b"event: "):
                    name = line.decode().split()[1]
                elif line.startswith(b"data: ") and name.endswith("partial_image"):
                    data = json.loads(line[6:])
                    colour = np.asarray(opened(data["b64_json"]))[0, 0, 0]
                    partials.append((data["partial_image_index"], int(colour)))
                    gates[data["step"]].touch()
    finally:
        for gate in gates:
            gate.touch()
    assert partials == [(0, 1), (1, 2), (2, 3)]


def test_a_stream_of_a_model_without_previews_has_the_picture_alone(server: HttpServer) -> None:
    found = events_of(server, model="clear", partial_images=3)
    assert [name for name, _ in found] == ["image_generation.completed"]


def test_what_is_refused_before_a_stream_begins_is_a_plain_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, stream=True, size="65x64")
    assert caught.value.param == "size"


def test_an_error_within_a_stream_is_an_event(client: openai.OpenAI, server: HttpServer) -> None:
    broken = {"extra_args": {"raise_text": "it broke"}}
    ((name, data),) = events_of(server, model="gated", **broken)
    assert (name, data["error"]["code"]) == ("error", "model_error")
    stream = client.images.generate(model="gated", prompt="x", stream=True, extra_body=broken)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


# -- clients that go away


async def sent(server: HttpServer, **fields: Any) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"prompt": "x", "model": "gated", **fields})
    writer.write(
        "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    server: HttpServer, engine: OmniClient, tmp_path: Path, stream: bool
) -> None:
    gate = tmp_path / "gate"
    before = figures(engine, "gated")["requests"]

    async def leave_midway() -> None:
        _, writer = await sent(server, stream=stream, extra_args={"holds": [[1, str(gate)]]})
        await asyncio.to_thread(wait_for, lambda: figures(engine, "gated")["running"] == 1)
        writer.close()

    try:
        asyncio.run(leave_midway())
        asked = wait_for(lambda: _aborting(engine))
        assert asked
    finally:
        gate.touch()
    wait_for(lambda: figures(engine, "gated")["requests"]["aborted"] == before["aborted"] + 1)
    assert figures(engine, "gated")["requests"]["completed"] == before["completed"]


def _aborting(engine: OmniClient) -> bool:
    """Whether the engine has nothing that it would still finish."""
    now = figures(engine, "gated")
    done = now["requests"]
    return (
        now["running"] == 0
        or done["received"] == done["completed"] + done["failed"] + done["aborted"]
    )


def test_many_clients_half_of_whom_go_away(
    server: HttpServer, engine: OmniClient, tmp_path: Path
) -> None:
    """At any moment: some at once, some while they wait or run, some while others are served."""
    gate, gone = tmp_path / "gate", 0
    chance = random.Random(20)
    before = figures(engine, "gated")["requests"]
    leaving = [chance.random() < 0.5 for _ in range(200)]

    def many_are_taken_in() -> bool:
        now = figures(engine, "gated")["requests"]
        return now["received"] - before["received"] > leaving.count(False)

    async def one(number: int) -> bytes:
        nonlocal gone
        held = {"extra_args": {"holds": [[1, str(gate)]]}, "stream": number % 3 == 0}
        reader, writer = await sent(server, seed=number, **held)
        try:
            if leaving[number]:
                if number % 2:
                    await asyncio.to_thread(wait_for, many_are_taken_in, 60)
                await asyncio.sleep(chance.random() / 2)
                gone += 1
                if gone == leaving.count(True) * 3 // 4:
                    gate.touch()
                return b""
            return await reader.read()
        finally:
            writer.close()

    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*map(one, range(200)))

    answers = asyncio.run(all_of_them())
    for number, answer in enumerate(answers):
        if not leaving[number]:
            assert answer.startswith(b"HTTP/1.1 200 OK"), answer[:500]
            (encoded,) = re.findall(rb'"b64_json": "([^"]+)"', answer)
            shown = np.asarray(opened(encoded.decode()))
            assert np.array_equal(shown, pattern("x", number, 16, 16))

    def drained() -> dict[str, int] | None:
        now = figures(engine, "gated")
        return None if now["waiting"] or now["running"] else now["requests"]

    done = {name: count - before[name] for name, count in wait_for(drained, 60).items()}
    assert done["received"] == done["completed"] + done["failed"] + done["aborted"]
    assert done["failed"] == 0
    assert done["completed"] >= leaving.count(False)
    assert 0 < done["aborted"] <= leaving.count(True), (done, leaving.count(True))


# -- the parts by themselves


def test_previews_suffice_and_come_as_seldom_as_that_allows() -> None:
    for steps, wanted in itertools.product(range(1, 60), (1, 2, 3)):
        _check_previews(steps, wanted)


def _check_previews(steps: int, wanted: int) -> None:
    every = preview_interval(steps, wanted)
    box = Mailbox(wanted, progress=False)
    taken: list[int] = []
    for step in range(1, steps + 1):
        preview = np.zeros((1, 1, 3), np.uint8) if step % every == 0 else None
        box.put(RequestEvent("r", "running", step, steps, preview))
        if (partial := _taken(box)) is not None:
            taken.append(partial.step)
    assert len(taken) == min(wanted, steps - 1)
    assert all(step < steps for step in taken)


def _taken(box: Mailbox) -> Partial | None:
    async def take() -> Any:
        return await asyncio.wait_for(box.take(), 0.0001)

    if box._partial is None:
        return None
    found = asyncio.run(take())
    assert isinstance(found, Partial)
    return found


def test_a_mailbox_keeps_only_the_latest() -> None:
    async def run() -> list[Any]:
        box = Mailbox(3, progress=True)
        for step in range(1, 100):
            box.put(RequestEvent("r", "running", step, 100, np.full((1, 1, 3), step, np.uint8)))
        box.close()
        found = []
        while (item := await box.take()) is not None:
            found.append(item)
        return found

    partial, progress = asyncio.run(run())
    assert (partial.index, partial.step, progress.step) == (2, 75, 99)


def test_layers_are_pictures_and_clips_are_not() -> None:
    model = ServedModel("m", None, {}, step_execution=False)
    fields = ImageGenerationRequest(prompt="x")
    job = ImageJob(fields, model, sampling_params(fields))
    layers = np.zeros((3, 8, 8, 4), np.uint8)
    layered = DiffusionOutput("r", frames=[layers, layers], seed=5)
    assert len(pictures_of(layered, job)) == 6
    with pytest.raises(GatewayError, match="/v1/videos"):
        pictures_of(DiffusionOutput("r", frames=[layers[..., :3]]), job)
    with pytest.raises(GatewayError, match="makes no pictures"):
        pictures_of(DiffusionOutput("r", audio=[np.zeros((1, 9), np.float32)]), job)


def test_a_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_KEEP_ALIVE_S", 0.01)
    sent: list[bytes] = []
    ended: list[bool] = []

    async def run() -> None:
        quiet = asyncio.Event()

        async def messages() -> AsyncGenerator[bytes]:
            box = Mailbox(0, progress=False)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.take(), 0.01)
            yield await streaming.next_or_keep_alive(box)  # type: ignore[misc]
            await quiet.wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> Any:
            while len(sent) < 2:
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        stream = streaming.EventStream(messages(), {}, lambda: ended.append(True))
        await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert sent == [b"", b": keep-alive\n\n"]
    assert ended == [True]


def test_kept_files_are_bounded_in_bytes_and_time() -> None:
    now = 0.0
    files = KeptFiles(100, 10.0, lambda: now)
    first, second = files.keep(b"x" * 60, "image/png"), files.keep(b"y" * 60, "image/webp")
    assert files.find(first) is None
    found = files.find(second)
    assert found is not None
    assert (found.data, found.media_type, files.kept_bytes) == (b"y" * 60, "image/webp", 60)
    now = 10.5
    assert files.find(second) is None
    assert files.kept_bytes == 0
    assert len({files.keep(b"", "image/png") for _ in range(50)}) == 50
