"""Reads a diffusers pipeline's signature: which parameters it takes, with which defaults."""

from __future__ import annotations

import inspect
from typing import Any

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import ENGINE_FIELDS, SAMPLING_FIELDS
from omni_engine.stages.families import family_of
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.row_calls import picture_channels
from omni_engine.worker.sampler_table import TAKE_ETA, TAKE_SIGMAS
from omni_engine.worker.samplers import samplers_for
from omni_engine.worker.views import takes_adapters

_SET_BY_ENGINE = frozenset(
    {
        "self",
        "prompt",
        "generator",
        "output_type",
        "return_dict",
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        "callback",
        "callback_steps",
        "image",
        "mask_image",
        "control_image",
        "latents",
        "eta",
        "args",
        "kwargs",
        "timesteps",
    }
)
"""Call parameters that can't be given through ``extra_args``."""

_PER_REQUEST = frozenset({"seed", "num_outputs_per_prompt", "negative_prompt"})
_INPUTS = ("image", "mask_image", "control_image")


def diffusers_capabilities(pipe: Any, batching: FusionReport) -> PipelineCapabilities:
    """Describe a loaded diffusers pipeline.

    Args:
        pipe: the pipeline.
        batching: whether requests share forwards.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    fields = (SAMPLING_FIELDS & set(parameters)) | ENGINE_FIELDS
    if len(samplers := samplers_for(pipe)) > 1:
        fields |= {"sampler"}
    else:
        samplers = frozenset()
    if takes_adapters(pipe):
        fields |= {"lora_request"}
    if _ignores_guidance_scale(pipe, fields):
        fields -= {"guidance_scale"}
    inputs = [name for name in _INPUTS if name in parameters]
    required = [name for name in inputs if _is_required(name, parameters)]
    return PipelineCapabilities(
        pipeline=type(pipe).__name__,
        supports_request_batch=batching.fused,
        supports_step_execution=True,
        batching_note=batching.note,
        sampling_fields=frozenset(fields),
        extra_args=frozenset(filter(_is_extra, parameters)),
        per_request=_per_request(pipe),
        inputs=frozenset(inputs),
        required_inputs=frozenset(required),
        defaults=_defaults(pipe, parameters, fields),
        size_multiple=size_multiple(pipe),
        supports_lora="lora_request" in fields,
        makes_video="num_frames" in parameters,
        makes_transparency=picture_channels(pipe) == 4,
        makes_previews=True,
        samplers=samplers,
        samplers_with_sigmas=samplers & TAKE_SIGMAS,
        samplers_with_eta=samplers & TAKE_ETA,
    )


def _per_request(pipe: Any) -> frozenset[str]:
    """A list call has one scheduler for all of its requests; stepped calls have their own."""
    one_scheduler = family_of(type(pipe).__name__).exact_list_call
    return _PER_REQUEST if one_scheduler else _PER_REQUEST | {"sampler"}


def size_multiple(pipe: Any) -> int:
    """Return what height and width must be a multiple of, in pixels; 1 when nothing is known."""
    for name in ("image_processor", "video_processor"):
        config = getattr(getattr(pipe, name, None), "config", None)
        if config is not None and getattr(config, "vae_scale_factor", None):
            return int(config.vae_scale_factor)
    return 1


def _is_required(name: str, parameters: Any) -> bool:
    """Image-to-image and inpainting pipelines default their pictures to None, but can't do without.

    They are known by ``strength``, which makes no sense without a picture to start from.
    """
    starts_from_picture = "strength" in parameters and name in ("image", "mask_image")
    return starts_from_picture or parameters[name].default is inspect.Parameter.empty


def _is_extra(name: str) -> bool:
    """Whether ``extra_args`` may give a call parameter; embeddings would stand for prompts."""
    set_here = SAMPLING_FIELDS | _SET_BY_ENGINE
    return name not in set_here and not name.endswith(("_embeds", "_embeds_mask"))


def _ignores_guidance_scale(pipe: Any, fields: frozenset[str] | set[str]) -> bool:
    """Pipelines with true_cfg_scale use guidance_scale only if the model was distilled with it."""
    config = getattr(getattr(pipe, "transformer", None), "config", None)
    return "true_cfg_scale" in fields and getattr(config, "guidance_embeds", True) is False


def _defaults(pipe: Any, parameters: Any, fields: frozenset[str] | set[str]) -> dict[str, Any]:
    """Return the pipeline's own defaults of the sampling fields it takes."""
    found = {
        name: parameters[name].default
        for name in (fields & set(parameters)) - ENGINE_FIELDS
        if isinstance(parameters[name].default, int | float | str)
    }
    if {"height", "width"} <= fields and not {"height", "width"} <= set(found):
        found |= _default_size(pipe)
    found.pop("negative_prompt", None)
    return found


def _default_size(pipe: Any) -> dict[str, int]:
    size = getattr(pipe, "default_sample_size", None)
    if not isinstance(size, int):
        denoiser = getattr(pipe, "unet", None) or getattr(pipe, "transformer", None)
        size = getattr(getattr(denoiser, "config", None), "sample_size", None)
    factor = getattr(pipe, "vae_scale_factor", None)
    if not isinstance(size, int) or not isinstance(factor, int):
        return {}
    return {"height": size * factor, "width": size * factor}
