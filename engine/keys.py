"""The compatibility key: requests with equal keys may share a forward; computed at admission.

Everything that shapes the forward is in it, every ``extra_args`` entry included, unless the
pipeline declares a field private to a request. In step mode, how a request is stepped is private to
it, too. The worker groups again by the tensors it sees: a wrong key costs speed only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_engine.protocol.adapters import AdapterActivation, AdapterIdentity
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.tensors import TensorData

_NEVER_IN_KEY = frozenset({"seed", "lora_request", "extra_args"})
_ENGINE_DEFAULTS: Mapping[str, Hashable] = {"output_type": "np", "num_outputs_per_prompt": 1}
"""What a request that leaves these out gets: saying so makes no other request of it."""
_PRIVATE_IN_STEP_MODE = frozenset(
    {"num_inference_steps", "sigmas", "strength", "eta", "sampler", "num_outputs_per_prompt"}
)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What must be equal for two requests to share a batch, or a resident group in step mode.

    Attributes:
        fields: sampling fields and extra arguments with their values, sorted by name.
        layout: names, shapes and dtypes of the conditioning inputs.
        adapter: digests and canonical scales; None for the bare model, and for all requests where
            adapters are mixed.
    """

    fields: tuple[tuple[str, Hashable], ...]
    layout: tuple[tuple[str, Hashable], ...]
    adapter: AdapterIdentity | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.fields, self.layout, self.adapter)))

    def __hash__(self) -> int:
        """Return the hash computed once: the scheduler hashes a key at every step of a request."""
        return self._hash


def request_key(
    request: DiffusionRequest,
    capabilities: PipelineCapabilities,
    activation: AdapterActivation | None,
    *,
    step_execution: bool = False,
    mixed: bool = False,
) -> RequestKey:
    """Compute a request's key from its effective parameters (defaults filled in).

    Args:
        request: with every default filled in.
        capabilities: what its pipeline declares private to a request.
        activation: the adapters it runs under.
        step_execution: whether it will be stepped among requests at other steps.
        mixed: whether requests with different adapters may share a forward.
    """
    params, private = request.sampling_params, capabilities.per_request
    if step_execution:
        private |= _PRIVATE_IN_STEP_MODE
    given = {**_ENGINE_DEFAULTS, **params.given()}
    shared = {k: v for k, v in given.items() if k not in _NEVER_IN_KEY | private}
    if not (step_execution and "negative_prompt" in private):
        shared["negative_prompt?"] = params.negative_prompt is not None
    extra = {f"extra_args.{k}": v for k, v in params.extra_args.items() if k not in private}
    return RequestKey(
        fields=tuple(sorted((name, frozen(value)) for name, value in {**shared, **extra}.items())),
        layout=tuple(sorted((n, _layout(v)) for n, v in request.multi_modal_data.items())),
        adapter=None if mixed or activation is None else activation.identity,
    )


def frozen(value: Any) -> Hashable:
    """Return a hashable equal exactly for equal values of equal types; arrays by content."""
    if isinstance(value, Mapping):
        return ("map", tuple(sorted((name, frozen(item)) for name, item in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(frozen(item) for item in value))
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).digest()
        return ("array", value.dtype.name, value.shape, digest)
    if isinstance(value, TensorData):
        return ("array", value.dtype, value.shape, hashlib.sha256(value.data).digest())
    return (type(value).__name__, value)


def _layout(pictures: Any) -> Hashable:
    if isinstance(pictures, list):
        return tuple(_layout(picture) for picture in pictures)
    return (pictures.shape, pictures.dtype.name)
