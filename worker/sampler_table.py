"""The samplers by the names that users know: diffusers' scheduler classes with their settings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Space(enum.Enum):
    """What a model was trained to predict; samplers of another space make no picture."""

    NOISE = "noise"
    """Noise, or velocity, along a variance-preserving schedule of betas."""
    FLOW = "flow"
    """The flow from noise to data."""
    EDM = "EDM"
    """Preconditioned as in "Elucidating the Design Space of Diffusion-Based Generative Models"."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A scheduler class of diffusers, by name, with the settings that make it this sampler."""

    space: Space
    scheduler: str
    settings: Mapping[str, Any]


_EVEN = {
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "use_lu_lambdas": False,
    "use_flow_sigmas": False,
    "final_sigmas_type": "zero",
}
_KARRAS = {**_EVEN, "use_karras_sigmas": True}
_FLOW = {**_EVEN, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_2M = {"algorithm_type": "dpmsolver++", "solver_order": 2, "solver_type": "midpoint"}
_2M_SDE = {**_2M, "algorithm_type": "sde-dpmsolver++"}
_UNIPC = {"solver_order": 2, "solver_type": "bh2", "predict_x0": True}
_DEIS = {"algorithm_type": "deis", "solver_order": 2, "solver_type": "logrho"}


def _noise(scheduler: str, *settings: Mapping[str, Any]) -> Sampler:
    return Sampler(Space.NOISE, scheduler, {k: v for given in settings for k, v in given.items()})


def _flow(scheduler: str, *settings: Mapping[str, Any]) -> Sampler:
    return Sampler(Space.FLOW, scheduler, {k: v for given in settings for k, v in given.items()})


SAMPLERS: Mapping[str, Sampler] = {
    "ddim": _noise("DDIMScheduler"),
    "ddpm": _noise("DDPMScheduler", {"variance_type": "fixed_small"}),
    "pndm": _noise("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": _noise("LMSDiscreteScheduler", _EVEN),
    "lms_karras": _noise("LMSDiscreteScheduler", _KARRAS),
    "euler": _noise("EulerDiscreteScheduler", _EVEN),
    "euler_a": _noise("EulerAncestralDiscreteScheduler"),
    "heun": _noise("HeunDiscreteScheduler", _EVEN),
    "dpm2": _noise("KDPM2DiscreteScheduler", _EVEN),
    "dpm2_karras": _noise("KDPM2DiscreteScheduler", _KARRAS),
    "dpm2_a": _noise("KDPM2AncestralDiscreteScheduler", _EVEN),
    "dpm2_a_karras": _noise("KDPM2AncestralDiscreteScheduler", _KARRAS),
    "dpmpp_2m": _noise("DPMSolverMultistepScheduler", _2M, _EVEN),
    "dpmpp_2m_karras": _noise("DPMSolverMultistepScheduler", _2M, _KARRAS),
    "dpmpp_2m_sde": _noise("DPMSolverMultistepScheduler", _2M_SDE, _EVEN),
    "dpmpp_2m_sde_karras": _noise("DPMSolverMultistepScheduler", _2M_SDE, _KARRAS),
    "dpmpp_sde": _noise("DPMSolverSDEScheduler", _EVEN),
    "dpmpp_sde_karras": _noise("DPMSolverSDEScheduler", _KARRAS),
    "unipc": _noise("UniPCMultistepScheduler", _UNIPC, _EVEN),
    "deis": _noise("DEISMultistepScheduler", _DEIS, _EVEN),
    "lcm": _noise("LCMScheduler"),
    "tcd": _noise("TCDScheduler"),
    "flow_euler": _flow("FlowMatchEulerDiscreteScheduler", _EVEN, {"stochastic_sampling": False}),
    "flow_heun": _flow("FlowMatchHeunDiscreteScheduler"),
    "flow_lcm": _flow("FlowMatchLCMScheduler", _EVEN),
    "flow_dpmpp_2m": _flow("DPMSolverMultistepScheduler", _2M, _FLOW),
    "flow_unipc": _flow("UniPCMultistepScheduler", _UNIPC, _FLOW),
    "edm_euler": Sampler(Space.EDM, "EDMEulerScheduler", {"final_sigmas_type": "zero"}),
    "edm_dpmpp_2m": Sampler(
        Space.EDM, "EDMDPMSolverMultistepScheduler", {**_2M, "final_sigmas_type": "zero"}
    ),
}
"""By name. ``lms`` needs scipy and ``dpmpp_sde`` torchsde: without them they suit no pipeline."""

TAKE_SIGMAS = frozenset({"euler", "flow_euler", "flow_lcm"})
"""Samplers that a request may give noise levels to, for every pipeline they suit."""

TAKE_ETA = frozenset({"ddim", "tcd"})
"""Samplers that a request's ``eta`` has an effect on."""
