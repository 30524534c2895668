"""Every limit: beyond it a request is refused with a code and a field, and the next one is fine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from adapters import random_adapter
from diffusers import QwenImagePipeline
from PIL import Image
from raw_client import Array, Message, RawClient
from support_pipelines import pattern

from omni_engine import Omni
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission
from omni_engine.engine.request_limits import MAX_INPUT_PICTURES
from omni_engine.protocol import codec
from omni_engine.protocol.errors import (
    ConfigError,
    LimitExceededError,
    MalformedMessageError,
    MessageTooLargeError,
)
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.config import EngineArgs, Limits
from omni_engine.stages.settings import load_settings

LIMITS = {
    "max_message_bytes": 200_000,
    "max_prompt_chars": 50,
    "max_side": 64,
    "max_pixels": 48 * 48,
    "max_frames": 4,
    "max_steps": 8,
    "max_outputs_per_prompt": 3,
    "max_request_pixels": 5000,
    "max_input_pixels": 32 * 32,
}
LIMIT, FULL = "limit_exceeded", "queue_full"


@pytest.fixture(scope="module")
def limited(start_engine: Callable[..., Omni]) -> Omni:
    """An engine with small limits and a pipeline that takes pictures."""
    return start_engine(
        "bundled",
        pipeline="fuzzed_pipelines:PicturesIn",
        lora_modules=[],
        default_sampling_params={},
        **LIMITS,
    )


@pytest.fixture
def raw(limited: Omni) -> Iterator[RawClient]:
    with RawClient(limited.endpoint) as client:
        yield client


def wire(prompt: str = "a", inputs: object = None, **params: object) -> dict[str, object]:
    return {"prompt": prompt, "sampling_params": params, "multi_modal_data": inputs}


def picture(height: int, width: int) -> Array:
    return Array("uint8", (height, width, 3), bytes(height * width * 3))


def assert_serves(raw: RawClient) -> None:
    raw.submit({"request_id": "next", "prompt": "next", "sampling_params": {"seed": 1}})
    output = raw.output("next")
    assert output["error"] is None
    assert bytes(output["images"][0].data) == pattern("next", 1, 16, 16).tobytes()


REFUSED = [
    (wire("x" * 51), "prompt", "51 characters", "at most 50 characters"),
    (wire(negative_prompt="x" * 51), "negative_prompt", "51 characters", "at most 50 characters"),
    (wire(height=72), "height", "72", "at most 64"),
    (wire(width=72), "width", "72", "at most 64"),
    (wire(height=64, width=40), "height x width", "2560", "at most 2304"),
    (wire(num_frames=5), "num_frames", "5", "at most 4"),
    (wire(num_inference_steps=9), "num_inference_steps", "9", "at most 8"),
    (wire(num_outputs_per_prompt=4), "num_outputs_per_prompt", "4", "at most 3"),
    (
        wire(num_outputs_per_prompt=3, num_frames=4, height=32),
        "num_outputs_per_prompt x height x width x num_frames",
        "6144",
        "at most 5000",
    ),
    (
        wire(inputs={"image": picture(33, 32)}),
        "multi_modal_data.image",
        "33 x 32 pixels",
        "at most 1024 pixels (max_input_pixels)",
    ),
    (
        wire(inputs={"image": [picture(8, 8), picture(8, 129)]}),
        "multi_modal_data.image[1]",
        "8 x 129 pixels",
        "at most 1024 pixels (max_input_pixels)",
    ),
    (
        wire(inputs={"image": [picture(8, 8)] * 32, "mask_image": picture(8, 8)}),
        "multi_modal_data",
        "33 pictures",
        f"at most {MAX_INPUT_PICTURES} pictures",
    ),
]


@pytest.mark.parametrize(("asked", "field", "value", "most"), REFUSED, ids=lambda x: str(x)[:40])
def test_a_request_beyond_a_limit_is_refused(
    raw: RawClient, asked: Message, field: str, value: str, most: str
) -> None:
    error = raw.refusal(asked)
    assert (error["code"], error["field"], error["value"]) == (LIMIT, field, value)
    assert error["expected"] == most
    assert_serves(raw)


def test_what_is_just_within_every_limit_is_served(raw: RawClient) -> None:
    inputs = {"image": [picture(32, 32)] * 31, "mask_image": picture(32, 32)}
    largest = wire(
        "x" * 50,
        inputs,
        negative_prompt="y" * 50,
        true_cfg_scale=2.0,
        height=64,
        width=24,
        num_frames=1,
        num_inference_steps=8,
        num_outputs_per_prompt=3,
    )
    answer = raw.reply(raw.submit({**largest, "request_id": "largest"}))
    assert answer["type"] == "accepted", answer["error"]
    output = raw.output("largest")
    assert output["error"] is None
    assert len(output["images"]) == 3


def test_a_message_that_is_too_large_is_refused(raw: RawClient) -> None:
    message_id = raw.submit(wire(inputs={"image": picture(300, 300)}))
    answer = raw.reply(message_id)
    assert (answer["error"]["code"], answer["error"]["field"]) == ("message_too_large", "message")
    assert answer["error"]["expected"] == "at most 200000 bytes in all frames"
    assert_serves(raw)


@pytest.mark.parametrize("item", [{}, [], "a", -7], ids=["maps", "lists", "text", "numbers"])
def test_a_header_of_very_many_values_is_refused(raw: RawClient, item: object) -> None:
    """Otherwise 16 MB of empty lists would hold up everybody for 6 seconds, and take 1.2 GB."""
    many = [[item] * 1000] * 66
    packed = msgpack.packb({"v": 1, "type": "status", "id": 71, "extra": many})
    assert len(packed) < codec.MAX_HEADER_BYTES
    raw.send_frames([packed])
    answer = raw.find(lambda message: message["type"] == "error")
    assert answer["error"]["code"] == "message_too_large"
    assert answer["error"]["field"] == "header"
    assert_serves(raw)


def held(what: str, count: int) -> dict[str, Any]:
    """A header with so many maps, lists or values."""
    if what == "values":
        lists = [[None] * 1000] * 50
        return {"a": lists, "b": [None] * (count - 50_000 - len(lists) - 2)}
    return {"a": [{} if what == "maps" else []] * (count - 2)}


@pytest.mark.parametrize(
    ("what", "most"),
    [
        ("maps", codec.MAX_CONTAINERS),
        ("lists", codec.MAX_CONTAINERS),
        ("values", codec.MAX_ITEMS),
    ],
)
def test_what_a_header_holds_is_counted_wherever_it_is(what: str, most: int) -> None:
    just, beyond = held(what, most), held(what, most + 1)
    assert codec.decode([msgpack.packb(just)]) == just
    with pytest.raises(MessageTooLargeError, match="the header holds too much"):
        codec.decode([msgpack.packb(beyond)])
    assert codec.decode([msgpack.packb(beyond)], trusted=True) == beyond
    reference = msgpack.ExtType(codec.EXT_BUFFER, msgpack.packb(beyond))
    with pytest.raises(MessageTooLargeError, match="the header holds too much"):
        codec.decode([msgpack.packb({"a": reference})])


def test_a_list_that_is_longer_than_a_header_may_hold_is_not_even_read() -> None:
    packed = msgpack.packb({"a": [None] * (codec.MAX_ITEMS + 1)})
    with pytest.raises(MalformedMessageError, match="exceeds max_array_len"):
        codec.decode([packed])


# -- queues and connections


GATED = {
    "pipeline": "gated_pipelines:GatedSteps",
    "lora_modules": [],
    "default_sampling_params": {},
    "step_execution": True,
    "max_num_seqs": 1,
}


def waiting_request(request_id: str, gate: Path) -> Message:
    params = {"seed": 1, "extra_args": {"holds": [[0, str(gate)]]}}
    return {"request_id": request_id, "prompt": "a", "sampling_params": params}


def fill(raw: RawClient, gate: Path, count: int, prefix: str) -> list[str]:
    """Submit requests of which none ends while there is no gate; their ids."""
    ids = [f"{prefix}{index}" for index in range(count)]
    raw.submit(*(waiting_request(request_id, gate) for request_id in ids))
    return ids


@pytest.mark.parametrize("limit", ["max_waiting_requests", "max_waiting_per_client"])
def test_more_waiting_requests_than_may_be_are_refused(
    start_own_engine: Callable[..., Omni], tmp_path: Path, limit: str
) -> None:
    omni = start_own_engine("bundled", **GATED, **{limit: 3})
    gate = tmp_path / "gate"
    with RawClient(omni.endpoint) as raw, RawClient(omni.endpoint) as other:
        ids = fill(raw, gate, 1, "first")
        raw.find(lambda message: message.get("status") == "running")
        ids += fill(raw, gate, 3, "more")
        error = raw.refusal(waiting_request("last", gate))
        assert error["code"] == FULL
        assert error["field"] == limit
        assert error["retry_after_ms"] > 0
        if limit == "max_waiting_requests":
            assert other.refusal(waiting_request("others", gate))["code"] == FULL
        else:
            assert other.reply(other.submit(waiting_request("others", gate)))["request_ids"] == [
                "others"
            ]
        gate.touch()
        assert [raw.output(request_id)["error"] for request_id in ids] == [None] * 4
        raw.submit(waiting_request("last", gate))
        assert raw.output("last")["error"] is None


def test_more_clients_than_may_be_are_refused(start_own_engine: Callable[..., Omni]) -> None:
    options = {"pipeline": "support_pipelines:PatternPipeline", "default_sampling_params": {}}
    omni = start_own_engine("bundled", lora_modules=[], max_clients=3, **options)
    with RawClient(omni.endpoint) as one, RawClient(omni.endpoint) as last:
        with RawClient(omni.endpoint) as beyond:
            assert one.call("hello")["type"] == "welcome"  # with that of Omni: two
            assert last.call("hello")["type"] == "welcome"
            refused = beyond.call("hello")
            assert refused["error"]["code"] == FULL
            assert refused["error"]["field"] == "max_clients"
            assert refused["error"]["retry_after_ms"] > 0
        assert_serves(one)
        one.send("bye")
        one.send("ping")  # it is a client again, the third one
        assert one.call("status")["status"]["clients"] == 3


# -- adapters


def load(raw: RawClient, name: str, path: Path, **options: object) -> int:
    return raw.send("load_lora", name=name, path=str(path), **options)


@pytest.fixture(scope="module")
def adapter_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = QwenImagePipeline.from_pretrained(MODEL_DIR)
    return random_adapter(pipe, tmp_path_factory.mktemp("loras") / "a.safetensors", seed=1)


@pytest.fixture(scope="module")
def with_adapters(start_engine: Callable[..., Omni], adapter_file: Path) -> Omni:
    """The bundled model with room for three adapters, of which one client may load two at once."""
    return start_engine(
        "bundled",
        threads=1,
        default_sampling_params={"height": 32, "width": 32, "num_inference_steps": 1},
        lora_modules=[{"name": "night", "path": "bundled:night"}],
        lora_dirs=[adapter_file.parent],
        max_adapters=4,
        max_pending_loads=2,
    )


def test_more_adapters_than_may_be_are_refused(with_adapters: Omni, adapter_file: Path) -> None:
    with RawClient(with_adapters.endpoint) as raw:
        for name in "abc":
            assert raw.reply(load(raw, name, adapter_file))["type"] == "lora"
        error = raw.reply(load(raw, "d", adapter_file))["error"]
        assert (error["code"], error["field"], error["value"]) == (LIMIT, "name", "d")
        assert error["expected"] == "at most 4 adapters (max_adapters)"
        assert raw.reply(load(raw, "a", adapter_file, replace=True))["type"] == "lora"
        assert raw.call("unload_lora", name="b")["type"] == "lora"
        assert raw.reply(load(raw, "d", adapter_file))["type"] == "lora"
        for name in "acd":
            raw.call("unload_lora", name=name)


def test_more_loads_at_once_than_may_be_are_refused(
    with_adapters: Omni, adapter_file: Path
) -> None:
    with RawClient(with_adapters.endpoint) as raw, RawClient(with_adapters.endpoint) as other:
        (worker,) = raw.call("status")["status"]["stages"][0]["workers"]
        os.kill(worker["pid"], signal.SIGSTOP)  # no load is answered meanwhile
        try:
            loads = [load(raw, name, adapter_file) for name in "ab"]
            error = raw.reply(load(raw, "c", adapter_file))["error"]
            of_other = load(other, "c", adapter_file)
            other.call("status")
        finally:
            os.kill(worker["pid"], signal.SIGCONT)
        assert (error["code"], error["field"], error["value"]) == (FULL, "name", "c")
        assert error["retry_after_ms"] > 0
        assert [raw.reply(message_id)["type"] for message_id in loads] == ["lora", "lora"]
        assert other.reply(of_other)["type"] == "lora", "another client's loads count for itself"
        assert raw.reply(load(raw, "a", adapter_file, replace=True))["type"] == "lora"
        for name in "abc":
            raw.call("unload_lora", name=name)


# -- default parameters


CAPABILITIES = PipelineCapabilities(
    pipeline="Some",
    sampling_fields=frozenset({"height", "width", "num_frames", "negative_prompt"}),
    defaults={"height": 64, "width": 64, "num_frames": 2},
    size_multiple=16,
)


def admission(limits: Limits, **arguments: Any) -> Admission:
    args = EngineArgs(model="some/model", **arguments)
    return Admission(args, limits, AdapterRegistry(args), CAPABILITIES)


TOO_LARGE: list[tuple[dict[str, int], dict[str, Any], dict[str, int], str]] = [
    ({"max_pixels": 5000}, {"height": 96}, {}, "height x width"),
    (
        {"max_request_pixels": 20_000},
        {"num_outputs_per_prompt": 3},
        {},
        "num_outputs_per_prompt x height x width x num_frames",
    ),
    ({}, {"num_outputs_per_prompt": 3}, {"max_batch_rows": 2}, "num_outputs_per_prompt"),
    (
        {},
        {"num_frames": 3},
        {"max_batch_work": 10_000},
        "num_outputs_per_prompt x height x width x num_frames",
    ),
    ({"max_prompt_chars": 2}, {"negative_prompt": "abc"}, {}, "negative_prompt"),
    ({}, {"height": 72}, {}, "height"),
]


@pytest.mark.parametrize(("limits", "defaults", "arguments", "field"), TOO_LARGE)
def test_default_parameters_that_no_request_could_have_end_the_load(
    limits: dict[str, int], defaults: dict[str, Any], arguments: dict[str, int], field: str
) -> None:
    """Together with the pipeline's own, which only a worker knows."""
    with pytest.raises(ConfigError, match="don't suit Some") as caught:
        admission(Limits(**limits), default_sampling_params=defaults, **arguments)
    assert caught.value.field == f"default_sampling_params.{field}"


def test_a_pipelines_own_defaults_beyond_a_limit_only_concern_requests_that_take_them() -> None:
    small = admission(Limits(max_side=32))
    with pytest.raises(LimitExceededError):
        small.check(build_request("a"))
    given = build_request("a", OmniDiffusionSamplingParams(height=32, width=32))
    assert small.check(given).sampling_params.height == 32


CONFIG_MISTAKES: list[tuple[dict[str, int], dict[str, Any], str, str]] = [
    (
        {"max_prompt_chars": 2},
        {"default_sampling_params": {"negative_prompt": "abc"}},
        "default_sampling_params.negative_prompt",
        "3 characters are more than limits.max_prompt_chars allows (2)",
    ),
    (
        {},
        {
            "default_sampling_params": {
                "height": 2048, "width": 2048, "num_frames": 1024, "num_outputs_per_prompt": 64,
            }
        },
        "default_sampling_params",
        "274877906944 pixels in all are more than limits.max_request_pixels allows (2147483648)",
    ),
    (
        {},
        {"max_batch_work": 100, "default_sampling_params": {"height": 16, "width": 16}},
        "default_sampling_params",
        "256 pixels in all are more than max_batch_work allows (100)",
    ),
    (
        {},
        {"max_batch_rows": 2, "default_sampling_params": {"num_outputs_per_prompt": 3}},
        "default_sampling_params.num_outputs_per_prompt",
        "3 is more than max_batch_rows allows (2)",
    ),
    (
        {"max_adapters": 1},
        {"lora_modules": [{"name": n, "path": f"bundled:{n}"} for n in ("night", "outline")]},
        "lora_modules",
        "2 adapters are more than limits.max_adapters allows (1)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("limits", "engine_args", "field", "message"), CONFIG_MISTAKES)
def test_a_deploy_file_beyond_its_own_limits_is_refused(
    tmp_path: Path, limits: object, engine_args: dict[str, Any], field: str, message: str
) -> None:
    stage = {"stage_id": 0, "engine_args": {"model": "bundled", **engine_args}}
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"limits": limits, "stage_args": [stage]}))
    with pytest.raises(ConfigError) as caught:
        load_settings(config_path=file)
    assert message in str(caught.value)
    assert f"engine_args.{field}" in str(caught.value)


def test_every_limit_has_a_test_here_or_with_the_hostile_clients() -> None:
    here = Path(__file__)
    text = here.read_text() + here.with_name("test_hostile_clients.py").read_text()
    assert [name for name in Limits.model_fields if name not in text] == []


def test_pils_guard_against_decompression_bombs_stays_on() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    for folder in ("protocol", "engine", "worker", "stages", "cli"):
        for file in (Path(__file__).parent.parent / folder).rglob("*.py"):
            assert "MAX_IMAGE_PIXELS" not in file.read_text(), file
