"""Requests between joining and leaving a step loop, and how much of them fits a tick."""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass, field
from typing import Any

from omni_engine.protocol.errors import OmniError, PipelineContractError, shorten
from omni_engine.protocol.outputs import OutputMetrics
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import StepRequestState
from omni_engine.worker.step_counts import StepCounts

_MAX_STEPS = 1 << 31


@dataclass(slots=True, eq=False)
class Picture:
    """One picture of a running request.

    What a pipeline writes into its state is read once after each of its methods, and checked.

    Attributes:
        request_id: the request.
        state: what the pipeline works on.
        step_index: scheduler steps done.
        num_steps: scheduler steps in all; 0 while that is not known.
        denoised: whether only its decode is left.
        prepared: whether it has been encoded.
        result: what it came to; None while it runs.
        ticks_without_step: forwards since its last scheduler step.
        preview_due: whether a preview waits to be made.
        previews: previews made.
        counts: forwards it took part in.
    """

    request_id: str
    state: StepRequestState
    step_index: int = 0
    num_steps: int = 0
    denoised: bool = False
    prepared: bool = False
    result: Any = None
    ticks_without_step: int = 0
    preview_due: bool = False
    previews: int = 0
    counts: StepCounts = field(default_factory=StepCounts)

    @property
    def denoising(self) -> bool:
        """Whether it needs the denoiser."""
        return self.prepared and self.result is None and not self.denoised

    @property
    def undecoded(self) -> bool:
        """Whether only its decode is left."""
        return self.prepared and self.result is None and self.denoised

    def note_progress(self) -> None:
        """Read how far its pipeline says it is.

        Raises:
            PipelineContractError: if that is no count of steps.
        """
        self.step_index = _count("step_index", self.state.step_index)
        self.num_steps = _count("num_steps", self.state.num_steps)
        self.denoised = bool(self.state.denoised)


def _count(name: str, value: Any) -> int:
    try:
        if 0 <= (count := operator.index(value)) < _MAX_STEPS:
            return count
    except TypeError:
        pass
    raise PipelineContractError(
        f"the pipeline set {name} to something that is no count of steps",
        field=f"StepRequestState.{name}",
        value=f"{type(value).__name__} {shorten(value)}",
        expected="a whole number, 0 or more",
    )


@dataclass(slots=True, eq=False)
class Resident:
    """A running request."""

    request: DiffusionRequest
    pictures: list[Picture]
    started: float
    error: OmniError | None = None

    @property
    def ended(self) -> bool:
        """Whether it can be answered."""
        return self.error is not None or all(p.result is not None for p in self.pictures)


class Pace:
    """How many items fit a time, from what items took so far."""

    def __init__(self) -> None:
        self._item_ms: float | None = None

    def fitting(self, budget_ms: float) -> int:
        """Return a number of items, at least 1."""
        if math.isinf(budget_ms):
            return 1 << 30
        return 1 if not self._item_ms else max(1, int(budget_ms / self._item_ms))

    def note(self, items: int, took_ms: float) -> None:
        """Count in what some items took."""
        each = took_ms / items
        self._item_ms = each if self._item_ms is None else 0.7 * self._item_ms + 0.3 * each


def metrics_of(resident: Resident) -> OutputMetrics:
    """Return how a request was run; batch sizes are those of its busiest picture."""
    counts = max(
        (getattr(p.state, "counts", None) or p.counts for p in resident.pictures),
        key=lambda counts: counts.forwards,
        default=StepCounts(),
    )
    return OutputMetrics(
        run_ms=(time.perf_counter() - resident.started) * 1000,
        num_steps=min((picture.step_index for picture in resident.pictures), default=0),
        num_forwards=counts.forwards,
        mean_batch_size=counts.mean,
        max_batch_size=max(1, counts.largest),
    )
