"""A per-request view of a pipeline: its own attributes and schedulers, the shared modules.

Pipelines keep request-scoped values on ``self`` (guidance scale, interrupt flag, current timestep)
and a scheduler with a step index. A view gives each request its own, so that any number of
unmodified ``__call__``s can be under way at once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin

from omni_engine.worker.observed_scheduler import observe_steps


def make_view(pipe: Any, *, scheduler: Any = None, noise_seed: int | None = None) -> Any:
    """Return a shallow copy of a pipeline for one request.

    Args:
        pipe: the shared pipeline.
        scheduler: replaces the pipeline's own; owned by the view from here on.
        noise_seed: for schedulers that otherwise draw from a tree of noise without a seed.

    Schedulers and guiders are copied deeply, plain dicts shallowly, nested pipelines become views
    too; modules, tokenizers and processors are shared. The end-of-call hook does nothing: one
    request's end must not reset the hooks of the modules that the others are using.
    """
    view = object.__new__(type(pipe))
    view.__dict__ = {name: _own(name, value) for name, value in vars(pipe).items()}
    view.__dict__["maybe_free_model_hooks"] = _do_nothing
    if scheduler is not None:
        view.__dict__["scheduler"] = scheduler
    for name, value in view.__dict__.items():
        if _is_scheduler(name, value):
            observe_steps(value)
            if hasattr(value, "noise_sampler_seed") and value.noise_sampler_seed is None:
                value.noise_sampler_seed = noise_seed
    return view


def takes_adapters(pipe: Any) -> bool:
    """Whether diffusers can load LoRA adapters into a pipeline."""
    return hasattr(pipe, "load_lora_weights") and hasattr(pipe, "components")


def is_exclusive(pipe: Any) -> bool:
    """Whether a pipeline rewires shared modules during its call, so that it must run alone.

    Perturbed-attention pipelines replace attention processors for the length of a call and split
    the batch by position.
    """
    return "PAG" in type(pipe).__name__


def denoisers(pipe: Any) -> list[torch.nn.Module]:
    """Return the modules whose forwards requests share: diffusers models that are no autoencoder.

    Those of nested pipelines are included; text and image encoders are not diffusers models.
    """
    found: list[torch.nn.Module] = []
    for value in pipe.components.values():
        if hasattr(value, "components") and hasattr(value, "register_modules"):
            found += denoisers(value)
        elif isinstance(value, ModelMixin) and not hasattr(value, "decode"):
            found.append(value)
    return found


def text_encoders(pipe: Any) -> list[torch.nn.Module]:
    """Return the text encoders, those of nested pipelines included."""
    found: list[torch.nn.Module] = []
    for name, value in pipe.components.items():
        if hasattr(value, "components") and hasattr(value, "register_modules"):
            found += text_encoders(value)
        elif "text_encoder" in name and isinstance(value, torch.nn.Module):
            found.append(value)
    return found


def autoencoders(pipe: Any) -> list[torch.nn.Module]:
    """Return the autoencoders whose decodes may wait, those of nested pipelines included.

    One that a pipeline casts to float32 around its decode is left out: the others must not find
    it cast.
    """
    found: list[torch.nn.Module] = []
    for value in pipe.components.values():
        if hasattr(value, "components") and hasattr(value, "register_modules"):
            found += autoencoders(value)
        elif isinstance(value, ModelMixin) and hasattr(value, "decode") and not _is_upcast(value):
            found.append(value)
    return found


def _is_upcast(autoencoder: Any) -> bool:
    forced = getattr(autoencoder.config, "force_upcast", False)
    return bool(forced) and autoencoder.dtype == torch.float16


def _own(name: str, value: Any) -> Any:
    if _is_scheduler(name, value) or "guider" in name:
        return copy.deepcopy(value)
    if hasattr(value, "components") and hasattr(value, "register_modules"):
        return make_view(value)
    if isinstance(value, dict) and name != "_internal_dict":
        return dict(value)
    return value


def _is_scheduler(name: str, value: Any) -> bool:
    return "scheduler" in name and hasattr(value, "set_timesteps")


def _do_nothing() -> None:
    return None
