"""From a loaded pipeline to one that serves plans: certified, wrapped, described."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np

from omni_engine.protocol.errors import UnsupportedOptionError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import PipelineCapabilities, WorkerSpec
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.stages.families import family_of
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.adapter_library import AdapterLibrary
from omni_engine.worker.adapter_runtime import AdapterRuntime
from omni_engine.worker.certificates import (
    Certificate,
    CertificateStore,
    ListCallChoice,
    cache_folder,
)
from omni_engine.worker.certification import (
    CERTIFICATION_VERSION,
    certify,
    make_stepper,
    named_denoisers,
)
from omni_engine.worker.declared import declared_capabilities
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.link import EngineLink
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.mixing_certification import certify_mixing
from omni_engine.worker.model_identity import certificate_key
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.synthetic import RequestMaker, list_call_requests
from omni_engine.worker.views import is_exclusive, takes_adapters

logger = logging.getLogger(__name__)

_PRIVATE_WHEN_STEPPED = frozenset(
    {"guidance_scale", "guidance_scale_2", "true_cfg_scale", "num_inference_steps", "sigmas",
     "strength", "eta", "sampler"}
)  # fmt: skip
"""Each request takes its guidance and its steps in a call of its own."""

_LARGEST_PIXEL_DIFFERENCE = 3
"""Of uint8 pictures, between a list call and a wave at load; more is no rounding."""


def is_plain_diffusers(pipe: Any) -> bool:
    """Whether a pipeline is one of diffusers' kind and doesn't serve plans itself."""
    return isinstance(pipe, diffusers.DiffusionPipeline) and not hasattr(pipe, "forward")


def build_pipeline(
    pipe: Any,
    spec: WorkerSpec,
    aborts: AbortFlags,
    adapters: AdapterAccess | None = None,
    memory: MemoryCaps | None = None,
) -> tuple[Any, PipelineCapabilities]:
    """Return what serves plans, and what it can do.

    Args:
        pipe: a diffusers pipeline, or a hand-written one, which serves plans itself.
        spec: the worker's settings.
        aborts: consulted between steps.
        adapters: makes requests' adapters active; None if the pipeline takes none.
        memory: remembers how many rows a forward has room for.

    Raises:
        UnsupportedOptionError: if a setting can't take effect on the pipeline.
    """
    settings = spec.engine_args
    if not is_plain_diffusers(pipe):
        if settings["deterministic"]:
            raise UnsupportedOptionError(
                f"deterministic has no effect on {type(pipe).__name__}: its forwards are its own",
                field="deterministic",
                value=True,
                expected="false for a hand-written pipeline",
            )
        return pipe, declared_capabilities(pipe)
    store = certificate_store(pipe, spec)
    if (certificate := store.load()) is None:
        logger.info("trying out how requests can share forwards, once for this model ...")
        certificate = certified_anew(pipe, store)
    pipeline = wrap(pipe, spec, certificate.report, aborts, adapters, memory)
    mixes = pipeline.capabilities.mixes_adapters
    may_call_lists = not (settings["step_execution"] or settings["deterministic"] or mixes)
    family = family_of(type(pipe).__name__)
    if may_call_lists and certificate.report.fused and family.exact_list_call:
        if certificate.list_call is None:
            choice = _time_list_call(pipeline)
            certificate = dataclasses.replace(certificate, list_call=choice)
            store.save(certificate)
        _apply(certificate, pipeline)
    return pipeline, pipeline.capabilities


def start_adapters(pipe: Any, spec: WorkerSpec, link: EngineLink) -> AdapterRuntime | None:
    """Start what loads a pipeline's adapters; None if it takes none.

    Called before anything else wraps the pipeline's modules.
    """
    if not takes_adapters(pipe):
        return None
    settings = spec.engine_args
    runtime = AdapterRuntime(
        pipe,
        AdapterLibrary(pipe),
        max_loras=settings["max_loras"],
        max_cpu_loras=settings["max_cpu_loras"],
        exact_rows=settings["deterministic"],
        merge=settings["lora_merge"] == "auto",
        send=link.post,
        on_loaded=link.wake,
    )
    link.tell_of_adapters(runtime)
    return runtime


def certificate_store(pipe: Any, spec: WorkerSpec) -> CertificateStore:
    """Return where the certificate of a loaded diffusers pipeline is kept."""
    key = certificate_key(pipe, spec, CERTIFICATION_VERSION)
    return CertificateStore(key, frozenset(named_denoisers(pipe)), cache_folder())


def certified_anew(pipe: Any, store: CertificateStore) -> Certificate:
    """Certify a diffusers pipeline, and keep the finding."""
    report = certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))
    certificate = Certificate(report)
    store.save(certificate)
    return certificate


def wrap(
    pipe: Any,
    spec: WorkerSpec,
    report: FusionReport,
    aborts: AbortFlags,
    adapters: AdapterAccess | None = None,
    memory: MemoryCaps | None = None,
) -> DiffusersPipeline:
    """Return a diffusers pipeline under both contracts, sharing what was certified."""
    settings = spec.engine_args
    capabilities = dataclasses.replace(
        diffusers_capabilities(pipe, report), exclusive=is_exclusive(pipe)
    )
    if adapters is not None and settings["mixed_lora"]:
        logger.info("trying out whether requests under different adapters can share forwards ...")
        mixing = certify_mixing(pipe, report, capabilities)
        capabilities = dataclasses.replace(
            capabilities, mixes_adapters=mixing.exact, adapters_note=mixing.note
        )
    stepper = make_stepper(
        pipe,
        report,
        pad_calls_to=settings["max_num_seqs"] if settings["deterministic"] else None,
        prompt_cache_size=settings["prompt_cache_size"],
        adapters=adapters,
        mix_adapters=capabilities.mixes_adapters,
        memory=memory,
    )
    if settings["step_execution"]:
        private = capabilities.per_request | (_PRIVATE_WHEN_STEPPED & capabilities.sampling_fields)
        capabilities = dataclasses.replace(capabilities, per_request=private)
    return DiffusersPipeline(pipe, stepper, capabilities, aborts)


def _time_list_call(pipeline: DiffusersPipeline) -> ListCallChoice | None:
    """Choose a list call if it gives the same pictures and was faster just now.

    None if it failed: it isn't used then, and the next start tries again.
    """
    capabilities = pipeline.capabilities
    maker = RequestMaker(pipeline.pipe, capabilities, capabilities.required_inputs)
    batch = DiffusionRequestBatch(tuple(list_call_requests(maker)))
    for request_id in batch.request_ids:
        pipeline.stepper.adapters.assign(request_id, None)
    in_waves, wave_ms = _fastest(pipeline.run_wave, batch)
    pipeline.stepper.adapters.release(batch.request_ids)
    try:
        as_list, list_ms = _fastest(pipeline.run_list_call, batch)
    except Exception as error:  # noqa: BLE001  # boundary: warm-up; waves of steps serve as well
        logger.warning("a list call of %s failed: %s", capabilities.pipeline, error)
        return None
    difference = _largest_difference(in_waves, as_list)
    chosen = list_ms < wave_ms and difference <= _LARGEST_PIXEL_DIFFERENCE
    return ListCallChoice(chosen, list_ms, wave_ms)


def _apply(certificate: Certificate, pipeline: DiffusersPipeline) -> None:
    report, choice = certificate.report, certificate.list_call
    assert choice is not None
    pipeline.list_call = choice.chosen
    what = "one list call per batch" if choice.chosen else report.finding
    note = (
        f"{what} (at warm-up a list call took {choice.list_ms:.0f} ms, "
        f"stepping {choice.step_ms:.0f} ms; {report.provenance})"
    )
    pipeline.capabilities = dataclasses.replace(pipeline.capabilities, batching_note=note)


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
