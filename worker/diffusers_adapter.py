"""Gives any diffusers pipeline the request-batch contract.

A batch runs as one list call for families known to be exact that way, else by cooperative stepping
with shared forwards where that was certified at load, else row by row, which is always exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_engine.protocol.errors import ModelError, OmniError, RequestAbortedError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.stages.families import family_of
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import certify
from omni_engine.worker.cooperative import CooperativeCall, CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.row_calls import CallBuilder, Row, rows_of, unpack
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.tensors import tensor_to_wire, to_uint8
from omni_engine.worker.views import denoisers

_LIST_CALL_NOTE = "one list call per batch (this family is exact that way)"


class DiffusersRequestPipeline:
    """The request-batch contract around a diffusers pipeline.

    Args:
        pipe: a loaded pipeline; called unmodified.
        aborts: consulted between steps.
    """

    def __init__(self, pipe: Any, aborts: AbortFlags) -> None:
        self.pipe = pipe
        self._aborts = aborts
        self._builder = CallBuilder(pipe)
        self._list_call = family_of(type(pipe).__name__).exact_list_call
        self._capabilities = diffusers_capabilities(pipe, self._report(pipe))
        self.supports_request_batch = self._capabilities.supports_request_batch
        self._stepper = CooperativeStepper(pipe, denoisers(pipe), fused=self.supports_request_batch)

    def capabilities(self) -> PipelineCapabilities:
        """Describe the pipeline for admission and the compatibility key."""
        return self._capabilities

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run the batch; a request that fails or was aborted carries its error.

        Raises:
            RequestAbortedError: when every request of a list call was aborted.
        """
        rows = rows_of(batch.requests)
        if self._list_call:
            return self._run_list_call(rows, batch)
        return self._run_cooperatively(rows, batch)

    def _report(self, pipe: Any) -> FusionReport:
        if self._list_call:
            return FusionReport(True, _LIST_CALL_NOTE)
        return certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))

    # -- one list call

    def _run_list_call(
        self, rows: Sequence[Row], batch: DiffusionRequestBatch
    ) -> list[DiffusionOutput]:
        steps = _StepCounter(self._aborts, batch.request_ids)
        arguments = self._with_callback(self._builder.batch(rows), steps)
        before = self._stepper.direct_forwards
        torch.manual_seed(rows[0].seed)  # pipelines that draw from global state stay reproducible
        made = unpack(self.pipe(**arguments), latents=rows[0].wants_latents)
        if len(made) != len(rows):
            raise ModelError(f"the pipeline returned {len(made)} results for {len(rows)} rows")
        forwards = self._stepper.direct_forwards - before
        remaining = iter(made)
        return [
            _output(
                request,
                [next(remaining) for _ in range(request.num_outputs)],
                _metrics(steps.count, forwards, batch.num_reqs, batch.num_reqs),
            )
            for request in batch.requests
        ]

    # -- cooperative stepping

    def _run_cooperatively(
        self, rows: Sequence[Row], batch: DiffusionRequestBatch
    ) -> list[DiffusionOutput]:
        """Run rows together, or, where that was not certified, one after the other."""
        steps = {row: _StepCounter(self._aborts, ()) for row in rows}
        calls: dict[Row, CooperativeCall] = {}
        for row in rows:
            calls[row] = self._start(row, steps[row])
            if not self.supports_request_batch:
                self._run_to_end(calls)
        self._run_to_end(calls)
        return [
            self._collect(request, [row for row in rows if row.request is request], calls, steps)
            for request in batch.requests
        ]

    def _run_to_end(self, calls: dict[Row, CooperativeCall]) -> None:
        while self._stepper.live:
            self._stepper.tick()
            for row, call in calls.items():
                if self._aborts.is_set(row.request.request_id):
                    self._stepper.abort(call)

    def _start(self, row: Row, steps: _StepCounter) -> CooperativeCall:
        arguments = self._with_callback(self._builder.single(row), steps)
        return self._stepper.start(arguments, row.seed, row.request.request_id)

    def _collect(
        self,
        request: DiffusionRequest,
        rows: Sequence[Row],
        calls: dict[Row, CooperativeCall],
        steps: dict[Row, _StepCounter],
    ) -> DiffusionOutput:
        mine = [calls[row] for row in rows]
        counts = max((call.counts for call in mine), key=lambda counts: counts.forwards)
        mean = counts.shared_with / counts.forwards if counts.forwards else 1.0
        metrics = _metrics(steps[rows[0]].count, counts.forwards, mean, max(1, counts.largest))
        if (error := _first_error(mine)) is None:
            latents = rows[0].wants_latents
            made = [picture for call in mine for picture in unpack(call.result, latents=latents)]
            return _output(request, made, metrics)
        output = DiffusionOutput.failed(request.request_id, error, request.seed)
        output.metrics = metrics
        return output

    def _with_callback(self, arguments: dict[str, Any], steps: _StepCounter) -> dict[str, Any]:
        if "callback_on_step_end" in self._builder.parameters:
            arguments["callback_on_step_end"] = steps
        return arguments


class _StepCounter:
    """Counts a call's steps; ends it when all of its requests were aborted."""

    def __init__(self, aborts: AbortFlags, request_ids: Sequence[str]) -> None:
        self.count = 0
        self._aborts = aborts
        self._request_ids = request_ids

    def __call__(
        self, pipe: Any, step: int, timestep: Any, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Act as diffusers' ``callback_on_step_end``."""
        self.count += 1
        if self._request_ids and all(self._aborts.is_set(i) for i in self._request_ids):
            raise RequestAbortedError("the request was aborted")
        return state


def _first_error(calls: Sequence[CooperativeCall]) -> OmniError | None:
    for call in calls:
        if call.aborted:
            return RequestAbortedError("the request was aborted")
        if isinstance(call.error, OmniError):
            return call.error
        if call.error is not None:
            kind = type(call.error).__name__
            return ModelError(f"the pipeline failed: {kind}: {call.error}")
    return None


def _metrics(steps: int, forwards: int, mean: float, largest: int) -> OutputMetrics:
    return OutputMetrics(
        num_steps=steps, num_forwards=forwards, mean_batch_size=mean, max_batch_size=largest
    )


def _output(request: DiffusionRequest, made: list[Any], metrics: OutputMetrics) -> DiffusionOutput:
    output = DiffusionOutput(request.request_id, seed=request.seed, metrics=metrics)
    if isinstance(made[0], torch.Tensor):
        output.latents = tensor_to_wire(torch.stack(made))
    elif made[0].ndim == 4:
        output.frames = [to_uint8(clip) for clip in made]
    else:
        output.images = [to_uint8(picture) for picture in made]
    return output
