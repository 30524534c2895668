"""What a request gives back: pictures, clips, sounds or latents, with seed, adapters, metrics."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.errors import (
    MalformedMessageError,
    OmniError,
    PipelineContractError,
    error_from_wire,
    shorten,
)
from omni_engine.protocol.tensors import ITEM_SIZES, MAX_DIMENSIONS, TensorData


@dataclass(frozen=True, slots=True)
class AppliedLoRA:
    """An adapter that was really active: its name, content digest (SHA-256 hex) and scale."""

    name: str
    digest: str
    scale: float


@dataclass(slots=True)
class OutputMetrics:
    """How a request was run.

    Attributes:
        queue_ms: milliseconds from arrival at the engine to the start of its batch.
        run_ms: milliseconds its batch took on the worker.
        num_steps: denoising steps that ran.
        num_forwards: denoiser forwards it took part in.
        mean_batch_size: mean number of requests in those forwards.
        max_batch_size: largest number of requests in one of them.
        worker: name of the worker that ran it.
    """

    queue_ms: float = 0.0
    run_ms: float = 0.0
    num_steps: int = 0
    num_forwards: int = 0
    mean_batch_size: float = 0.0
    max_batch_size: int = 0
    worker: str = ""


@dataclass(slots=True)
class DiffusionOutput:
    """The result of one request.

    Attributes:
        request_id: the request it answers.
        images: uint8 arrays of shape (height, width, 3), one per output, or None; with a fourth
            channel where the model makes transparency.
        frames: uint8 arrays of shape (num_frames, height, width, 3 or 4), one per output, or None:
            videos, or the layers of a picture.
        latents: with ``output_type="latent"``: the raw latents, one row per output.
        audio: float32 arrays of shape (channels, samples), one per output, or None; full scale is
            -1 to 1.
        sample_rate: samples per second of ``audio``, or None.
        finished: False only for intermediate results.
        error: what went wrong, or None.
        aborted: whether the request was aborted.
        seed: the seed of output 0; output i used seed + i.
        applied_loras: the adapters that were active.
        metrics: how it was run.
    """

    request_id: str
    images: list[npt.NDArray[np.uint8]] | None = field(default=None, repr=False)
    frames: list[npt.NDArray[np.uint8]] | None = field(default=None, repr=False)
    latents: npt.NDArray[Any] | TensorData | None = field(default=None, repr=False)
    audio: list[npt.NDArray[np.float32]] | None = field(default=None, repr=False)
    sample_rate: int | None = None
    finished: bool = True
    error: OmniError | None = None
    aborted: bool = False
    seed: int | None = None
    applied_loras: list[AppliedLoRA] = field(default_factory=list)
    metrics: OutputMetrics = field(default_factory=OutputMetrics)

    @property
    def ok(self) -> bool:
        """Whether the request completed with a result."""
        return self.error is None and not self.aborted

    def raise_for_error(self) -> DiffusionOutput:
        """Return self, or raise the request's error.

        Raises:
            OmniError: the typed error this output carries.
        """
        if self.error is not None:
            raise self.error
        return self

    def to_wire(self) -> dict[str, Any]:
        """Return a dict of plain values and arrays, ready for the codec.

        Raises:
            PipelineContractError: if a field is not of its type; pipelines fill them in.
        """
        for name, fits, expected in _FIELD_TYPES:
            if not fits(value := getattr(self, name)):
                raise PipelineContractError(
                    f"the pipeline's output has unusable {name}",
                    field=f"DiffusionOutput.{name}",
                    value=shorten(value),
                    expected=expected,
                )
        return {
            "request_id": self.request_id,
            "images": self.images,
            "frames": self.frames,
            "audio": self.audio,
            "sample_rate": None if self.sample_rate is None else int(self.sample_rate),
            "latents": self.latents,
            "finished": self.finished,
            "error": None if self.error is None else self.error.to_wire(),
            "aborted": self.aborted,
            "seed": None if self.seed is None else int(self.seed),
            "applied_loras": [dataclasses.asdict(lora) for lora in self.applied_loras],
            "metrics": {
                name: kind(getattr(self.metrics, name)) for name, kind in _METRIC_TYPES.items()
            },
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> DiffusionOutput:
        """Rebuild an output from a decoded message.

        Raises:
            MalformedMessageError: if fields are missing or of the wrong shape.
        """
        try:
            return cls(
                request_id=wire["request_id"],
                images=wire["images"],
                frames=wire["frames"],
                audio=wire["audio"],
                sample_rate=wire["sample_rate"],
                latents=wire["latents"],
                finished=wire["finished"],
                error=None if wire["error"] is None else error_from_wire(wire["error"]),
                aborted=wire["aborted"],
                seed=wire["seed"],
                applied_loras=[AppliedLoRA(**lora) for lora in wire["applied_loras"]],
                metrics=OutputMetrics(**wire["metrics"]),
            )
        except (KeyError, TypeError) as error:
            raise MalformedMessageError(f"an output is malformed: {error}") from None

    @classmethod
    def failed(cls, request_id: str, error: OmniError, seed: int | None = None) -> DiffusionOutput:
        """Build the output of a request that ended with an error."""
        return cls(request_id, error=error, seed=seed, aborted=error.code == "aborted")


_METRIC_TYPES: dict[str, type[float] | type[int] | type[str]] = {
    "queue_ms": float,
    "run_ms": float,
    "num_steps": int,
    "num_forwards": int,
    "mean_batch_size": float,
    "max_batch_size": int,
    "worker": str,
}


_ACCEPTED: dict[type, type] = {float: numbers.Real, int: numbers.Integral, str: str}


def _are_pictures(value: object, dimensions: int) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, np.ndarray)
        and item.dtype == np.uint8
        and item.ndim == dimensions
        and item.shape[-1] in (3, 4)
        for item in value
    )


def _are_sounds(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, np.ndarray) and item.dtype == np.float32 and item.ndim == 2
        for item in value
    )


def _is_whole(value: object, lowest: int, end: int) -> bool:
    return isinstance(value, numbers.Integral) and lowest <= int(value) < end


def _is_tensor(value: object) -> bool:
    if isinstance(value, TensorData):
        return True
    return (
        isinstance(value, np.ndarray)
        and value.dtype.name in ITEM_SIZES
        and value.dtype == value.dtype.newbyteorder("<")
        and value.ndim <= MAX_DIMENSIONS
    )


def _are_metrics(value: object) -> bool:
    return isinstance(value, OutputMetrics) and all(
        isinstance(getattr(value, name), _ACCEPTED[kind]) for name, kind in _METRIC_TYPES.items()
    )


_FIELD_TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "images",
        lambda value: value is None or _are_pictures(value, 3),
        "None, or a list of uint8 arrays of shape (height, width, 3 or 4)",
    ),
    (
        "frames",
        lambda value: value is None or _are_pictures(value, 4),
        "None, or a list of uint8 arrays of shape (num_frames, height, width, 3 or 4)",
    ),
    (
        "audio",
        lambda value: value is None or _are_sounds(value),
        "None, or a list of float32 arrays of shape (channels, samples)",
    ),
    (
        "sample_rate",
        lambda value: value is None or _is_whole(value, 1, 2**31),
        "None or an integer >= 1",
    ),
    (
        "latents",
        lambda value: value is None or _is_tensor(value),
        "None, an array of numbers, or TensorData",
    ),
    ("finished", lambda value: isinstance(value, bool), "True or False"),
    ("aborted", lambda value: isinstance(value, bool), "True or False"),
    (
        "error",
        lambda value: value is None or isinstance(value, OmniError),
        "None or an OmniError",
    ),
    (
        "seed",
        lambda value: value is None or _is_whole(value, 0, 2**64),
        "None or an integer >= 0",
    ),
    ("metrics", _are_metrics, "OutputMetrics with numbers in it"),
)
"""(field, whether its value fits, what fits); what is not listed only the engine fills in."""
