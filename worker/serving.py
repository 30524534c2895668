"""What a worker's main thread does once its pipeline is ready: it runs plans until told to stop."""

from __future__ import annotations

from typing import Any

from omni_engine.protocol import plans
from omni_engine.protocol.plans import BatchPlan, PipelineCapabilities, StepPlan, WorkerSpec
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.declared import has_forward
from omni_engine.worker.link import WAKE, EngineLink
from omni_engine.worker.request_runner import RequestRunner
from omni_engine.worker.step_runner import StepRunner
from omni_engine.worker.wave import WavePipeline


def serve_batches(
    pipeline: Any,
    capabilities: PipelineCapabilities,
    adapters: AdapterAccess,
    spec: WorkerSpec,
    link: EngineLink,
    aborts: AbortFlags,
) -> None:
    """Run batch plans, one after the other."""
    if not has_forward(pipeline):
        pipeline = WavePipeline(pipeline, aborts.is_set, one_at_a_time=capabilities.exclusive)
    runner = RequestRunner(
        pipeline, adapters, aborts, spec.worker_id, lambda report: link.send(report.to_wire())
    )
    while (message := link.receive()) is not None and message["type"] != plans.STOP:
        if message["type"] == WAKE:
            continue
        plan = BatchPlan.from_wire(message)
        link.send(plans.outputs_message(plan.plan_id, runner.run(plan)))


def serve_steps(
    pipeline: Any,
    capabilities: PipelineCapabilities,
    adapters: AdapterAccess,
    spec: WorkerSpec,
    link: EngineLink,
    aborts: AbortFlags,
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
    )
    while True:
        while (message := link.receive(wait=not runner.has_turn)) is not None:
            if message["type"] == plans.STOP:
                return
            if message["type"] == WAKE:  # an adapter was loaded: a turn may go on
                continue
            runner.add(StepPlan.from_wire(message))
        link.send(runner.tick().to_wire())
