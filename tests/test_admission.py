"""Admission and compatibility keys, as pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission, AdmittedRequest
from omni_engine.engine.keys import request_key
from omni_engine.protocol.adapters import Adapter, AdapterActivation, compose
from omni_engine.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    LimitExceededError,
    UnknownFieldError,
)
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.config import EngineArgs, Limits

CAPABILITIES = PipelineCapabilities(
    pipeline="Some",
    supports_request_batch=True,
    sampling_fields=frozenset(
        {"height", "width", "num_inference_steps", "true_cfg_scale", "negative_prompt", "sigmas",
         "guidance_scale", "eta", "strength", "max_sequence_length", "num_frames", "lora_request"}
    ),
    extra_args=frozenset({"shared", "private", "attention_kwargs"}),
    per_request=frozenset({"num_outputs_per_prompt", "negative_prompt", "private", "seed"}),
    inputs=frozenset({"image"}),
    defaults={"height": 64, "width": 64, "num_inference_steps": 10, "true_cfg_scale": 4.0},
    size_multiple=16,
)  # fmt: skip


def admission(**arguments: Any) -> Admission:
    args = EngineArgs(model="some/model", **arguments)
    return Admission(args, Limits(), AdapterRegistry(args), CAPABILITIES)


def admit(prompt: Any = "a", where: Admission | None = None, **fields: Any) -> AdmittedRequest:
    request = build_request(prompt, OmniDiffusionSamplingParams(**fields))
    return (where or admission()).admit(request)


def test_previews_of_a_pipeline_that_makes_none_are_refused() -> None:
    asked = build_request("a", OmniDiffusionSamplingParams(), preview_every=2)
    with pytest.raises(InvalidRequestError, match="Some makes no previews") as caught:
        admission().admit(asked)
    assert caught.value.field == "preview_every"
    showing = dataclasses.replace(CAPABILITIES, makes_previews=True)
    args = EngineArgs(model="some/model")
    able = Admission(args, Limits(), AdapterRegistry(args), showing)
    assert able.admit(asked).request.preview_every == 2


SHARED = [
    {"height": 128},
    {"width": 128},
    {"num_inference_steps": 11},
    {"true_cfg_scale": 1.0},
    {"guidance_scale": 2.0},
    {"sigmas": [1.0, 0.5]},
    {"eta": 0.5},
    {"strength": 0.5},
    {"max_sequence_length": 100},
    {"num_frames": 3},
    {"output_type": "latent"},
    {"negative_prompt": "given or not decides guidance"},
    {"extra_args": {"shared": 1}},
]
PRIVATE = [
    {"seed": 5},
    {"num_outputs_per_prompt": 3},
    {"extra_args": {"private": 1}},
    {"height": 64, "width": 64},
    {"num_inference_steps": 10},
    {"output_type": "np"},
]


@pytest.mark.parametrize("fields", SHARED, ids=lambda fields: next(iter(fields)))
def test_what_shapes_the_forward_is_in_the_key(fields: dict[str, Any]) -> None:
    assert admit(**fields).key != admit().key


@pytest.mark.parametrize("fields", PRIVATE, ids=lambda fields: next(iter(fields)))
def test_private_fields_and_spelled_out_defaults_are_not_in_the_key(fields: dict[str, Any]) -> None:
    assert admit(**fields).key == admit().key
    assert hash(admit(**fields).key) == hash(admit().key)


def test_the_defaults_that_are_told_are_those_that_requests_get() -> None:
    args = EngineArgs(model="bundled", default_sampling_params={"num_inference_steps": 5})
    declared = dataclasses.replace(
        CAPABILITIES, defaults={"height": 1024, "width": 1024, "num_inference_steps": 50}
    )
    judge = Admission(args, Limits(), AdapterRegistry(args), declared)
    asked = judge.admit(build_request("a", OmniDiffusionSamplingParams())).request.sampling_params
    told = judge.defaults
    assert (told["height"], told["num_inference_steps"]) == (64, 5)
    assert {name: getattr(asked, name) for name in told} == told


def test_one_output_is_what_requests_get_that_name_no_number() -> None:
    """Also where the number of outputs shapes the forward."""
    declared = dataclasses.replace(CAPABILITIES, per_request=frozenset({"seed"}))
    one, two, none = [
        request_key(admit(**fields).request, declared, None)
        for fields in ({"num_outputs_per_prompt": 1}, {"num_outputs_per_prompt": 2}, {})
    ]
    assert one == none != two


def test_prompts_never_matter_to_the_key() -> None:
    assert admit("a").key == admit("something much longer").key
    a, b = (admit(negative_prompt=text).key for text in ("x", "y"))
    assert a == b


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), ([1], [1.0]), ("1", 1)])
def test_values_of_different_types_differ(one: Any, other: Any) -> None:
    assert admit(extra_args={"shared": one}).key != admit(extra_args={"shared": other}).key


def test_arrays_count_by_content_and_conditioning_by_layout() -> None:
    ones, zeros = np.ones((2, 2)), np.zeros((2, 2))
    keys = [admit(extra_args={"shared": array}).key for array in (ones, ones.copy(), zeros)]
    assert keys[0] == keys[1] != keys[2]
    small, same, large = (
        admit({"prompt": "a", "multi_modal_data": {"image": np.full((size, 8, 3), value, "uint8")}})
        for size, value in ((8, 0), (8, 1), (16, 0))
    )
    assert small.key == same.key != large.key
    assert small.key != admit().key


def activation(*parts: tuple[str, float]) -> AdapterActivation | None:
    return compose((Adapter("name", "path", digest), scale) for digest, scale in parts)


def test_adapter_and_canonical_scale_are_in_the_key() -> None:
    request = admit().request
    keys = [
        request_key(request, CAPABILITIES, activation(*parts))
        for parts in (
            [("d", 0.8)], [("d", 0.80000001)], [("d", 0.5), ("d", 0.3)],
            [("d", 0.9)], [("e", 0.8)], [("d", 0.8), ("e", 0.8)],
        )
    ]  # fmt: skip
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 4
    assert request_key(request, CAPABILITIES, None) not in keys


def test_where_adapters_are_mixed_they_are_not_in_the_key() -> None:
    request = admit().request
    keys = [
        request_key(request, CAPABILITIES, one, mixed=True)
        for one in (None, activation(("d", 0.8)), activation(("e", 1.0)))
    ]
    assert keys[0] == keys[1] == keys[2]
    assert keys[0].adapter is None


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@settings(derandomize=True, max_examples=100)
@given(plain, plain)
def test_extra_arguments_share_a_key_exactly_when_they_are_equal(one: Any, other: Any) -> None:
    a, b = (admit(extra_args={"shared": value}).key for value in (one, other))
    assert (a == b) == (repr(_sorted(one)) == repr(_sorted(other)))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    if isinstance(value, float):
        return value + 0.0  # -0.0 is 0.0
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def test_order_of_defaults_request_over_stage_over_pipeline() -> None:
    stage = admission(default_sampling_params={"height": 32, "num_inference_steps": 5})
    params = admit(where=stage, num_inference_steps=7).request.sampling_params
    assert (params.height, params.width, params.num_inference_steps) == (32, 64, 7)


def test_seed_is_drawn_once_and_rows_and_work_are_counted() -> None:
    one, other = admit(num_outputs_per_prompt=3, num_frames=5), admit()
    assert one.request.seed != other.request.seed
    assert (one.rows, one.work) == (3, 3 * 64 * 64 * 5)
    assert (other.rows, other.work) == (1, 64 * 64)


def test_number_of_steps_follows_the_sigmas() -> None:
    assert admit(sigmas=[1.0, 0.6, 0.2]).request.sampling_params.num_inference_steps == 3


REFUSED = [
    ({"height": 100}, "height", "a multiple of 16, such as 96"),
    ({"fps": 5}, "fps", "one of"),
    ({"sigmas": [1.0], "num_inference_steps": 2}, "num_inference_steps", "1, the number of sigmas"),
    ({"true_cfg_scale": 2}, "true_cfg_scale", "negative_prompt to be given"),
    ({"negative_prompt": "x", "true_cfg_scale": 1}, "negative_prompt", "true_cfg_scale > 1"),
    ({"seed": 2**63 - 1, "num_outputs_per_prompt": 2}, "seed", "at most"),
    (
        {"extra_args": {"privat": 1}},
        "extra_args.privat",
        "one of attention_kwargs, private, shared",
    ),
    ({"extra_args": {"attention_kwargs": {"scale": 0.5}}}, "extra_args.attention_kwargs.scale", ""),
]


@pytest.mark.parametrize(("fields", "field", "expected"), REFUSED, ids=lambda v: str(v)[:20])
def test_impossible_fields_are_refused(fields: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit(**fields)
    assert caught.value.field == field
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize("fields", [{"height": 8192}, {"num_inference_steps": 1001},
                                    {"num_outputs_per_prompt": 65}])  # fmt: skip
def test_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(LimitExceededError):
        admit(**fields)


def test_a_request_larger_than_any_batch_is_refused() -> None:
    with pytest.raises(LimitExceededError, match="max_batch_rows"):
        admit(where=admission(max_batch_rows=2), num_outputs_per_prompt=3)
    with pytest.raises(LimitExceededError, match="max_batch_work"):
        admit(where=admission(max_batch_work=64 * 64 * 2), num_outputs_per_prompt=3)


def test_stage_defaults_that_the_pipeline_would_ignore_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="Some takes no fps"):
        admission(default_sampling_params={"fps": 8.0})


@pytest.mark.parametrize(
    ("name", "meant"), [("hieght", "height"), ("steps", "num_inference_steps")]
)
def test_misspelt_parameters_are_refused_when_they_are_written(name: str, meant: str) -> None:
    with pytest.raises(UnknownFieldError, match=f"Did you mean '{meant}'"):
        OmniDiffusionSamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_an_output_prints_without_its_pixels() -> None:
    assert len(repr(DiffusionOutput("a", images=[np.zeros((64, 64, 3), "uint8")]))) < 500
