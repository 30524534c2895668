"""Runs one batch plan: activates its adapter, runs the batch, answers for every request."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.errors import OmniError, RequestAbortedError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import BatchPlan, StepReport, StepState
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch, check_results
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import AdapterAccess, under_shared
from omni_engine.worker.failures import bare, log_failure, pipeline_error
from omni_engine.worker.finite import check_output
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.progress import main_thread
from omni_engine.worker.request_kinds import kind_of_request
from omni_engine.worker.retries import SharedRun
from omni_engine.worker.step_calls import error_of, result_of

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.05


class RequestRunner:
    """Runs batch plans on a pipeline that fulfils the request-batch contract.

    Args:
        pipeline: has ``forward(batch)``; its ``supports_request_batch`` decides the batch size.
        adapters: makes the requests' adapters active.
        aborts: requests aborted meanwhile.
        worker_id: reported in each output.
        report: told how far the requests are, at most every 50 ms but for previews.
        memory: remembers how many rows a forward of the pipeline's own has room for.
    """

    def __init__(
        self,
        pipeline: Any,
        adapters: AdapterAccess,
        aborts: AbortFlags,
        worker_id: str,
        report: Callable[[StepReport], None],
        memory: MemoryCaps | None = None,
    ) -> None:
        self._memory = memory or MemoryCaps()
        self._pipeline = pipeline
        self._reports_progress = "on_states" in inspect.signature(pipeline.forward).parameters
        self._report = report
        self._plan_id = 0
        self._last_report = 0.0
        self._batched = bool(getattr(pipeline, "supports_request_batch", False))
        self._adapters = adapters
        self._aborts = aborts
        self._worker_id = worker_id

    def run(self, plan: BatchPlan) -> list[DiffusionOutput]:
        """Run a plan; return exactly one output per request, in order, and never raise."""
        self._plan_id = plan.plan_id
        logger.info("plan %d: a batch of %d", plan.plan_id, len(plan.requests))
        logger.debug("plan %d: %s", plan.plan_id, [r.request_id for r in plan.requests])
        for request, activation in zip(plan.requests, plan.activations, strict=True):
            self._adapters.assign(request.request_id, activation)
        made = result_of(self._run_under_adapters, plan)
        if isinstance(made, BaseException):
            made = [self._failed(request, pipeline_error(made)) for request in plan.requests]
        for output in made:
            if isinstance(output.error, OmniError):  # a pipeline's own; other things are refused
                log_failure(output.request_id, bare(output.error))
        self._aborts.clear(request.request_id for request in plan.requests)
        self._adapters.release(request.request_id for request in plan.requests)
        outputs: list[DiffusionOutput] = made
        return outputs

    def _run_under_adapters(self, plan: BatchPlan) -> list[DiffusionOutput]:
        size = len(plan.requests) if self._batched else 1
        outputs: list[DiffusionOutput] = []
        with under_shared(self._adapters, plan.activations):
            for start in range(0, len(plan.requests), size):
                members = plan.requests[start : start + size]
                outputs += self._run_members(members, are_all=len(members) == len(plan.requests))
        for output in outputs:
            applied = self._adapters.applied(output.request_id) if output.error is None else []
            output.applied_loras = applied
        return outputs

    def _run_members(
        self, members: Sequence[DiffusionRequest], *, are_all: bool
    ) -> list[DiffusionOutput]:
        """Run requests together; if that fails, in smaller parts, so that only a culprit fails."""

        def attempt(part: Sequence[DiffusionRequest]) -> list[DiffusionOutput] | BaseException:
            outputs = self._attempt(part)
            if isinstance(outputs, BaseException) or (are_all and len(part) == len(members)):
                return outputs
            return [_on_its_own(output) for output in outputs]

        kind = kind_of_request(self._pipeline, members[0])
        run = SharedRun("a batch", kind, attempt, lambda r: r.num_outputs, self._memory)
        results = run.run(members)
        return [self._checked(*pair) for pair in zip(members, results, strict=True)]

    def _checked(
        self, request: DiffusionRequest, result: DiffusionOutput | BaseException
    ) -> DiffusionOutput:
        error = result if isinstance(result, BaseException) else error_of(check_output, result)
        if error is not None:
            return self._failed(request, pipeline_error(error))
        assert isinstance(result, DiffusionOutput)
        return result

    def _attempt(
        self, members: Sequence[DiffusionRequest]
    ) -> list[DiffusionOutput] | BaseException:
        """Run requests in one forward; return their outputs, or what was raised."""
        if len(members) == 1 and self._aborts.is_set(members[0].request_id):
            return RequestAbortedError("the request was aborted")
        outputs: list[DiffusionOutput] | BaseException = result_of(self._forward, members)
        if isinstance(outputs, RequestAbortedError):  # raised only when all of them were aborted
            return [self._failed(member, outputs) for member in members]
        return outputs

    def _forward(self, members: Sequence[DiffusionRequest]) -> list[DiffusionOutput]:
        batch = DiffusionRequestBatch(tuple(members))
        started, forwards = time.perf_counter(), main_thread.forwards
        progress = {"on_states": self._on_states} if self._reports_progress else {}
        outputs = check_results(batch, self._pipeline.forward(batch, **progress))
        run_ms = (time.perf_counter() - started) * 1000
        if main_thread.forwards == forwards:  # nothing of ours saw any: what the pipeline says
            main_thread.forwards += _forwards_told(outputs)
        for request, output in zip(members, outputs, strict=True):
            if isinstance(output.metrics, OutputMetrics):  # else the output is refused later
                self._complete(output.metrics, run_ms, len(members))
            output.seed = request.seed if output.seed is None else output.seed
        return outputs

    def _on_states(
        self, states: list[StepState], previews: dict[str, npt.NDArray[np.uint8]]
    ) -> None:
        now = time.monotonic()
        if previews or now - self._last_report >= _PROGRESS_INTERVAL_S:
            self._last_report = now
            report = StepReport(self._plan_id, states, previews=previews)
            report.forwards = main_thread.forwards
            self._report(report)

    def _complete(self, metrics: OutputMetrics, run_ms: float, batch_size: int) -> None:
        metrics.run_ms, metrics.worker = run_ms, self._worker_id
        if metrics.max_batch_size == 0:  # the pipeline did not say
            metrics.mean_batch_size = metrics.max_batch_size = batch_size

    def _failed(self, request: DiffusionRequest, error: OmniError) -> DiffusionOutput:
        output = DiffusionOutput.failed(request.request_id, error, request.seed)
        output.metrics.worker = self._worker_id
        return output


def _forwards_told(outputs: Sequence[DiffusionOutput]) -> int:
    """Return how many forwards a pipeline says that its batch took; they were shared."""
    metrics = [o.metrics for o in outputs if isinstance(o.metrics, OutputMetrics)]
    counts = [m.num_forwards for m in metrics if isinstance(m.num_forwards, int)]
    return max(counts, default=0)


def _on_its_own(output: DiffusionOutput) -> DiffusionOutput:
    """Copy an output's arrays: a pipeline may write its next result into the same ones."""
    for name in ("images", "frames", "audio"):
        if isinstance(made := getattr(output, name), list):
            copied = [np.copy(item) if isinstance(item, np.ndarray) else item for item in made]
            setattr(output, name, copied)
    if isinstance(output.latents, np.ndarray):
        output.latents = np.copy(output.latents)
    return output
