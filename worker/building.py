"""From a loaded pipeline to one that serves plans: certified, wrapped, described."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import PipelineCapabilities, WorkerSpec
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.stages.families import family_of
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.certification import certify, make_stepper, synthetic_requests
from omni_engine.worker.declared import declared_capabilities
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities

logger = logging.getLogger(__name__)

_GUIDANCE = frozenset({"guidance_scale", "guidance_scale_2", "true_cfg_scale"})

_LARGEST_PIXEL_DIFFERENCE = 3
"""Of uint8 pictures, between a list call and a wave at load; more is no rounding."""


def build_pipeline(
    pipe: Any, spec: WorkerSpec, aborts: AbortFlags
) -> tuple[Any, PipelineCapabilities]:
    """Return what serves plans, and what it can do.

    Args:
        pipe: a diffusers pipeline, or a hand-written one, which serves plans itself.
        spec: the worker's settings.
        aborts: consulted between steps.
    """
    if not isinstance(pipe, diffusers.DiffusionPipeline) or hasattr(pipe, "forward"):
        return pipe, declared_capabilities(pipe)
    settings = spec.engine_args
    report = certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))
    stepper = make_stepper(
        pipe,
        report,
        pad_calls_to=settings["max_num_seqs"] if settings["deterministic"] else None,
        prompt_cache_size=settings["prompt_cache_size"],
    )
    capabilities = diffusers_capabilities(pipe, report)
    if settings["step_execution"]:  # each request takes its guidance in a call of its own
        private = capabilities.per_request | _GUIDANCE
        capabilities = dataclasses.replace(capabilities, per_request=private)
    pipeline = DiffusersPipeline(pipe, stepper, capabilities, aborts)
    may_call_lists = not settings["step_execution"] and not settings["deterministic"]
    if may_call_lists and report.fused and family_of(type(pipe).__name__).exact_list_call:
        _choose_list_call(pipeline)
    return pipeline, pipeline.capabilities


def _choose_list_call(pipeline: DiffusersPipeline) -> None:
    """Run batches as one list call if it gives the same pictures and was faster just now."""
    capabilities = pipeline.capabilities
    first = synthetic_requests(capabilities, capabilities.required_inputs)[0]
    batch = DiffusionRequestBatch(
        tuple(dataclasses.replace(first, request_id=f"warm-up {i}") for i in range(4))
    )
    in_waves, wave_ms = _fastest(pipeline.run_wave, batch)
    as_list, list_ms = _fastest(pipeline.run_list_call, batch)
    difference = _largest_difference(in_waves, as_list)
    pipeline.list_call = list_ms < wave_ms and difference <= _LARGEST_PIXEL_DIFFERENCE
    what = "one list call per batch" if pipeline.list_call else capabilities.batching_note
    note = f"{what} (at warm-up a list call took {list_ms:.0f} ms, stepping {wave_ms:.0f} ms)"
    pipeline.capabilities = dataclasses.replace(capabilities, batching_note=note)


def _fastest(
    run: Callable[[DiffusionRequestBatch], list[DiffusionOutput]], batch: DiffusionRequestBatch
) -> tuple[list[DiffusionOutput], float]:
    took: list[float] = []
    for _ in range(2):
        started = time.perf_counter()
        outputs = [output.raise_for_error() for output in run(batch)]
        took.append((time.perf_counter() - started) * 1000)
    return outputs, min(took)


def _largest_difference(one: list[DiffusionOutput], other: list[DiffusionOutput]) -> int:
    return max(
        int(np.abs(a.astype(int) - b.astype(int)).max())
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine.images or (), theirs.images or (), strict=True)
    )
