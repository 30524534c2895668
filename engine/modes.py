"""Which way a stage runs its requests, and how many together, as its pipeline allows it."""

from __future__ import annotations

import logging

from omni_engine.engine.adapter_room import AdapterRoom
from omni_engine.engine.batch_dispatch import BatchDispatch
from omni_engine.engine.dispatch import Dispatch, Floor
from omni_engine.engine.scheduler import SchedulerConfig
from omni_engine.engine.step_dispatch import StepDispatch
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.stages.config import EngineArgs

logger = logging.getLogger(__name__)


def make_dispatch(
    arguments: EngineArgs, capabilities: PipelineCapabilities | None, floor: Floor
) -> Dispatch:
    """Return what runs a stage's requests.

    Args:
        arguments: the stage's settings.
        capabilities: what its pipeline can do; None while that is not known.
        floor: the stage's requests and workers.
    """
    config = SchedulerConfig(
        max_num_seqs=effective_max_num_seqs(arguments, capabilities),
        max_batch_rows=arguments.max_batch_rows,
        max_batch_work=arguments.max_batch_work,
        request_batch_max_wait_ms=arguments.request_batch_max_wait_ms,
        policy=arguments.scheduling_policy,
        max_skip_ms=arguments.max_skip_ms,
        max_mixed_adapters=AdapterRoom.of(arguments, capabilities).mixed,
    )
    if not arguments.step_execution:
        return BatchDispatch(floor, config)
    groups = arguments.max_resident_groups if _can_share(arguments, capabilities) else 1
    return StepDispatch(floor, config, arguments.step_quantum, groups)


def effective_max_num_seqs(arguments: EngineArgs, capabilities: PipelineCapabilities | None) -> int:
    """Return how many requests run together at most."""
    return arguments.max_num_seqs if _can_share(arguments, capabilities) else 1


def warn_of_capacity(name: str, arguments: EngineArgs, capabilities: PipelineCapabilities) -> None:
    """Log why a stage runs fewer requests together than configured, if it does."""
    if effective_max_num_seqs(arguments, capabilities) != arguments.max_num_seqs:
        text = "stage %s: max_num_seqs = %d has no effect: %s"
        logger.warning(text, name, arguments.max_num_seqs, capabilities.batching_note)


def _can_share(arguments: EngineArgs, capabilities: PipelineCapabilities | None) -> bool:
    """Whether a worker can have several requests; in step mode they need not share forwards."""
    if capabilities is None:
        return True
    if arguments.step_execution:
        return capabilities.supports_step_execution and not capabilities.exclusive
    return capabilities.supports_request_batch
