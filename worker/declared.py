"""Reads what a hand-written pipeline declares about itself, and checks it before it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from omni_engine.protocol import codec
from omni_engine.protocol.errors import InvalidRequestError, PipelineContractError
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams


def declared_capabilities(pipeline: Any) -> PipelineCapabilities:
    """Read a pipeline's capabilities from attributes of the same names.

    Raises:
        PipelineContractError: naming the attribute that is of the wrong kind.
    """
    names = PipelineCapabilities.__dataclass_fields__
    found = {n: _checked(n, getattr(pipeline, n)) for n in names if hasattr(pipeline, n)}
    note = (
        "the pipeline's own forward(batch)"
        if found.get("supports_request_batch", False)
        else "request by request: the pipeline does not declare supports_request_batch"
    )
    inferred = {
        "pipeline": type(pipeline).__name__,
        "batching_note": note,
        "supports_lora": hasattr(pipeline, "load_lora_weights"),
    }
    return PipelineCapabilities(**{**inferred, **found})


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
