"""A pipeline under test, the requests it is tested with, and how results are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.tensors import TensorData
from omni_engine.worker.conformance_trial import Injection, Trial
from omni_engine.worker.declared import declared_capabilities

Outputs = Mapping[str, DiffusionOutput]
MakeRequest = Callable[[int], DiffusionRequest]

NUMBER = 6
"""Requests that the checks ask for."""


class Suite:
    """A pipeline under test and the requests it is tested with.

    Attributes:
        exclusive: whether it can't have two pictures under way.
        shares: whether requests are to share forwards.
    """

    def __init__(self, pipeline: Any, make_request: MakeRequest, tolerance: float) -> None:
        self.pipeline, self.tolerance = pipeline, tolerance
        self._make_request = make_request
        found = getattr(pipeline, "capabilities", None)
        adapted = isinstance(found, PipelineCapabilities)
        self.capabilities: PipelineCapabilities = (
            found if adapted else declared_capabilities(pipeline)  # type: ignore[assignment]
        )
        self.exclusive = self.capabilities.exclusive
        unfused = adapted and not self.capabilities.supports_request_batch
        self.shares = not self.exclusive and not unfused
        self._alone: dict[int, DiffusionOutput] = {}

    def request(self, index: int, **changes: Any) -> DiffusionRequest:
        """Return a request as a worker gets it, complete; changes are to its parameters."""
        made = self._make_request(index)
        params = made.sampling_params
        if params.seed is None:
            params = dataclasses.replace(params, seed=10 * index)
        params = dataclasses.replace(params.with_defaults(self.capabilities.defaults), **changes)
        return dataclasses.replace(made, request_id=f"request {index}", sampling_params=params)

    def requests(self) -> list[DiffusionRequest]:
        """Return requests that make one or two pictures each."""
        return [
            self.request(index, num_outputs_per_prompt=1 + index % 2) for index in range(NUMBER)
        ]

    def longest_first(self) -> list[DiffusionRequest]:
        """Return the same requests, those with the most steps first."""
        steps = {r.request_id: self.alone(i).metrics.num_steps
                 for i, r in enumerate(self.requests())}  # fmt: skip
        ordered = sorted(self.requests(), key=lambda r: steps[r.request_id], reverse=True)
        assert steps[ordered[0].request_id] >= 3, "make_request(i) must give one at least 3 steps"
        return ordered

    def alike(self) -> list[DiffusionRequest]:
        """Return requests that a request batch may hold: different in prompt and seed only."""
        one = self.request(0).sampling_params
        return [
            dataclasses.replace(request, sampling_params=dataclasses.replace(one, seed=index))
            for index, request in enumerate(self.requests())
        ]

    def trial(self, injection: Injection | None = None) -> Trial:
        """Return a fresh trial."""
        return Trial(self.pipeline, exclusive=self.exclusive, injection=injection)

    def run(self, requests: Iterable[DiffusionRequest]) -> Outputs:
        """Run requests that join at once."""
        return self.trial().run(requests)

    def run_one(self, request: DiffusionRequest) -> DiffusionOutput:
        """Run a request by itself; it must complete."""
        return self.run([request])[request.request_id].raise_for_error()

    def alone(self, index: int) -> DiffusionOutput:
        """Return what a request comes to without company."""
        if index not in self._alone:
            self._alone[index] = self.run_one(self.requests()[index])
        return self._alone[index]

    def assert_as_alone(self, outputs: Outputs) -> None:
        """Compare outputs of ``requests`` with those of the same requests alone."""
        for index, request in enumerate(self.requests()):
            if (output := outputs.get(request.request_id)) is not None:
                self.assert_same(output, self.alone(index), f"{request.request_id} with company")

    def assert_same(self, one: DiffusionOutput, other: DiffusionOutput, what: str) -> None:
        """Compare two outputs; both must have completed."""
        one.raise_for_error(), other.raise_for_error()
        difference = apart(one, other)
        assert difference <= self.tolerance, (
            f"{what} differs by {difference:.1e} of full scale, "
            f"more than the tolerance of {self.tolerance:.1e}"
        )


def pictures_of(output: DiffusionOutput) -> list[npt.NDArray[Any]]:
    """Return one array per picture of an output."""
    made: Any = output.images or output.frames or output.audio
    if made is None:
        made = output.latents
    return list(made.to_numpy() if isinstance(made, TensorData) else made)


def apart(one: DiffusionOutput, other: DiffusionOutput) -> float:
    """Return the largest difference of two outputs as a part of full scale."""
    pairs = zip(pictures_of(one), pictures_of(other), strict=True)
    return max(distance(mine, theirs) for mine, theirs in pairs)


def distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Return the largest difference of two arrays as a part of full scale; NaN is infinite."""
    if one.shape != other.shape:
        return float("inf")
    scale = 255.0 if one.dtype == np.uint8 else float(np.abs(other).max()) or 1.0
    difference = float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max()) / scale
    return difference if difference == difference else float("inf")
