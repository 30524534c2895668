"""The codec: what goes in comes out, nothing is copied, nothing malformed gets through."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import struct
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings

from omni_engine.protocol import codec
from omni_engine.protocol.adapters import Adapter, AdapterActivation
from omni_engine.protocol.codec import decode, encode
from omni_engine.protocol.errors import (
    ERRORS_BY_CODE,
    MalformedMessageError,
    MessageTooLargeError,
    ModelError,
    OmniError,
    PipelineContractError,
    UnknownFieldError,
    error_from_wire,
    shorten,
)
from omni_engine.protocol.outputs import AppliedLoRA, DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import (
    BatchPlan,
    PipelineCapabilities,
    WorkerSpec,
    outputs_message,
)
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams
from omni_engine.protocol.tensors import ITEM_SIZES, TensorData
from omni_engine.worker.tensors import tensor_to_wire

ROOT = Path(__file__).parent.parent
NUMPY_DTYPES = sorted(set(ITEM_SIZES) - {"bfloat16"})
TORCH_DTYPES = [getattr(torch, name) for name in sorted(ITEM_SIZES)]

few = settings(deadline=None, derandomize=True, max_examples=100, database=None)
many = settings(few, max_examples=400)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(lambda name: hnp.arrays(np.dtype(name), shapes))
bfloat16s = shapes.flatmap(
    lambda shape: st.binary(min_size=2 * math.prod(shape), max_size=2 * math.prod(shape)).map(
        lambda data: TensorData("bfloat16", shape, data)
    )
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
)
values = st.recursive(
    scalars | arrays | bfloat16s,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(st.text(), values, max_size=5)


def frames_of(message: dict[str, Any]) -> list[bytes]:
    """A message as it arrives: bytes of their own."""
    return [bytes(frame) for frame in encode(message)]


def same(left: Any, right: Any) -> bool:
    """Equality of values, types and, for arrays and floats, bits."""
    match left:
        case np.ndarray():
            return (
                isinstance(right, np.ndarray)
                and (left.dtype, left.shape) == (right.dtype, right.shape)
                and left.tobytes() == right.tobytes()
            )
        case TensorData():
            return (
                isinstance(right, TensorData)
                and (left.dtype, left.shape) == (right.dtype, right.shape)
                and bytes(left.data) == bytes(right.data)
            )
        case dict():
            return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
        case list():
            return len(left) == len(right) and all(map(same, left, right))
        case float():
            return type(right) is float and struct.pack("d", left) == struct.pack("d", right)
    return type(left) is type(right) and bool(left == right)


# -- round trips


@given(messages)
@few
def test_nested_values_and_arrays_round_trip(message: dict[str, Any]) -> None:
    assert same(message, decode(frames_of(message)))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    assert same({"a": array}, decode(frames_of({"a": array})))


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_a_tensor_survives_the_wire_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(shape, generator=generator) * 100).abs().to(dtype)
    received = decode(frames_of({"t": tensor_to_wire(tensor)}))["t"]
    if isinstance(received, TensorData):
        bits = torch.from_numpy(np.frombuffer(received.data, np.uint16).copy())
        back = bits.view(torch.bfloat16).reshape(received.shape)
        widened = torch.from_numpy(received.to_numpy())
        assert torch.equal(widened, tensor.to(torch.float32))
    else:
        back = torch.from_numpy(received.copy())
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_strided_tensor_is_sent_in_c_order() -> None:
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T
    received = decode(frames_of({"t": tensor_to_wire(tensor)}))["t"]
    np.testing.assert_array_equal(received.to_numpy(), tensor.to(torch.float32).numpy())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(10)[::-1],
        np.arange(10)[::3],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.broadcast_to(np.float32(7), (2, 3)),
    ],
    ids=["transposed", "reversed", "strided", "fortran", "broadcast"],
)
def test_arrays_that_are_not_contiguous_round_trip(array: np.ndarray) -> None:
    received = decode(frames_of({"a": array}))["a"]
    np.testing.assert_array_equal(received, array)
    assert received.dtype == array.dtype


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, ">f4"),
        np.zeros(2, complex),
        np.array([object()]),
        np.array(["text"]),
        np.zeros((1,) * 33),
        object(),
        {1, 2},
        2**64,
        -(2**63) - 1,
        "\ud800",
        torch.zeros(1),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__ + str(getattr(value, "dtype", "")),
)
def test_what_has_no_place_on_the_wire_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(TypeError):
        encode({"value": value})


# -- no copies


@pytest.mark.parametrize("make", [np.ascontiguousarray, lambda a: a[1:]], ids=["whole", "slice"])
def test_encoding_does_not_copy_arrays(make: Any) -> None:
    array = make(np.arange(2**16, dtype=np.float32).reshape(256, 256))
    _, frame = encode({"a": array})
    assert np.shares_memory(frame, array)


def test_encoding_does_not_copy_bfloat16() -> None:
    tensor = torch.zeros(64, 64, dtype=torch.bfloat16)
    _, frame = encode({"t": tensor_to_wire(tensor)})
    assert frame.__array_interface__["data"][0] == tensor.data_ptr()


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
def test_decoded_arrays_share_the_frames_memory_and_are_read_only(dtype: str) -> None:
    buffer = bytearray(ITEM_SIZES[dtype] * 6)
    header, _ = encode({"a": TensorData(dtype, (2, 3), buffer)})
    array = decode([header, buffer])["a"]
    if isinstance(array, TensorData):
        array = np.frombuffer(array.data, np.uint16)
    assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0


def test_pictures_cross_a_socket_without_a_copy() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://codec")
        b.connect("inproc://codec")
        a.send_multipart(encode({"picture": picture}), copy=False)
        assert b.poll(10_000)
        frames = b.recv_multipart(copy=False)
        received = decode(frames)["picture"]
        np.testing.assert_array_equal(received, picture)
        assert np.shares_memory(received, np.frombuffer(frames[1].buffer, np.uint8))
        assert np.shares_memory(received, picture)  # inproc: all the way
        del frames, received


# -- malformed input


def reference(*content: object) -> msgpack.ExtType:
    return msgpack.ExtType(codec.EXT_BUFFER, msgpack.packb(list(content)))


def packed(**message: object) -> bytes:
    return msgpack.packb(message)


EIGHT = bytes(8)
MALFORMED: dict[str, list[bytes]] = {
    "no frames": [],
    "empty header": [b""],
    "not msgpack": [b"\xc1"],
    "trailing bytes": [packed() + b"\x00"],
    "truncated": [packed(a="text")[:-1]],
    "a list": [msgpack.packb([1])],
    "a number": [msgpack.packb(1)],
    "key that is a number": [msgpack.packb({1: 2})],
    "key that is a list": [b"\x81\x90\xc0"],
    "text not UTF-8": [b"\x81\xa1a\xa2\xff\xfe"],
    "key not UTF-8": [b"\x81\xa1\xff\xc0"],
    "too deep": [b"\x81\xa1a" + b"\x91" * 5000 + b"\xc0"],
    "length beyond the data": [b"\x81\xa1a\xdd\xff\xff\xff\xff"],
    "map length beyond the data": [b"\xdf\xff\xff\xff\xff"],
    "unknown extension": [packed(a=msgpack.ExtType(7, b""))],
    "bad timestamp": [b"\x81\xa1a\xc7\x03\xff\x00\x00\x00"],
    "reference empty": [packed(a=msgpack.ExtType(1, b"")), EIGHT],
    "reference not msgpack": [packed(a=msgpack.ExtType(1, b"\xc1")), EIGHT],
    "reference a map": [packed(a=msgpack.ExtType(1, b"\x80")), EIGHT],
    "reference too short": [packed(a=reference(0, "uint8")), EIGHT],
    "reference too long": [packed(a=reference(0, "uint8", [8], 0)), EIGHT],
    "index not there": [packed(a=reference(1, "uint8", [8])), EIGHT],
    "index negative": [packed(a=reference(-1, "uint8", [8])), EIGHT],
    "index a bool": [packed(a=reference(False, "uint8", [8])), EIGHT],
    "index used twice": [packed(a=[reference(0, "uint8", [8])] * 2), EIGHT],
    "dtype unknown": [packed(a=reference(0, "complex64", [1])), EIGHT],
    "dtype of objects": [packed(a=reference(0, "object", [1])), EIGHT],
    "dtype with byte order": [packed(a=reference(0, ">f4", [2])), EIGHT],
    "dtype not text": [packed(a=reference(0, 4, [2])), EIGHT],
    "shape too small": [packed(a=reference(0, "uint8", [7])), EIGHT],
    "shape too large": [packed(a=reference(0, "float64", [2])), EIGHT],
    "shape negative": [packed(a=reference(0, "uint8", [-8])), EIGHT],
    "shape of floats": [packed(a=reference(0, "uint8", [8.0])), EIGHT],
    "shape of bools": [packed(a=reference(0, "float64", [True])), EIGHT],
    "shape overflowing": [packed(a=reference(0, "uint8", [2**39] * 8)), EIGHT],
    "shape of too many": [packed(a=reference(0, "uint8", [2**39] * 100_000)), EIGHT],
    "shape empty but vast": [packed(a=reference(0, "uint8", [0] + [2**39] * 8)), b""],
    "boolean out of range": [packed(a=reference(0, "bool", [8])), b"\x02" * 8],
    "buffer nobody refers to": [packed(), EIGHT],
    "too many frames": [packed()] + [b""] * codec.MAX_FRAMES,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_input_is_named_as_such(case: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode(MALFORMED[case], 2**20)
    assert type(caught.value) is MalformedMessageError
    encode(caught.value.to_wire())


def test_a_message_beyond_the_limit_is_refused_however_it_is_cut() -> None:
    message = {"a": np.zeros(600, np.uint8), "b": np.zeros(600, np.uint8)}
    assert decode(frames_of(message), 1400)
    with pytest.raises(MessageTooLargeError, match="1000 bytes"):
        decode(frames_of(message), 1000)
    with pytest.raises(MessageTooLargeError, match="header"):
        decode([bytes(codec.MAX_HEADER_BYTES + 1)])


@given(st.lists(st.binary(max_size=80), max_size=4))
@few
def test_random_bytes_raise_nothing_else(frames: list[bytes]) -> None:
    with contextlib.suppress(MalformedMessageError):
        decode(frames, 2**20)


SUBMIT = {
    "v": 1,
    "type": "submit",
    "id": 3,
    "requests": [
        build_request(
            {
                "prompt": "a red circle",
                "multi_modal_data": {"image": np.zeros((4, 4, 3), np.uint8)},
            },
            OmniDiffusionSamplingParams(height=64, seed=2**40, sigmas=(1.0, 0.5)),
            request_id="r",
        ).to_wire(),
    ],
}


@st.composite
def mutations(draw: st.DrawFn) -> list[bytes]:
    """A valid message with bytes changed, cut, doubled or moved between frames."""
    frames = [bytearray(frame) for frame in frames_of(SUBMIT)]
    for _ in range(draw(st.integers(1, 4))):
        frame = draw(st.sampled_from(frames))
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["set", "cut", "insert", "drop", "copy"])):
            case "set" if at < len(frame):
                frame[at] = draw(st.integers(0, 255))
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=6))
            case "drop" if len(frames) > 1:
                frames.remove(frame)
            case "copy":
                frames.append(bytearray(frame))
    return [bytes(frame) for frame in frames]


@given(mutations())
@many
def test_mutated_messages_raise_nothing_else(frames: list[bytes]) -> None:
    try:
        wire = decode(frames, 2**20)
    except MalformedMessageError:
        return
    requests = wire.get("requests")
    for request in requests if isinstance(requests, list) else ():
        try:
            DiffusionRequest.from_wire(request)
        except OmniError as error:
            encode(error.to_wire())


# -- what is sent


def test_a_request_round_trips() -> None:
    request = DiffusionRequest(
        "r-1",
        "ein Kreis \N{LARGE RED CIRCLE}",
        OmniDiffusionSamplingParams(
            height=64,
            width=128,
            num_inference_steps=3,
            true_cfg_scale=3.5,
            negative_prompt="",
            seed=2**63 - 1,
            sigmas=(1.0, 0.5, 0.25),
            lora_request=LoRARequest("night", 0.5),
            extra_args={"a": [1, 2.5, None, {"b": b"\x00", "c": np.arange(3)}]},
        ),
        {"image": np.ones((2, 3, 3), np.uint8), "control_image": [np.ones((2, 3), np.uint8)]},
        "model",
        True,
    )
    back = DiffusionRequest.from_wire(decode(frames_of(request.to_wire())))
    assert same(back.to_wire(), request.to_wire())
    assert back.sampling_params.sigmas == (1.0, 0.5, 0.25)
    assert back.sampling_params.lora_request == LoRARequest("night", 0.5)


@pytest.mark.parametrize(
    "output",
    [
        DiffusionOutput(
            "r",
            images=[np.full((2, 3, 3), i, np.uint8) for i in range(2)],
            seed=7,
            applied_loras=[AppliedLoRA("night", "ab" * 32, 0.5)],
            metrics=OutputMetrics(1.5, 2.5, 3, 4, 1.5, 2, "stage0-worker0"),
        ),
        DiffusionOutput("r", frames=[np.zeros((4, 2, 2, 3), np.uint8)]),
        DiffusionOutput("r", frames=[np.zeros((4, 2, 2, 4), np.uint8)]),
        DiffusionOutput(
            "r", audio=[np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)], sample_rate=44100
        ),
        DiffusionOutput("r", latents=TensorData("bfloat16", (1, 2), b"\x01\x02\x03\x04")),
        DiffusionOutput("r", finished=False),
        DiffusionOutput.failed("r", ModelError("no", field="f", value=3, hint="h"), 5),
    ],
    ids=["images", "frames", "layers", "audio", "latents", "unfinished", "failed"],
)
def test_an_output_round_trips(output: DiffusionOutput) -> None:
    back = DiffusionOutput.from_wire(decode(frames_of(output.to_wire())))
    assert same(back.to_wire(), output.to_wire())
    assert type(back.error) is type(output.error)
    assert str(back.error) == str(output.error)
    in_message = decode(frames_of(outputs_message(3, [output, output])))
    assert all(same(wire, output.to_wire()) for wire in in_message["outputs"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("images", np.zeros((1, 2, 2, 3), np.uint8)),
        ("images", [np.zeros((2, 2, 3))]),
        ("images", [np.zeros((2, 2, 2), np.uint8)]),
        ("images", ["a.png"]),
        ("frames", [np.zeros((2, 2, 3), np.uint8)]),
        ("audio", np.zeros((1, 2, 8), np.float32)),
        ("audio", [np.zeros((2, 8))]),
        ("audio", [np.zeros(8, np.float32)]),
        ("sample_rate", 0),
        ("sample_rate", 44100.5),
        ("latents", torch.zeros(1)),
        ("latents", np.zeros(1, complex)),
        ("latents", np.zeros(1, ">f4")),
        ("finished", 1),
        ("error", ValueError("not one of ours")),
        ("seed", -1),
        ("seed", "7"),
        ("metrics", None),
        ("metrics", OutputMetrics(num_steps="4")),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_an_unusable_output_becomes_its_requests_error(field: str, value: Any) -> None:
    bad = DiffusionOutput("bad", images=[])
    setattr(bad, field, value)
    wire = decode(frames_of(outputs_message(1, [bad, DiffusionOutput("good")])))["outputs"]
    first, second = (DiffusionOutput.from_wire(entry) for entry in wire)
    assert (first.request_id, second.request_id, second.error) == ("bad", "good", None)
    assert type(first.error) is PipelineContractError
    assert first.error.field == f"DiffusionOutput.{field}"
    assert first.error.expected


def test_numpy_numbers_in_an_output_are_fine() -> None:
    metrics = OutputMetrics(num_steps=np.int64(4), mean_batch_size=np.float32(1.5))  # type: ignore[arg-type]
    output = DiffusionOutput("r", seed=np.uint64(7), metrics=metrics)  # type: ignore[arg-type]
    back = DiffusionOutput.from_wire(decode(frames_of(output.to_wire())))
    assert (back.seed, back.metrics.num_steps, back.metrics.mean_batch_size) == (7, 4, 1.5)


ADAPTER = Adapter("night", "/models/night.safetensors", "ab" * 32, 0.8)


def test_a_plan_round_trips() -> None:
    request = build_request("a", OmniDiffusionSamplingParams(seed=1), request_id="r")
    one = AdapterActivation((ADAPTER,), (0.5,))
    for activations in ((None, None), (one, None), (one, one)):
        plan = BatchPlan(9, (request, request), activations)
        back = BatchPlan.from_wire(decode(frames_of(plan.to_wire())))
        assert (back.plan_id, back.activations) == (9, activations)
        assert same(back.to_wire(), plan.to_wire())


def test_capabilities_round_trip() -> None:
    capabilities = PipelineCapabilities(
        "P",
        supports_request_batch=True,
        sampling_fields=frozenset({"seed", "height"}),
        extra_args=frozenset({"b", "a"}),
        inputs=frozenset({"image"}),
        defaults={"height": 64, "guidance_scale": 3.5, "sigmas": [1.0]},
        size_multiple=8,
    )
    wire = decode(frames_of({"capabilities": capabilities.to_wire()}))["capabilities"]
    assert PipelineCapabilities.from_wire(wire) == capabilities


def test_a_workers_spec_round_trips() -> None:
    spec = WorkerSpec("w", "ipc:///x", {"max_loras": 2, "pipeline": None}, "m", "cpu", 1)
    assert WorkerSpec.from_wire(decode(frames_of(spec.to_wire()))) == spec


@pytest.mark.parametrize("code", sorted(ERRORS_BY_CODE))
def test_errors_round_trip(code: str) -> None:
    error = ERRORS_BY_CODE[code](
        "what", field="f", value=[1], expected="e", hint="h", retry_after_ms=1.5
    )
    back = error_from_wire(decode(frames_of(error.to_wire())))
    assert type(back) is type(error)
    assert (back.to_wire(), str(back)) == (error.to_wire(), str(error))
    bare = ERRORS_BY_CODE[code]("what").to_wire()
    assert bare == error_from_wire(bare).to_wire() == {"code": code, "message": "what"}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [nested(900), "x" * 10**7, b"x" * 10**7, [0] * 10**6, {str(i): i for i in range(10**5)},
     10**5000, "\ud800", np.zeros((1000, 1000)), TensorData("bfloat16", (2,), bytes(4))],
    ids=["nested", "text", "bytes", "list", "dict", "integer", "surrogate", "array", "tensor"],
)  # fmt: skip
def test_an_error_shows_any_value_shortly(value: object) -> None:
    assert len(shorten(value)) <= 200
    error = OmniError(str(shorten(value)), field=shorten(value), value=value)
    assert len(encode(error.to_wire())[0]) < 3000


@pytest.mark.parametrize(
    ("change", "field", "close"),
    [
        ({"promt": "x"}, "promt", "prompt"),
        ({"sampling_params": {"hieght": 64}}, "sampling_params.hieght", "height"),
        ({"sampling_params": {"lora_request": {"nam": "x"}}}, "lora_request.nam", "name"),
        (
            {"prompt": {"prompt": "a", "negativ_prompt": "b"}},
            "prompt.negativ_prompt",
            "negative_pr",
        ),
        ({"multi_modal_data": {"imag": 1}}, "multi_modal_data.imag", "image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_fields_are_refused_with_the_nearest_name(
    change: dict[str, Any], field: str, close: str
) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        DiffusionRequest.from_wire({"prompt": "a", **change})
    assert caught.value.field == field
    assert close in (caught.value.hint or "")


PROCESS_FOLDERS = ("protocol", "engine", "worker", "cli", "stages", "stages/bundled")
PICKLES = re.compile(
    r"\b(c?[pP]ickle|marshal|shelve|dill|joblib|send_pyobj|recv_pyobj|allow_pickle|torch\.load)\b"
)


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a source's lines as far as they are code: without comments and texts."""
    with path.open("rb") as file:
        tokens = [
            token
            for token in tokenize.tokenize(file.readline)
            if token.type in (tokenize.NAME, tokenize.OP)
        ]
    for number, line in itertools.groupby(tokens, lambda token: token.start[0]):
        yield number, "".join(f" {t.string}" if t.type == tokenize.NAME else t.string for t in line)


def test_nothing_that_crosses_a_process_boundary_is_pickled() -> None:
    sources = [path for folder in PROCESS_FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    assert len(sources) > 20
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sources
        for number, line in code_lines(path)
        if PICKLES.search(line.replace(". ", "."))
    ]
    assert not found


def test_the_search_for_pickles_finds_them(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("import pickle\ntorch.load('x')\n'pickle'  # pickle\nf(allow_pickle=True)\n")
    lines = [n for n, line in code_lines(source) if PICKLES.search(line.replace(". ", "."))]
    assert lines == [1, 2, 4]
