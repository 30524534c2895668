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


def make_view(pipe: Any) -> Any:
    """Return a shallow copy of a pipeline for one request.

    Schedulers and guiders are copied deeply, plain dicts shallowly, nested pipelines become views
    too; modules, tokenizers and processors are shared. The end-of-call hook does nothing: one
    request's end must not reset the hooks of the modules that the others are using.
    """
    view = object.__new__(type(pipe))
    view.__dict__ = {name: _own(name, value) for name, value in vars(pipe).items()}
    view.__dict__["maybe_free_model_hooks"] = _do_nothing
    return view


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
