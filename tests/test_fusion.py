"""Deterministic padding: what a call shares its forward with doesn't change it by a single bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from families import FAMILIES
from families_parts import EQUAL_PROMPTS

from omni_engine.worker.call_rules import FLOAT_TIMESTEPS
from omni_engine.worker.fusion import Call, CallReader, Fusion
from omni_engine.worker.joining import CannotSplitError, tensors_in
from omni_engine.worker.views import denoisers, make_view

CALLS = 4
SHARING = ["stable_diffusion", "sdxl", "stable_audio", "z_image", "qwen_image", "qwen_image_21",
           "cogvideox", "flux"]  # fmt: skip
"""Rows, dicts of rows, expanded scalars, lists of rows, masks, state, shared tables."""


class Captured(Exception):  # noqa: N818  # ends a pipeline's call once its denoiser was called
    pass


def _call_of(pipe: Any, request: dict[str, Any], seed: int, module: Any = None) -> Call:
    """The first call of a denoiser that a request makes: of the last one, if none is named."""
    module = module or denoisers(pipe)[-1]  # the others embed the prompt
    reader, found = CallReader(module, module.forward), []

    def capture(*args: Any, **kwargs: Any) -> Any:
        found.append(reader.read(args, kwargs))
        raise Captured

    capture.__signature__ = reader.signature  # type: ignore[attr-defined]
    with mock.patch.object(module, "forward", capture), pytest.raises(Captured):
        make_view(pipe)(**request, generator=torch.Generator().manual_seed(seed))
    return found[0]


@functools.cache
def _captured(name: str) -> list[Call]:
    """First calls of requests of equal prompt lengths, in float32."""
    torch.set_num_threads(1)
    family = dataclasses.replace(FAMILIES[name], prompts=EQUAL_PROMPTS, float64=False)
    pipe = family.pipeline()
    with family.context(), torch.no_grad():
        return [_call_of(pipe, family.request(index), index) for index in range(CALLS)]


def _fresh(calls: list[Call]) -> list[Call]:
    """Calls whose state objects nobody wrote to."""
    return [
        dataclasses.replace(
            call,
            arguments={name: value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                       for name, value in call.arguments.items()},
            kinds=dict(call.kinds),
        )
        for call in calls
    ]  # fmt: skip


def _forward(fusion: Fusion, calls: list[Call]) -> list[Any]:
    with torch.no_grad():
        arguments = fusion.fuse(calls)
        output = calls[0].module.forward(**arguments)
        return fusion.split(output, calls, arguments)


def _bytes(output: Any) -> tuple[bytes, ...]:
    if isinstance(output, torch.Tensor):
        return (output.numpy().tobytes(),)
    items = output.values() if isinstance(output, dict) else output
    return tuple(itertools.chain.from_iterable(_bytes(item) for item in items))


@pytest.mark.parametrize("name", SHARING)
def test_mates_and_position_do_not_change_a_bit(name: str) -> None:
    fusion, calls = Fusion(pad_calls_to=CALLS), _captured(name)
    assert len({fusion.key(call) for call in calls}) == 1
    alone = [_bytes(_forward(fusion, [call])[0]) for call in _fresh(calls)]
    assert len(set(alone)) == CALLS, "the calls must differ"
    for order in ([0, 1], [1, 0], [2, 0, 1], [3, 2, 1, 0], [1, 2, 3, 0]):
        fresh = _fresh(calls)
        outputs = _forward(fusion, [fresh[i] for i in order])
        assert [_bytes(output) for output in outputs] == [alone[i] for i in order]


@pytest.mark.parametrize("name", SHARING)
def test_padded_forwards_have_one_shape_and_right_results(name: str) -> None:
    fusion, calls = Fusion(pad_calls_to=CALLS), _captured(name)
    expected = [_forward(Fusion(), [call])[0] for call in _fresh(calls)]
    shapes = set()
    for count in range(1, CALLS + 1):
        fresh = _fresh(calls)[:count]
        shapes.add(_shapes(fusion.fuse(fresh)))
        outputs = _forward(fusion, fresh)
        assert len(outputs) == count
        for output, wanted in zip(outputs, expected, strict=False):
            torch.testing.assert_close(output, wanted, rtol=0, atol=1e-4)
    assert len(shapes) == 1


def test_a_shared_cache_is_written_back_without_the_padding() -> None:
    fusion, calls = Fusion(pad_calls_to=CALLS), _captured("qwen_image_21")
    alone, shared = _fresh(calls)[:1], _fresh(calls)[1::-1]
    _forward(fusion, alone)
    _forward(fusion, shared)
    caches = [vars(call.arguments["kv_cache"]) for call in (alone[0], shared[1], shared[0])]
    found = [_bytes_in(cache) for cache in caches]
    assert found[0]
    assert found[0] == found[1]
    assert found[1] != found[2]
    rows = {tensor.shape[0] for _, tensor in tensors_in(caches)}
    assert rows == {calls[0].rows}


def _bytes_in(value: Any) -> list[bytes]:
    return [tensor.numpy().tobytes() for _, tensor in tensors_in(value)]


def test_calls_of_other_shapes_never_share_when_padded() -> None:
    """Padded tokens and rows of other forwards may change the last bits."""
    family = dataclasses.replace(FAMILIES["qwen_image"], float64=False)
    pipe = family.pipeline()
    with torch.no_grad():
        ragged = [_call_of(pipe, family.request(index), index) for index in (0, 1)]
    assert len({Fusion().key(call) for call in ragged}) == 1
    assert len({Fusion(pad_calls_to=2).key(call) for call in ragged}) == 2


def test_more_calls_than_a_padded_forward_holds_are_refused() -> None:
    calls = _captured("flux")
    with pytest.raises(ValueError, match="4 calls don't fit into 3"):
        Fusion(pad_calls_to=3).fuse(calls)
    with pytest.raises(ValueError, match="at least 1"):
        Fusion(pad_calls_to=0)


WHOLE = {"CogVideoXTransformer3DModel": "cogvideox", "ControlNetModel": "sdxl_controlnet",
         "LTXVideoTransformer3DModel": "ltx", "PixArtTransformer2DModel": "pixart_sigma",
         "SD3Transformer2DModel": "stable_diffusion_3",
         "UNet2DConditionModel": "stable_diffusion", "WanTransformer3DModel": "wan"}  # fmt: skip


@pytest.mark.parametrize("model", sorted(FLOAT_TIMESTEPS))
def test_whole_timesteps_may_be_floats_without_changing_a_bit(model: str) -> None:
    family = dataclasses.replace(FAMILIES[WHOLE[model]], float64=False)
    pipe = family.pipeline()
    module = next(part for part in denoisers(pipe) if type(part).__name__ == model)
    with family.context(), torch.no_grad():
        call = _call_of(pipe, family.request(0), 0, module)
        assert call.arguments["timestep"].dtype == torch.float32
        results = []
        for step in (0, 1, 501, 999):
            timestep = torch.full_like(call.arguments["timestep"], step)
            floats = module.forward(**{**call.arguments, "timestep": timestep})
            whole = module.forward(**{**call.arguments, "timestep": timestep.long()})
            assert _bytes(whole) == _bytes(floats)
            results.append(_bytes(whole))
        assert len(set(results)) == 4, "timesteps must matter"


def test_calls_with_whole_and_fractional_timesteps_share() -> None:
    one, other, *_ = _fresh(_captured("stable_diffusion"))
    reader = CallReader(one.module, one.module.forward)
    whole = reader.read((), {**one.arguments, "timestep": torch.tensor(981)})
    fractional = reader.read((), {**other.arguments, "timestep": torch.tensor(981.5)})
    assert Fusion().key(whole) == Fusion().key(fractional)


class Notes:
    """A request's own object, of a class that nobody knows."""

    def __init__(self) -> None:
        self.mode = "write"
        self.kept: list[torch.Tensor] = []


class Keeper(torch.nn.Module):
    """Writes to, and reads from, an object that belongs to the request."""

    def forward(self, x: torch.Tensor, notes: Notes) -> torch.Tensor:
        if notes.mode == "write":
            notes.kept.append(x * 2)
        return x + sum(notes.kept)


def _keeper_calls() -> list[Call]:
    module = Keeper()
    reader = CallReader(module, module.forward)
    return [reader.read((torch.full((1, 2), float(i)), Notes()), {}) for i in range(3)]


def _assert_each_keeps_its_own(fusion: Fusion, calls: list[Call]) -> None:
    assert len({fusion.key(call) for call in calls}) == 3, "they run alone"
    for value, call in enumerate(calls):
        (output,) = _forward(fusion, [call])
        assert torch.equal(output, torch.full((1, 2), 3.0 * value))
        assert len(call.arguments["notes"].kept) == 1


def test_what_a_forward_writes_to_an_unknown_object_is_never_lost() -> None:
    fusion, calls = Fusion(), _keeper_calls()
    assert len({fusion.key(call) for call in calls}) == 1
    with pytest.raises(CannotSplitError, match="notes was written to"):
        _forward(fusion, calls)
    _assert_each_keeps_its_own(fusion, calls)


def test_unknown_objects_are_never_padded() -> None:
    _assert_each_keeps_its_own(Fusion(pad_calls_to=3), _keeper_calls())


@pytest.mark.parametrize("mode", ["read", "skip"])
def test_objects_with_other_fields_never_share(mode: str) -> None:
    one, other, _ = _keeper_calls()
    other.arguments["notes"].mode = mode
    assert Fusion().key(one) != Fusion().key(other)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((name, _shapes(item)) for name, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_shapes(item) for item in value)
    return str(type(value))
