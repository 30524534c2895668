"""A request between its submission and its end, as the engine keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from omni_engine.engine.admission import AdmittedRequest
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest


class Listener(Protocol):
    """Where a request's life is reported to; one per request."""

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """The request began to wait or to run."""

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
        answered: whether its final output has left; an aborted one stays until its batch ends.
    """

    request: DiffusionRequest
    listener: Listener
    arrival: float
    admitted: AdmittedRequest | None = None
    started: float | None = None
    answered: bool = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def seed(self) -> int | None:
        """The seed; None if none was given and the request was never admitted."""
        source = self.request if self.admitted is None else self.admitted.request
        return source.sampling_params.seed

    def failed(self, error: OmniError) -> DiffusionOutput:
        """Return the output that ends the request with an error."""
        return DiffusionOutput.failed(self.request_id, error, self.seed)
