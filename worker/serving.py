"""What a worker's main thread does once its pipeline is ready: it runs plans until told to stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from omni_engine.protocol import codec, plans
from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import (
    BatchPlan,
    PipelineCapabilities,
    StepPlan,
    StepReport,
    WorkerSpec,
)
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.declared import has_forward
from omni_engine.worker.failures import log_failure, text_of
from omni_engine.worker.link import WAKE, EngineLink
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.progress import main_thread
from omni_engine.worker.request_runner import RequestRunner
from omni_engine.worker.step_calls import error_of
from omni_engine.worker.step_runner import StepRunner
from omni_engine.worker.wave import WavePipeline


def serve_batches(
    pipeline: Any,
    capabilities: PipelineCapabilities,
    adapters: AdapterAccess,
    spec: WorkerSpec,
    link: EngineLink,
    aborts: AbortFlags,
    memory: MemoryCaps,
) -> None:
    """Run batch plans, one after the other."""
    if not has_forward(pipeline):
        pipeline = WavePipeline(
            pipeline, aborts.is_set, one_at_a_time=capabilities.exclusive, memory=memory
        )
    runner = RequestRunner(
        pipeline,
        adapters,
        aborts,
        spec.worker_id,
        lambda report: link.send(report.to_wire()),
        memory,
    )
    while (message := link.receive()) is not None and message["type"] != plans.STOP:
        if message["type"] == WAKE:
            continue
        plan = BatchPlan.from_wire(message)
        outputs = runner.run(plan)
        message_of = partial(plans.outputs_message, plan.plan_id, forwards=main_thread.forwards)
        _send_outputs(link, message_of, outputs)


def serve_steps(
    pipeline: Any,
    capabilities: PipelineCapabilities,
    adapters: AdapterAccess,
    spec: WorkerSpec,
    link: EngineLink,
    aborts: AbortFlags,
    memory: MemoryCaps,
) -> None:
    """Run step plans; plans that come meanwhile are taken in before every tick."""
    runner = StepRunner(
        pipeline,
        adapters,
        aborts,
        spec.worker_id,
        max_stall_ms=spec.engine_args["max_stall_ms"],
        max_skip_ms=spec.engine_args["max_skip_ms"],
        one_at_a_time=capabilities.exclusive,
        memory=memory,
    )
    while True:
        while (message := link.receive(wait=not runner.has_turn)) is not None:
            if message["type"] == plans.STOP:
                return
            if message["type"] == WAKE:  # an adapter was loaded: a turn may go on
                continue
            runner.add(StepPlan.from_wire(message))
        report = runner.tick()
        _send_outputs(link, partial(_report_message, report), report.outputs)


def _report_message(report: StepReport, outputs: list[DiffusionOutput]) -> dict[str, Any]:
    report.outputs = outputs
    return report.to_wire()


def _send_outputs(
    link: EngineLink,
    message_of: Callable[[list[DiffusionOutput]], dict[str, Any]],
    outputs: list[DiffusionOutput],
) -> None:
    """Send outputs; one that can't be sent becomes its own request's error."""
    try:
        link.send(message_of(outputs))
    except Exception:  # noqa: BLE001  # boundary: what a pipeline put into its outputs may be anything
        link.send(message_of([_sendable(output) for output in outputs]))


def _sendable(output: DiffusionOutput) -> DiffusionOutput:
    error = error_of(lambda: codec.encode(plans.outputs_message(0, [output])))
    if error is None:
        return output
    failure = PipelineContractError(
        f"the pipeline's output can't be sent: {text_of(error)}", field="DiffusionOutput"
    )
    log_failure(output.request_id, failure)
    return DiffusionOutput.failed(output.request_id, failure, output.seed)
