"""Sampling parameters and adapter choice, checked when they are built."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_engine.protocol import fields
from omni_engine.protocol.errors import InvalidRequestError
from omni_engine.protocol.fields import FieldRule, describe, refuse_unknown

MAX_SEED = 2**63 - 1
MAX_NAME_CHARS = 1000
SCALE_DIGITS = 4
MAX_SCALE = 100.0
MAX_COMPOSED_ADAPTERS = 16

OUTPUT_TYPES = ("np", "latent")


def canonical_scale(scale: float) -> float:
    """Round a LoRA scale to the one precision used in keys, identities and activation."""
    return round(float(scale), SCALE_DIGITS) + 0.0  # + 0.0 turns -0.0 into 0.0


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Names a registered adapter and how strongly to apply it.

    Args:
        name: the name it was registered by; never a path.
        scale: a finite strength, rounded to 4 digits; 0: no adapter; None: its default.

    Raises:
        InvalidRequestError: if name or scale are not acceptable.
    """

    name: str
    scale: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME_CHARS:
            raise InvalidRequestError(
                "an adapter is named by a string",
                field="lora_request.name",
                value=describe(self.name),
                expected="a registered adapter's name",
            )
        fields.text().apply("lora_request.name", self.name)
        if self.scale is not None:
            scale = fields.number(-MAX_SCALE, MAX_SCALE).apply("lora_request.scale", self.scale)
            object.__setattr__(self, "scale", canonical_scale(scale))

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict."""
        return {"name": self.name, "scale": self.scale}


def _lora_request(value: object) -> LoRARequest | tuple[LoRARequest, ...]:
    if isinstance(value, list | tuple):
        if len(value) > MAX_COMPOSED_ADAPTERS:
            raise ValueError
        return tuple([_one_lora_request(one) for one in value])
    return _one_lora_request(value)


def _one_lora_request(value: object) -> LoRARequest:
    if isinstance(value, LoRARequest):
        return value
    if not isinstance(value, Mapping):
        raise TypeError
    refuse_unknown(value, frozenset({"name", "scale"}), "lora_request")
    if "name" not in value:
        raise InvalidRequestError(
            "an adapter needs a name", field="lora_request.name", expected="a registered name"
        )
    return LoRARequest(value["name"], value.get("scale"))


def _sampler(value: object) -> str:
    name: str = fields.text(MAX_NAME_CHARS).normalise(value)
    if not name:
        raise ValueError
    return name


_RULES: dict[str, FieldRule] = {
    "height": fields.integer(1, 2**31 - 1),
    "width": fields.integer(1, 2**31 - 1),
    "num_frames": fields.integer(1, 2**31 - 1),
    "fps": fields.number(0.001, 1000),
    "num_inference_steps": fields.integer(1, 2**31 - 1),
    "guidance_scale": fields.number(-1000, 1000),
    "guidance_scale_2": fields.number(-1000, 1000),
    "true_cfg_scale": fields.number(-1000, 1000),
    "negative_prompt": fields.text(),
    "seed": fields.integer(0, MAX_SEED),
    "num_outputs_per_prompt": fields.integer(1, 2**31 - 1),
    "strength": fields.number(0, 1),
    "sampler": FieldRule(_sampler, f"a sampler's name, at most {MAX_NAME_CHARS} characters"),
    "sigmas": fields.number_list(0, math.inf, 10_000),
    "eta": fields.number(0),
    "max_sequence_length": fields.integer(1, 2**31 - 1),
    "output_type": fields.one_of(*OUTPUT_TYPES),
    "lora_request": FieldRule(
        _lora_request,
        "a LoRARequest or a dict with 'name' and 'scale', or a list of at most "
        f"{MAX_COMPOSED_ADAPTERS} of these",
    ),
    "extra_args": fields.plain_mapping("extra_args"),
}


@dataclass(frozen=True, slots=True)
class OmniDiffusionSamplingParams:
    """How to make a picture or video. A field left at None takes the stage's or model's default.

    Args:
        height: pixels, a multiple of what the model needs.
        width: pixels, a multiple of what the model needs.
        num_frames: frames of a video.
        fps: frames per second of a video.
        num_inference_steps: denoising steps, >= 1.
        guidance_scale: the pipeline's ``guidance_scale``.
        guidance_scale_2: guidance of a second denoiser (Wan 2.2).
        true_cfg_scale: classifier-free guidance of guidance-distilled pipelines (Qwen-Image, Flux).
        negative_prompt: what to steer away from.
        seed: 0 to 2**63 - 1; drawn by the engine when None and reported in the output.
        num_outputs_per_prompt: pictures to make; picture i uses seed + i.
        strength: 0 to 1, how far an input image is changed.
        sampler: the sampling method, such as "euler" or "flow_unipc"; None: the model's own.
        sigmas: noise levels instead of a number of steps.
        eta: DDIM's eta, >= 0.
        max_sequence_length: longest prompt in tokens.
        output_type: "np" (uint8 arrays, the default) or "latent".
        lora_request: the adapter to apply, or a list of adapters to apply together, kept as a
            tuple; the scales of one that is named twice add up. An empty list is the bare model,
            whatever the stage's default is.
        extra_args: further arguments of the pipeline's call, checked against its signature.

    Raises:
        InvalidRequestError: if a value is of the wrong type or out of range.
    """

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    seed: int | None = None
    num_outputs_per_prompt: int | None = None
    strength: float | None = None
    sampler: str | None = None
    sigmas: tuple[float, ...] | None = None
    eta: float | None = None
    max_sequence_length: int | None = None
    output_type: str | None = None
    lora_request: LoRARequest | Sequence[LoRARequest] | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, rule.apply(name, value))

    @classmethod
    def from_mapping(
        cls, given: object, where: str = "sampling_params"
    ) -> OmniDiffusionSamplingParams:
        """Build from a plain dict, refusing unknown names.

        Raises:
            UnknownFieldError: for an unknown name, with the nearest valid one.
            InvalidRequestError: for a wrong type or range.
        """
        if not isinstance(given, Mapping):
            raise InvalidRequestError(
                "sampling parameters must be a mapping",
                field=where,
                value=describe(given),
                expected="a dict of field names to values",
            )
        refuse_unknown(given, SAMPLING_FIELDS, where)
        return cls(**given)

    @property
    def lora_requests(self) -> tuple[LoRARequest, ...] | None:
        """The adapters asked for; empty: the bare model; None: the stage's default."""
        asked = self.lora_request
        if asked is None:
            return None
        return (asked,) if isinstance(asked, LoRARequest) else tuple(asked)

    def given(self) -> dict[str, Any]:
        """Return the fields that were set, by name."""
        named = ((name, getattr(self, name)) for name in SAMPLING_FIELD_ORDER)
        return {name: value for name, value in named if value is not None and value != {}}

    def with_defaults(self, defaults: Mapping[str, Any]) -> OmniDiffusionSamplingParams:
        """Return a copy in which fields left open take the value of ``defaults``.

        ``extra_args`` are merged entry by entry.
        """
        merged = {**defaults, **self.given()}
        merged["extra_args"] = {**(defaults.get("extra_args") or {}), **self.extra_args}
        return OmniDiffusionSamplingParams(**merged)

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict of the fields that were set."""
        wire = self.given()
        if isinstance(self.lora_request, LoRARequest):
            wire["lora_request"] = self.lora_request.to_wire()
        elif self.lora_request is not None:
            wire["lora_request"] = [one.to_wire() for one in self.lora_request]
        if self.sigmas is not None:
            wire["sigmas"] = list(self.sigmas)
        return wire


_generated_init = OmniDiffusionSamplingParams.__init__


@functools.wraps(_generated_init)
def _checked_init(self: OmniDiffusionSamplingParams, *args: Any, **fields_given: Any) -> None:
    refuse_unknown(fields_given, SAMPLING_FIELDS, "")
    _generated_init(self, *args, **fields_given)


OmniDiffusionSamplingParams.__init__ = _checked_init  # type: ignore[method-assign]

SAMPLING_FIELD_ORDER = tuple(f.name for f in dataclasses.fields(OmniDiffusionSamplingParams))
SAMPLING_FIELDS = frozenset(SAMPLING_FIELD_ORDER)
ENGINE_FIELDS = frozenset({"seed", "num_outputs_per_prompt", "output_type", "extra_args"})
"""Sampling fields that the engine serves for every pipeline."""
