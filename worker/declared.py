"""Reads what a hand-written pipeline declares about itself, and checks it before it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from omni_engine.protocol import codec
from omni_engine.protocol.errors import InvalidRequestError, PipelineContractError
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.worker.views import takes_adapters


def declared_capabilities(pipeline: Any) -> PipelineCapabilities:
    """Read a pipeline's capabilities from attributes of the same names.

    Raises:
        PipelineContractError: naming the attribute that is of the wrong kind.
    """
    names = PipelineCapabilities.__dataclass_fields__
    found = {n: _checked(n, getattr(pipeline, n)) for n in names if hasattr(pipeline, n)}
    inferred = {
        "pipeline": type(pipeline).__name__,
        "supports_request_batch": _only_has_steps(pipeline) and not found.get("exclusive", False),
        "supports_lora": takes_adapters(pipeline),
        "makes_previews": found.get("supports_step_execution", False)
        and hasattr(pipeline, "preview"),
    }
    declared = {**inferred, **found}
    return PipelineCapabilities(**{"batching_note": _batching_note(pipeline, declared), **declared})


def has_forward(pipeline: Any) -> bool:
    """Whether a pipeline has a ``forward``; every torch module has one that only raises."""
    found = getattr(type(pipeline), "forward", None)
    return found is not None and found is not torch.nn.Module.forward


def _only_has_steps(pipeline: Any) -> bool:
    """Whether request batches, too, are run by its steps."""
    stepped = getattr(pipeline, "supports_step_execution", False)
    return bool(stepped) and not has_forward(pipeline)


def _batching_note(pipeline: Any, declared: dict[str, Any]) -> str:
    stepped = "stepped: the pipeline's own denoise_step"
    if declared.get("exclusive", False):
        return "request by request: the pipeline declares that it is exclusive"
    if _only_has_steps(pipeline):
        if declared["supports_request_batch"]:
            return stepped
        return f"{stepped}; request by request without step execution, as the pipeline declares"
    if not declared["supports_request_batch"]:
        note = "request by request: the pipeline does not declare supports_request_batch"
    else:
        note = "the pipeline's own forward(batch)"
    return f"{note}; {stepped}" if declared.get("supports_step_execution", False) else note


def _is_set_of_names(value: Any) -> bool:
    return isinstance(value, set | frozenset | list | tuple) and all(
        isinstance(item, str) for item in value
    )


def _is_defaults(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    try:
        codec.encode(OmniDiffusionSamplingParams.from_mapping(value).to_wire())
    except (InvalidRequestError, TypeError):
        return False
    return True


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "a string"),
    "int": (lambda value: type(value) is int and value >= 1, "an integer >= 1"),
    "frozenset[str]": (_is_set_of_names, "a set of names"),
    "dict[str, Any]": (_is_defaults, "a dict of sampling fields to acceptable values"),
}
_FIELD_KINDS = {f.name: str(f.type) for f in dataclasses.fields(PipelineCapabilities)}


def _checked(name: str, value: Any) -> Any:
    accepts, expected = _KINDS[_FIELD_KINDS[name]]
    if not accepts(value):
        raise PipelineContractError(
            f"the pipeline's attribute {name} is not acceptable",
            field=name,
            value=value,
            expected=expected,
        )
    return frozenset(value) if isinstance(value, set | list | tuple) else value
