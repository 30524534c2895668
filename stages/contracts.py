"""The request-batch contract between the worker and a pipeline, checked from the class.

A hand-written pipeline is a class named by ``pipeline: "module:Class"`` that has ``load`` and
``forward``; it need not inherit from anything. Every other diffusers pipeline gets this contract
from the worker's adapter. This module never imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

REQUEST_METHODS = ("load", "forward")


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a pipeline's ``load`` receives.

    Attributes:
        model: local folder or hub id.
        device: torch device string, such as "cpu" or "cuda:0".
        dtype: torch dtype name, such as "float32" or "bfloat16".
        revision: hub revision, or None.
        variant: weights variant, or None.
    """

    model: str
    device: str
    dtype: str
    revision: str | None = None
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class DiffusionRequestBatch:
    """What a request-batch pipeline's ``forward()`` receives: compatible requests, in order."""

    requests: tuple[DiffusionRequest, ...]

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Ids, in order."""
        return tuple(request.request_id for request in self.requests)

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompts, in order."""
        return tuple(request.prompt for request in self.requests)

    @property
    def sampling_params_list(self) -> tuple[OmniDiffusionSamplingParams, ...]:
        """Sampling parameters, in order."""
        return tuple(request.sampling_params for request in self.requests)

    @property
    def sampling_params(self) -> OmniDiffusionSamplingParams:
        """The sampling parameters of the only request.

        Raises:
            ValueError: if the batch holds more than one.
        """
        (request,) = self.requests
        return request.sampling_params


class RequestPipeline(Protocol):
    """A pipeline that runs whole requests.

    Optional class attributes: ``supports_request_batch`` (default False: batches of one),
    and any field of ``PipelineCapabilities``, under its own name.
    """

    @classmethod
    def load(cls, context: LoadContext) -> RequestPipeline:
        """Load the weights."""
        ...

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run the batch; return exactly one output per request, in order."""
        ...


def missing_methods(cls: type[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in ``names`` that the class doesn't define as callables."""
    return tuple(name for name in names if not callable(getattr(cls, name, None)))


def check_request_contract(cls: type[Any]) -> None:
    """Check a hand-written pipeline class before any weights are loaded.

    Raises:
        PipelineContractError: naming what is missing and the way out.
    """
    if missing := missing_methods(cls, REQUEST_METHODS):
        raise PipelineContractError(
            f"pipeline class {cls.__module__}:{cls.__qualname__} lacks {', '.join(missing)}",
            field="pipeline",
            value=cls.__qualname__,
            expected="a diffusers pipeline class, or a class with load(context) and forward(batch)",
            hint="See the request-batch contract in docs/pipelines.md.",
        )
    if not isinstance(inspect.getattr_static(cls, "load"), classmethod):
        raise PipelineContractError(
            f"{cls.__qualname__}.load must be a classmethod",
            field="pipeline",
            value=cls.__qualname__,
            expected="@classmethod def load(cls, context)",
        )
    flag = getattr(cls, "supports_request_batch", False)
    if not isinstance(flag, bool):
        raise PipelineContractError(
            f"{cls.__qualname__}.supports_request_batch must be a bool",
            field="pipeline",
            value=repr(flag),
            expected="True or False",
        )


def check_results(batch: DiffusionRequestBatch, results: object) -> list[DiffusionOutput]:
    """Check what ``forward`` returned: one ``DiffusionOutput`` per request, in request order.

    Raises:
        PipelineContractError: if the count, a type or an id is wrong.
    """
    if not isinstance(results, list) or not all(isinstance(r, DiffusionOutput) for r in results):
        raise PipelineContractError(
            "forward() did not return a list of DiffusionOutput",
            field="forward",
            value=type(results).__name__,
            expected="list[DiffusionOutput]",
        )
    if len(results) != batch.num_reqs:
        raise PipelineContractError(
            "forward() returned the wrong number of outputs",
            field="forward",
            value=len(results),
            expected=f"exactly {batch.num_reqs}, one per request, in order",
        )
    if tuple(r.request_id for r in results) != batch.request_ids:
        raise PipelineContractError(
            "forward() returned outputs of other requests or in another order",
            field="forward",
            value=[r.request_id for r in results],
            expected="the requests' ids, in order",
        )
    for request, output in zip(batch.requests, results, strict=True):
        made = output.images if output.images is not None else output.frames
        if made is not None and len(made) != request.num_outputs:
            raise PipelineContractError(
                "forward() made the wrong number of pictures for a request",
                field="forward",
                value=len(made),
                expected=f"{request.num_outputs}, the request's num_outputs_per_prompt",
            )
    return results
