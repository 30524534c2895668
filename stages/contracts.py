"""The two contracts between the worker and a pipeline, checked from the class.

A hand-written pipeline is a class named by ``pipeline: "module:Class"`` that has ``load`` and
either ``forward`` (whole request batches) or the four methods of the stepwise contract, or both; it
need not inherit from anything. Every diffusers pipeline gets both contracts from the worker's
adapter. This module never imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

STEP_METHODS = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")


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


@dataclass(slots=True, eq=False, weakref_slot=True)
class StepRequestState:
    """One picture of one request between ``prepare_encode`` and ``post_decode``.

    A request with ``num_outputs_per_prompt = n`` has n states, one per picture. The pipeline owns
    every field but the first two; the worker reads ``num_steps``, ``step_index``, ``latents`` and
    ``timesteps``.

    Attributes:
        request: the request, with every default filled in.
        row: which of its pictures, from 0.
        num_steps: scheduler steps in all; set by ``prepare_encode``.
        step_index: scheduler steps done; advanced by ``step_scheduler``.
        latents: a tensor of shape (1, ...), on the pipeline's device.
        timesteps: a tensor of shape (num_steps,).
        scheduler: this picture's own scheduler.
        extra: whatever else the pipeline keeps: embeddings, guidance, a generator.
    """

    request: DiffusionRequest
    row: int = 0
    num_steps: int = 0
    step_index: int = 0
    latents: Any = None
    timesteps: Any = None
    scheduler: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def seed(self) -> int:
        """Picture i uses the request's seed + i."""
        return self.request.seed + self.row

    @property
    def denoised(self) -> bool:
        """Whether only ``post_decode`` is left."""
        return self.step_index >= self.num_steps


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What ``denoise_step`` works on: the rows of one forward, in the order of the states.

    Attributes:
        latents: the states' latents concatenated, of shape (len(states), ...); None if the states
            keep none.
        timesteps: the states' current timesteps, of shape (len(states),); None likewise.
    """

    latents: Any = None
    timesteps: Any = None


class StepPipeline(Protocol):
    """A pipeline that is stepped: one denoiser forward for all running pictures at a time.

    The class attribute ``supports_step_execution = True`` declares it; any other field of
    ``PipelineCapabilities`` may be declared under its own name. States that share a call have
    equal keys (size, frames, adapter, and what the pipeline doesn't declare per-request), but may
    be at different steps of different totals.
    """

    @classmethod
    def load(cls, context: LoadContext) -> StepPipeline:
        """Load the weights."""
        ...

    def prepare_encode(self, state: StepRequestState) -> None:
        """Encode the prompt and set up latents, timesteps and scheduler for one picture.

        All randomness must come from ``state.seed``.
        """
        ...

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        """Run the denoiser once for all states.

        Returns:
            A tensor of shape (len(states), ...) or a sequence with one entry per state.
        """
        ...

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        """Take one scheduler step: update ``state.latents`` and advance ``state.step_index``.

        ``noise_pred`` is the state's part of ``denoise_step``'s result, of shape (1, ...).
        """
        ...

    def post_decode(self, state: StepRequestState) -> Any:
        """Return the finished picture.

        Returns:
            A uint8 array of shape (height, width, 3 or 4), or (frames, height, width, 3 or 4) for a
            video or a picture in layers; floats in [0, 1] are converted. A sound is an array of
            floats of shape (channels, samples); the pipeline's ``sample_rate`` goes with it. With
            ``output_type="latent"``: a tensor.
        """
        ...


def missing_methods(cls: type[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in ``names`` that the class doesn't define as callables."""
    return tuple(name for name in names if not callable(getattr(cls, name, None)))


def check_contract(cls: type[Any], *, step_execution: bool) -> None:
    """Check a hand-written pipeline class before any weights are loaded.

    Args:
        cls: the class.
        step_execution: whether the stage is to step it.

    Raises:
        PipelineContractError: naming what is missing and the way out.
    """
    where = f"{cls.__module__}:{cls.__qualname__}"
    declares_steps = getattr(cls, "supports_step_execution", False)
    stepped = declares_steps or step_execution
    if missing := missing_methods(cls, ("load",) if stepped else ("load", "forward")):
        raise PipelineContractError(
            f"pipeline class {where} lacks {', '.join(missing)}",
            field="pipeline",
            value=cls.__qualname__,
            expected="a diffusers pipeline class, a class with load(context) and forward(batch), "
            f"or one with load, supports_step_execution = True and {', '.join(STEP_METHODS)}",
            hint="See the contracts in docs/pipelines.md.",
        )
    if not isinstance(inspect.getattr_static(cls, "load"), classmethod):
        raise PipelineContractError(
            f"{cls.__qualname__}.load must be a classmethod",
            field="pipeline",
            value=cls.__qualname__,
            expected="@classmethod def load(cls, context)",
        )
    for name in ("supports_request_batch", "supports_step_execution"):
        if not isinstance(flag := getattr(cls, name, False), bool):
            raise PipelineContractError(
                f"{cls.__qualname__}.{name} must be a bool",
                field="pipeline",
                value=repr(flag),
                expected="True or False",
            )
    missing_steps = missing_methods(cls, STEP_METHODS)
    if stepped and missing_steps:
        raise PipelineContractError(
            f"pipeline class {where} can't be stepped: it lacks {', '.join(missing_steps)}",
            field="step_execution" if step_execution else "supports_step_execution",
            value=cls.__qualname__,
            expected=f"a class with {', '.join(STEP_METHODS)}",
            hint="Add them (see the stepwise contract in docs/pipelines.md), or leave "
            + ("step_execution false." if step_execution else "supports_step_execution out."),
        )
    if step_execution and not declares_steps:
        raise PipelineContractError(
            f"pipeline class {where} does not declare that it can be stepped",
            field="step_execution",
            value=cls.__qualname__,
            expected="supports_step_execution = True on the class",
            hint="Declare it, or leave step_execution false.",
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
        _check_number(request, output)
    return results


def _check_number(request: DiffusionRequest, output: DiffusionOutput) -> None:
    """Check that there is one entry per output; a picture in layers is one, and so is a clip."""
    for name in ("images", "frames", "audio"):
        made = getattr(output, name)
        if made is not None and len(made) != request.num_outputs:
            raise PipelineContractError(
                "forward() made the wrong number of pictures or sounds for a request",
                field="forward",
                value=len(made),
                expected=f"{request.num_outputs}, the request's num_outputs_per_prompt",
            )
