"""From what users pass as prompts to checked requests; pictures become arrays on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from omni_engine.protocol.errors import InvalidRequestError, OmniError
from omni_engine.protocol.fields import describe
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

Prompt = str | Mapping[str, Any]


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Return prompts as a list; a single one, a string or a dict, as a list of one."""
    single = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
    return [prompts] if single else list(prompts)


def build_requests(
    prompts: Sequence[Prompt],
    sampling_params: OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None,
    *,
    request_ids: Sequence[str | None] | None = None,
    model: str | None = None,
    detached: bool = False,
    preview_every: int | None = None,
    preview_max_side: int | None = None,
    timeout_s: float | None = None,
) -> list[DiffusionRequest | OmniError]:
    """Build one request per prompt; a bad one becomes its error, in its place.

    Raises:
        InvalidRequestError: if the number of sampling parameters doesn't fit that of prompts.
    """
    if isinstance(sampling_params, Iterable) and not isinstance(sampling_params, str | Mapping):
        params: Sequence[Any] = list(sampling_params)
    else:
        params = [sampling_params] * len(prompts)
    if len(params) != len(prompts):
        raise InvalidRequestError(
            "prompts and sampling_params differ in number",
            field="sampling_params",
            value=f"{len(params)} for {len(prompts)} prompts",
            expected="one for all prompts, or as many as prompts",
        )
    ids = request_ids if request_ids is not None else [None] * len(prompts)
    return [
        _build(
            prompt,
            one,
            request_id=request_id,
            model=model,
            detached=detached,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            timeout_s=timeout_s,
        )
        for prompt, one, request_id in zip(prompts, params, ids, strict=True)
    ]


def _build(prompt: Any, params: Any, **options: Any) -> DiffusionRequest | OmniError:
    if params is not None and not isinstance(params, OmniDiffusionSamplingParams):
        return InvalidRequestError(
            "sampling_params is not acceptable",
            field="sampling_params",
            value=describe(params),
            expected="OmniDiffusionSamplingParams or None",
        )
    try:
        return build_request(_with_arrays(prompt), params, **options)
    except OmniError as error:
        return error


def _with_arrays(prompt: Any) -> Any:
    if not isinstance(prompt, Mapping) or not isinstance(prompt.get("multi_modal_data"), Mapping):
        return prompt
    pictures = {name: _as_array(value) for name, value in prompt["multi_modal_data"].items()}
    return {**prompt, "multi_modal_data": pictures}


def _as_array(value: Any) -> Any:
    """Turn a PIL image into a uint8 array; anything else passes on to be checked."""
    if isinstance(value, list | tuple):
        return [_as_array(item) for item in value]
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        if value.mode == "L":
            return np.asarray(value)
        return np.asarray(value.convert("RGBA" if value.has_transparency_data else "RGB"))
    return value
