"""A request between its submission and its end, as the engine keeps it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omni_engine.engine.admission import AdmittedRequest
from omni_engine.engine.restarts import Death
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.outputs import AppliedLoRA, DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import LoRARequest

PROGRESS_INTERVAL_S = 0.1
"""Least time between two progress messages of a request that carry no news but the step."""

Preview = npt.NDArray[np.uint8]


class Listener(Protocol):
    """Where a request's life is reported to; one per request."""

    @property
    def label(self) -> str:
        """Its name in logs, in printable characters."""

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """The request began to wait or to run."""

    def on_progress(
        self, request_id: str, step: int, num_steps: int, preview: Preview | None
    ) -> None:
        """The request has done some of its steps."""

    def on_output(self, output: DiffusionOutput) -> None:
        """The request ended."""


@dataclass(slots=True)
class LiveRequest:
    """A request between its submission and its end.

    Attributes:
        request: as submitted.
        listener: who is told.
        arrival: seconds, monotonic.
        admitted: None while the stage still loads and can't judge it.
        started: seconds, monotonic; None while it waits.
        answered: whether its final output has left; an aborted one stays until its worker ends it.
        step_index: scheduler steps done.
        num_steps: scheduler steps in all; 0 while that is not known.
        run_steps: scheduler steps done since it was last started.
        told_step: the step that the listener heard of last; 0 before the first.
        told_at: when that was: seconds, monotonic.
        worker_id: the worker that runs it, or ran it last.
        first_death: that of a worker that ran it; it is not run again after a second one.
    """

    request: DiffusionRequest
    listener: Listener
    arrival: float
    admitted: AdmittedRequest | None = None
    started: float | None = None
    answered: bool = False
    step_index: int = 0
    num_steps: int = 0
    run_steps: int = 0
    told_step: int = 0
    told_at: float = 0.0
    worker_id: str | None = None
    first_death: Death | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def adapters_asked(self) -> tuple[LoRARequest, ...] | None:
        """The adapters that the request names; None: the stage's default."""
        return self.request.sampling_params.lora_requests

    @property
    def seed(self) -> int | None:
        """The seed; None if none was given and the request was never admitted."""
        source = self.request if self.admitted is None else self.admitted.request
        return source.sampling_params.seed

    def as_named(self, applied: list[AppliedLoRA]) -> list[AppliedLoRA]:
        """Return the adapters that were active under the names that the request used.

        A batch, or a worker's memory, shares contents; the names for them may differ.
        """
        activation = None if self.admitted is None else self.admitted.activation
        if activation is None:
            return applied
        names = {adapter.digest: adapter.name for adapter in activation.adapters}
        return [
            dataclasses.replace(lora, name=names.get(lora.digest, lora.name)) for lora in applied
        ]

    def failed(self, error: OmniError) -> DiffusionOutput:
        """Return the output that ends the request with an error."""
        return DiffusionOutput.failed(self.request_id, error, self.seed)

    @property
    def deadline(self) -> float | None:
        """When its time is over: seconds, monotonic; None: never."""
        timeout_s = self.request.timeout_s
        return None if timeout_s is None else self.arrival + timeout_s

    def start_over(self, death: Death) -> None:
        """Note that it waits again, because the worker that ran it died."""
        self.first_death, self.started, self.run_steps = death, None, 0
        self.listener.on_status(self.request_id, RequestStatus.WAITING)

    def advance(self, step_index: int, num_steps: int) -> None:
        """Note how far the request is."""
        self.step_index, self.num_steps = step_index, num_steps
        self.run_steps = max(self.run_steps, step_index)

    def tell_progress(self, preview: Preview | None, now: float) -> None:
        """Tell the listener how far the request is, unless it heard of a step just now.

        The first and the last step and every preview are always told. What is told never goes
        back, not even when a request is run again from its start.
        """
        step, news = self.step_index, self.step_index > self.told_step
        if self.answered or not self.num_steps or not (news or preview is not None):
            return
        important = preview is not None or self.told_step == 0 or step >= self.num_steps
        if important or now - self.told_at >= PROGRESS_INTERVAL_S:
            self.told_step, self.told_at = max(step, self.told_step), now
            self.listener.on_progress(self.request_id, self.told_step, self.num_steps, preview)

    def describe(self) -> dict[str, Any]:
        """Return how far the request is, for status."""
        return {
            "request_id": self.request_id,
            "step_index": self.step_index,
            "num_steps": self.num_steps,
        }
