"""Samplers that a request may choose: which suit a pipeline, and the scheduler of one call.

A sampler is a diffusers scheduler class with settings. It suits a model whose own scheduler is of
the same kind (noise prediction, flow matching or EDM), and a pipeline that calls its scheduler in a
way the class understands. A request gets a fresh scheduler made from the model's own: everything
that describes the model is carried over, everything that describes the sampling comes from here,
so that a name means the same for every model.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from omni_engine.protocol.errors import InvalidRequestError
from omni_engine.worker.sampler_table import SAMPLERS, Sampler, Space

_FACTS: Mapping[Space, tuple[str, ...]] = {
    Space.NOISE: (
        "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas",
        "prediction_type", "rescale_betas_zero_snr", "steps_offset", "clip_sample",
        "clip_sample_range", "thresholding", "dynamic_thresholding_ratio", "sample_max_value",
    ),
    Space.FLOW: (
        "num_train_timesteps", "use_dynamic_shifting", "time_shift_type", "shift_terminal",
    ),
    Space.EDM: (
        "num_train_timesteps", "prediction_type", "sigma_min", "sigma_max", "sigma_data",
        "sigma_schedule", "rho",
    ),
}  # fmt: skip
"""What a scheduler's configuration says of its model; defaults differ between the classes."""

_INDISPENSABLE = ("trained_betas", "rescale_betas_zero_snr", "use_dynamic_shifting",
                  "shift_terminal")  # fmt: skip
"""Facts that, where they hold, only a class that knows them can sample with."""

_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
"""Those that every class knows."""

_READ_BY_PIPELINES = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
"""Facts that flow-matching pipelines read from the configuration to compute their shift."""


@dataclass(frozen=True, slots=True)
class _FlowCall:
    """How a flow-matching pipeline calls ``set_timesteps`` beyond steps and device.

    Attributes:
        sigmas: it passes noise levels of its own: "array" or "list".
        mu: it passes the shift: "always", or "dynamic", where the model's shift is dynamic.
        heeds_flow_sigmas: it leaves the noise levels to schedulers with ``use_flow_sigmas``.
    """

    sigmas: str = ""
    mu: str = ""
    heeds_flow_sigmas: bool = False


FLOW_PIPELINES: Mapping[str, _FlowCall] = {
    "ChromaPipeline": _FlowCall(sigmas="array", mu="always"),
    "Flux2KleinPipeline": _FlowCall(sigmas="array", mu="always", heeds_flow_sigmas=True),
    "Flux2Pipeline": _FlowCall(sigmas="array", mu="always", heeds_flow_sigmas=True),
    "FluxKontextPipeline": _FlowCall(sigmas="array", mu="always"),
    "FluxPipeline": _FlowCall(sigmas="array", mu="always", heeds_flow_sigmas=True),
    "HunyuanVideoPipeline": _FlowCall(sigmas="array"),
    "Kandinsky5T2IPipeline": _FlowCall(),
    "LTXPipeline": _FlowCall(sigmas="array", mu="always"),
    "Lumina2Pipeline": _FlowCall(sigmas="array", mu="always"),
    "QwenImage21Pipeline": _FlowCall(sigmas="array", mu="always"),
    "QwenImageEditPipeline": _FlowCall(sigmas="array", mu="always"),
    "QwenImageEditPlusPipeline": _FlowCall(sigmas="array", mu="always"),
    "QwenImageLayeredPipeline": _FlowCall(sigmas="array", mu="always"),
    "QwenImagePipeline": _FlowCall(sigmas="array", mu="always"),
    "SanaPipeline": _FlowCall(),
    "StableDiffusion3Pipeline": _FlowCall(mu="dynamic"),
    "WanImageToVideoPipeline": _FlowCall(),
    "WanPipeline": _FlowCall(),
    "ZImagePipeline": _FlowCall(sigmas="list", mu="always"),
}
"""Pipelines declared for one flow-matching scheduler that were shown to work with others."""

_PARTICULAR = frozenset(
    {
        "DiTPipeline",
        "LattePipeline",
        "SemanticStableDiffusionPipeline",
        "StableDiffusionInstructPix2PixPipeline",
        "StableDiffusionParadigmsPipeline",
        "StableDiffusionSAGPipeline",
        "StableDiffusionXLInstructPix2PixPipeline",
        "TextToVideoZeroPipeline",
        "TextToVideoZeroSDXLPipeline",
        "UniDiffuserPipeline",
    }
)
"""Declared for any scheduler, but they compute with parts of it that not all of them have."""


def samplers_for(pipe: Any) -> frozenset[str]:
    """Return the names of the samplers that suit a loaded diffusers pipeline.

    None where it isn't known how the pipeline works with its scheduler.
    """
    own = _only_scheduler(pipe)
    space = None if own is None else _space_of(own)
    if space is None or not (space is Space.FLOW or _is_declared_for_any(type(pipe))):
        return frozenset()
    call = FLOW_PIPELINES.get(type(pipe).__name__)
    return frozenset(
        name
        for name, sampler in SAMPLERS.items()
        if sampler.space is space
        and _is_installed(sampler)
        and _knows_facts(sampler, own)
        and (space is not Space.FLOW or (call is not None and _understands(sampler, call, own)))
    )


def with_sampler(pipe: Any, sampler: str | None, seed: int) -> Any:
    """Return a fresh scheduler for one call, or None for the pipeline's own.

    Args:
        pipe: the pipeline; its scheduler is read, never changed.
        sampler: one of ``samplers_for(pipe)``, or None.
        seed: seeds the noise of schedulers that don't draw it from the call's generator.

    Raises:
        InvalidRequestError: if there is no sampler of this name.
    """
    if sampler is None:
        return None
    if sampler not in SAMPLERS:
        raise InvalidRequestError(
            "there is no such sampler",
            field="sampler",
            value=sampler,
            expected="one of " + ", ".join(sorted(SAMPLERS)),
        )
    made = copy.deepcopy(_template(sampler, pipe.scheduler))
    if hasattr(made, "noise_sampler_seed"):
        made.noise_sampler_seed = seed
    return made


_templates: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Schedulers to copy, by the model's own scheduler and name: making one can take a second."""


def _template(sampler: str, own: Any) -> Any:
    made = _templates.setdefault(own, {})
    if sampler not in made:
        made[sampler] = _make(SAMPLERS[sampler], own)
    return made[sampler]


def _make(sampler: Sampler, own: Any) -> Any:
    cls, config = _class_of(sampler), own.config
    given = {name: config[name] for name in _FACTS[sampler.space] if name in config}
    given.setdefault("clip_sample", False)  # what the model's own scheduler doesn't do either
    given |= {"shift": _shift(own), "flow_shift": _shift(own)}
    given |= sampler.settings
    takes = _parameters(cls)
    known = {name: config[name] for name in config if name in takes or name.startswith("_")}
    made = cls.from_config(known, **{name: given[name] for name in given if name in takes})
    if sampler.space is Space.FLOW:
        made.register_to_config(**{
            name: config[name]
            for name in _READ_BY_PIPELINES
            if name in config and name not in made.config
        })  # fmt: skip
    return made


def _class_of(sampler: Sampler) -> Any:
    return getattr(diffusers, sampler.scheduler)


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters


def _shift(own: Any) -> float:
    """Return the constant shift of a flow-matching scheduler; ``set_shift`` may have changed it."""
    return float(getattr(own, "shift", own.config.get("flow_shift", 1.0)))


def _only_scheduler(pipe: Any) -> Any:
    """Return a pipeline's scheduler; None if it has several, or is made of pipelines."""
    parts = pipe.components
    schedulers = [name for name, part in parts.items() if hasattr(part, "set_timesteps")]
    nested = any(hasattr(part, "register_modules") for part in parts.values())
    return parts["scheduler"] if schedulers == ["scheduler"] and not nested else None


def _space_of(own: Any) -> Space | None:
    """Return the space of the model that a scheduler belongs to; None for an unusual one."""
    name, config = type(own).__name__, own.config
    prediction = config.get("prediction_type")
    if name.startswith("FlowMatch"):
        known = name in _schedulers_of(Space.FLOW) and not config.get("invert_sigmas")
        return Space.FLOW if known else None
    if config.get("use_flow_sigmas"):
        known = name in _schedulers_of(Space.FLOW) and prediction == "flow_prediction"
        return Space.FLOW if known else None
    if prediction not in ("epsilon", "v_prediction"):
        return None
    if name in _schedulers_of(Space.EDM):
        return Space.EDM
    usual = (
        name in _schedulers_of(Space.NOISE)
        and config.get("variance_type") not in ("learned", "learned_range")
        and config.get("timestep_type", "discrete") == "discrete"
        and config.get("beta_schedule") in _BETA_SCHEDULES
        and config.get("sigma_min") is None
        and config.get("sigma_max") is None
    )
    return Space.NOISE if usual else None


def _schedulers_of(space: Space) -> set[str]:
    return {sampler.scheduler for sampler in SAMPLERS.values() if sampler.space is space}


def _is_declared_for_any(cls: type) -> bool:
    """Whether a pipeline class says that its scheduler may be any of diffusers' common ones."""
    declared = inspect.signature(cls.__init__).parameters.get("scheduler")  # type: ignore[misc]
    annotation = None if declared is None else declared.annotation
    name = getattr(annotation, "__name__", annotation)
    return name == "KarrasDiffusionSchedulers" and cls.__name__ not in _PARTICULAR


def _knows_facts(sampler: Sampler, own: Any) -> bool:
    takes = _parameters(_class_of(sampler))
    return all(name in takes or not own.config.get(name) for name in _INDISPENSABLE)


def _understands(sampler: Sampler, call: _FlowCall, own: Any) -> bool:
    """Whether a flow sampler's ``set_timesteps`` takes what the pipeline passes."""
    takes = inspect.signature(_class_of(sampler).set_timesteps).parameters
    dynamic = bool(own.config.get("use_dynamic_shifting"))
    if call.sigmas and not (call.heeds_flow_sigmas and sampler.settings.get("use_flow_sigmas")):
        computes_with_arrays = sampler.scheduler == "UniPCMultistepScheduler"
        if "sigmas" not in takes or (computes_with_arrays and call.sigmas == "list"):
            return False
    if call.mu == "always" or (call.mu == "dynamic" and dynamic):
        if "mu" not in takes:
            return False
        if sampler.scheduler == "DPMSolverMultistepScheduler":  # it asserts both
            return dynamic and own.config.get("time_shift_type", "exponential") == "exponential"
    return True


def _is_installed(sampler: Sampler) -> bool:
    """Whether diffusers has the class: it puts a placeholder for one that needs other packages."""
    cls = _class_of(sampler)
    return isinstance(cls, type) and issubclass(cls, SchedulerMixin)
