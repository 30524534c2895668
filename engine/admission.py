"""Admission: completes a request with defaults and refuses what can't run."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omni_engine.engine.adapter_room import AdapterRoom
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.keys import RequestKey, request_key
from omni_engine.engine.request_limits import beyond_limits, check_given, work_of
from omni_engine.protocol.adapters import AdapterActivation
from omni_engine.protocol.errors import (
    ConfigError,
    InvalidRequestError,
    nearest,
)
from omni_engine.protocol.fields import unknown_field
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import ENGINE_FIELDS, MAX_SEED, OmniDiffusionSamplingParams
from omni_engine.stages.config import EngineArgs, Limits
from omni_engine.stages.families import model_defaults


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request with every default filled in, ready to be scheduled.

    Attributes:
        request: with effective parameters and a seed.
        key: what it can share a batch with.
        activation: the adapters it runs under.
        rows: pictures it makes.
        work: rows x pixels x frames.
    """

    request: DiffusionRequest
    key: RequestKey
    activation: AdapterActivation | None
    rows: int
    work: int

    @property
    def weights(self) -> tuple[str, ...]:
        """The contents of adapters that it needs loaded, sorted."""
        return () if self.activation is None else self.activation.digests


class Admission:
    """Admits requests of one stage.

    Args:
        arguments: the stage's settings.
        limits: the engine's limits.
        registry: the stage's adapters.
        capabilities: what its pipeline can do, as a worker reported it.

    Raises:
        ConfigError: if the stage's default parameters don't suit the pipeline or are too large.
    """

    def __init__(
        self,
        arguments: EngineArgs,
        limits: Limits,
        registry: AdapterRegistry,
        capabilities: PipelineCapabilities,
    ) -> None:
        self._arguments = arguments
        self._limits = limits
        self._registry = registry
        self._capabilities = capabilities
        self._room = AdapterRoom.of(arguments, capabilities)
        self._stage_defaults = arguments.default_sampling_params.given()
        self._model_defaults = {
            name: value
            for name, value in model_defaults(arguments.resolved_model()).items()
            if name in capabilities.sampling_fields and not arguments.pipeline
        }
        try:
            params = OmniDiffusionSamplingParams.from_mapping(self._stage_defaults)
            self._check_accepted(params)
            self._check_sampler(params)
            self._check_own_defaults(params)
        except InvalidRequestError as error:
            raise ConfigError(
                f"default_sampling_params don't suit {capabilities.pipeline}: {error.message}",
                field=f"default_sampling_params.{error.field}",
                value=error.value,
                expected=error.expected,
                hint=error.hint,
            ) from None

    def check(self, request: DiffusionRequest) -> DiffusionRequest:
        """Check all of a request but its adapters, and fill in what it left open.

        Raises:
            InvalidRequestError: naming the offending field.
        """
        asked = request.sampling_params
        self._check_accepted(asked)
        self._check_inputs(request)
        check_given(self._limits, request)
        self._check_previews(request)
        params = self._complete(asked)
        for error in self._unsuitable_sizes(params):
            raise error
        self._check_guidance(asked, params)
        self._check_sampler(params)
        return dataclasses.replace(request, sampling_params=params)

    def admit(
        self, request: DiffusionRequest, checked: DiffusionRequest | None = None
    ) -> AdmittedRequest:
        """Check a request, fill in what it left open and settle what it runs under.

        Args:
            request: as submitted.
            checked: what ``check`` returned for it, if that was called already.

        Raises:
            InvalidRequestError: naming the offending field.
            UnknownAdapterError: if it names an adapter that isn't registered.
            OmniError: why an adapter that it names is unusable.
        """
        complete = checked or self.check(request)
        activation = self._registry.resolve(request.sampling_params.lora_requests)
        self._room.check(activation, self._registry.contents.pinned)
        key = request_key(
            complete,
            self._capabilities,
            activation,
            step_execution=self._arguments.step_execution,
            mixed=self._room.mixed is not None,
        )
        work = work_of(complete.sampling_params)
        return AdmittedRequest(complete, key, activation, complete.num_outputs, work)

    @property
    def defaults(self) -> dict[str, Any]:
        """What requests get that leave sampling parameters out."""
        return self._capabilities.defaults | self._model_defaults | self._stage_defaults

    def _complete(self, asked: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
        defaults = self.defaults
        if asked.sigmas is not None:
            _check_sigmas(asked)
            defaults["num_inference_steps"] = len(asked.sigmas)
        params = asked.with_defaults(defaults)
        rows = params.num_outputs_per_prompt or 1
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbelow(2**32))
        elif params.seed + rows - 1 > MAX_SEED:
            raise InvalidRequestError(
                "picture i uses seed + i, which passes the largest seed",
                field="seed",
                value=params.seed,
                expected=f"at most {MAX_SEED} - (num_outputs_per_prompt - 1)",
            )
        return dataclasses.replace(params, num_outputs_per_prompt=rows, lora_request=None)

    def _check_accepted(self, params: OmniDiffusionSamplingParams) -> None:
        """Refuse what the pipeline would ignore."""
        known = self._capabilities
        for name in params.given():
            if name in known.sampling_fields or name in ENGINE_FIELDS:
                continue
            hint = None
            if name == "guidance_scale" and "true_cfg_scale" in known.sampling_fields:
                hint = "This model isn't guidance-distilled; use true_cfg_scale instead."
            raise InvalidRequestError(
                f"{known.pipeline} takes no {name}",
                field=name,
                value=getattr(params, name),
                expected="one of " + ", ".join(sorted(known.sampling_fields)),
                hint=hint,
            )
        for name, value in params.extra_args.items():
            if name not in known.extra_args:
                raise unknown_field(name, known.extra_args, "extra_args", "extra argument")
            if name.endswith("attention_kwargs") and isinstance(value, dict) and "scale" in value:
                raise InvalidRequestError(
                    "an adapter's strength is not given to the pipeline",
                    field=f"extra_args.{name}.scale",
                    value=value["scale"],
                    expected="to be left out",
                    hint="Give the scale in lora_request.",
                )

    def _check_sampler(self, params: OmniDiffusionSamplingParams) -> None:
        """Refuse a sampler that doesn't suit the pipeline, and fields that it would ignore."""
        known, sampler = self._capabilities, params.sampler
        if sampler is None:
            return
        if sampler not in known.samplers:
            close = nearest(sampler, known.samplers)
            raise InvalidRequestError(
                f"{known.pipeline} has no such sampler",
                field="sampler",
                value=sampler,
                expected=_any_of(known.samplers),
                hint=f"Did you mean {close!r}?" if close else None,
            )
        for name, heeding in (
            ("sigmas", known.samplers_with_sigmas),
            ("eta", known.samplers_with_eta),
        ):
            given = getattr(params, name)
            if given and sampler not in heeding:
                raise InvalidRequestError(
                    f"the sampler {sampler} takes no {name}",
                    field=name,
                    value=given,
                    expected=f"no {name}, or as the sampler {_any_of(heeding)}",
                )

    def _check_inputs(self, request: DiffusionRequest) -> None:
        known = self._capabilities
        for name in request.multi_modal_data:
            if name not in known.inputs:
                raise unknown_field(name, known.inputs, "multi_modal_data", "input")
        for name in known.required_inputs - set(request.multi_modal_data):
            raise InvalidRequestError(
                f"{known.pipeline} needs an input picture",
                field=f"multi_modal_data.{name}",
                expected="a uint8 array of shape (height, width, 3 or 4)",
            )

    def _check_previews(self, request: DiffusionRequest) -> None:
        if request.preview_every is not None and not self._capabilities.makes_previews:
            raise InvalidRequestError(
                f"{self._capabilities.pipeline} makes no previews",
                field="preview_every",
                value=request.preview_every,
                expected="to be left out",
            )

    def _check_own_defaults(self, given: OmniDiffusionSamplingParams) -> None:
        """Refuse default parameters that no request could be admitted with."""
        params = given.with_defaults(self._capabilities.defaults | self._model_defaults)
        for error in self._unsuitable_sizes(params):
            if self._stage_defaults.keys() & set((error.field or "").split(" x ")):
                raise error

    def _unsuitable_sizes(
        self, params: OmniDiffusionSamplingParams
    ) -> Iterator[InvalidRequestError]:
        """Yield an error for everything that is too large, or no multiple of what it must be."""
        yield from beyond_limits(self._limits, self._arguments, params)
        multiple = self._capabilities.size_multiple
        for field in ("height", "width"):
            if (size := getattr(params, field)) is not None and size % multiple:
                near = _nearest_multiple(size, multiple)
                yield InvalidRequestError(
                    f"{field} does not suit the model",
                    field=field,
                    value=size,
                    expected=f"a multiple of {multiple}, such as {near}",
                )

    def _check_guidance(
        self, asked: OmniDiffusionSamplingParams, params: OmniDiffusionSamplingParams
    ) -> None:
        """Refuse guidance settings that pipelines with true_cfg_scale would ignore."""
        if "true_cfg_scale" not in self._capabilities.sampling_fields:
            return
        guided = (params.true_cfg_scale or 0) > 1
        if (asked.true_cfg_scale or 0) > 1 and params.negative_prompt is None:
            raise InvalidRequestError(
                "true_cfg_scale has no effect without a negative prompt",
                field="true_cfg_scale",
                value=asked.true_cfg_scale,
                expected="negative_prompt to be given as well",
                hint='A blank one (" ") is enough.',
            )
        if asked.negative_prompt is not None and not guided:
            raise InvalidRequestError(
                "negative_prompt has no effect without guidance",
                field="negative_prompt",
                value=asked.negative_prompt,
                expected="true_cfg_scale > 1 to be given as well",
            )


def _any_of(names: frozenset[str]) -> str:
    return "one of " + ", ".join(sorted(names)) if names else "none: the model's own is used"


def _check_sigmas(asked: OmniDiffusionSamplingParams) -> None:
    steps, sigmas = asked.num_inference_steps, asked.sigmas or ()
    if steps is not None and steps != len(sigmas):
        raise InvalidRequestError(
            "num_inference_steps and sigmas contradict each other",
            field="num_inference_steps",
            value=steps,
            expected=f"{len(sigmas)}, the number of sigmas, or left out",
        )


def _nearest_multiple(size: int, multiple: int) -> int:
    return max(multiple, round(size / multiple) * multiple)
