"""Compares a model served by steps with the model run alone, for ``omni-engine parity``."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from omni_engine.protocol.plans import PipelineCapabilities, WorkerSpec
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import STEP_METHODS, missing_methods
from omni_engine.stages.families import family_of
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.building import certificate_store, certified_anew, is_plain_diffusers, wrap
from omni_engine.worker.certification import HALF_PRECISION_TOLERANCE, TOLERANCES
from omni_engine.worker.declared import declared_capabilities, has_forward
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.loading import load_pipeline, resolve_dtype
from omni_engine.worker.parity_runs import (
    Run,
    difference,
    fastest,
    run_alone,
    run_forward,
    run_list_call,
    run_steps,
)
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.synthetic import PROMPTS, RequestMaker

logger = logging.getLogger(__name__)

Verdict = Literal["reference", "equal", "differs", "fails"]

_STEPS = 4
_MIXED_STEPS = (3, 2, 4, 2, 5)
_MIXED_GUIDANCE = (4.0, 2.0, 6.0, 3.0, 5.0)
_MIXING = "stepping mixed requests that join one by one"
_ONE_LEVEL = 1.01 / 255
"""Pictures that were rounded to 8 bits may differ by one level where their floats barely do."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of running requests, compared with running them alone.

    Attributes:
        mode: its name.
        verdict: of the comparison.
        served: whether an engine runs requests this way: then it counts.
        difference: largest one, of full scale.
        calls: denoiser calls that the requests asked for; None if that can't be seen.
        forwards: forwards that ran for them.
        rows: rows of a forward, on average.
        time_ratio: its time as a part of the time alone.
        note: what else there is to say.
    """

    mode: str
    verdict: Verdict
    served: bool
    difference: float | None = None
    calls: int | None = None
    forwards: int | None = None
    rows: float | None = None
    time_ratio: float | None = None
    note: str = ""


def measure(spec: WorkerSpec, requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Load a model, run requests in every way, and return what differs, as plain values.

    Args:
        spec: what to load, and where to.
        requests: how many run together.
        tell: told what is done now.
    """
    tell("loading the model")
    pipe = load_pipeline(spec)
    dtype = resolve_dtype(spec.engine_args["dtype"], spec.device)
    tolerance = _tolerance(dtype)
    if is_plain_diffusers(pipe):
        tell("certifying")
        report = certified_anew(pipe, certificate_store(pipe, spec)).report
        tolerance = max(tolerance, report.tolerance or 0.0)
        capabilities = diffusers_capabilities(pipe, report)
        modes = _of_diffusers(pipe, spec, report, requests, tolerance, tell)
    else:
        capabilities, report = declared_capabilities(pipe), FusionReport(False, "")
        modes = _of_hand_written(pipe, capabilities, requests, tolerance, tell)
    return {
        "model": spec.model,
        "pipeline": capabilities.pipeline,
        "device": spec.device,
        "dtype": dtype,
        "tolerance": tolerance,
        "batching": report.note or capabilities.batching_note,
        "fused": report.fused,
        "rules": dict(report.sources),
        "modes": [dataclasses.asdict(mode) for mode in modes],
        "passed": all(mode.verdict in ("reference", "equal") for mode in modes if mode.served),
    }


def _tolerance(dtype: str) -> float:
    return TOLERANCES.get(getattr(torch, dtype), HALF_PRECISION_TOLERANCE)


# -- the ways to run a pipeline


def _of_diffusers(
    pipe: Any,
    spec: WorkerSpec,
    report: FusionReport,
    count: int,
    tolerance: float,
    tell: Callable[[str], None],
) -> list[Mode]:
    capabilities = diffusers_capabilities(pipe, report)
    tell("running requests one by one")
    maker = _working_maker(pipe, capabilities)
    plain, mixed = _plain(maker, count), _mixed(maker, count)
    alone, mixed_alone = (fastest(lambda r=r: run_alone(pipe, r)) for r in (plain, mixed))  # type: ignore[misc]

    tell("running one call with lists")
    used = family_of(type(pipe).__name__).exact_list_call
    as_list = _compared(
        "list call", alone, lambda: run_list_call(pipe, plain, alone.calls), tolerance, served=False
    )
    note = "used if it is faster" if used and as_list.verdict == "equal" else "not used"
    modes = [_reference(alone), dataclasses.replace(as_list, note=as_list.note or note)]

    def steps(requests: Sequence[DiffusionRequest], **options: Any) -> Run:
        wrapped = wrap(pipe, spec, report, AbortFlags())
        exclusive = wrapped.capabilities.exclusive
        try:
            return run_steps(wrapped, requests, one_at_a_time=exclusive, **options)
        finally:
            wrapped.stepper.close()

    tell("stepping requests together")
    modes.append(_compared("stepped", alone, lambda: steps(plain), tolerance))
    tell(_MIXING)
    modes.append(_compared("mixed", mixed_alone, lambda: steps(mixed, join_at=_join_at), tolerance))
    return modes


def _of_hand_written(
    pipe: Any,
    capabilities: PipelineCapabilities,
    count: int,
    tolerance: float,
    tell: Callable[[str], None],
) -> list[Mode]:
    maker = RequestMaker(pipe, capabilities, capabilities.required_inputs)
    size = {n: capabilities.defaults.get(n) for n in ("height", "width")}
    plain, mixed = _plain(maker, count, **size), _mixed(maker, count, **size)
    steps = capabilities.supports_step_execution and not missing_methods(type(pipe), STEP_METHODS)
    tell("running requests one by one")
    if steps:
        alone, mixed_alone = (fastest(lambda r=r: _one_by_one(pipe, r)) for r in (plain, mixed))  # type: ignore[misc]
    else:
        alone = fastest(lambda: run_forward(pipe, [[request] for request in plain]))
    modes = [_reference(alone)]
    if has_forward(pipe) and capabilities.supports_request_batch:
        tell("running a request batch")
        rounded = max(tolerance, _ONE_LEVEL)
        modes.append(_compared("batch", alone, lambda: run_forward(pipe, [plain]), rounded))
    if steps:
        tell("stepping requests together")
        only = capabilities.exclusive
        modes.append(
            _compared("stepped", alone, lambda: run_steps(pipe, plain, one_at_a_time=only),
                      tolerance)
        )  # fmt: skip
        tell(_MIXING)
        modes.append(
            _compared(
                "mixed",
                mixed_alone,
                lambda: run_steps(pipe, mixed, join_at=_join_at, one_at_a_time=only),
                tolerance,
            )
        )
    return modes


def _one_by_one(pipe: Any, requests: Sequence[DiffusionRequest]) -> Run:
    """Step every picture by itself."""
    total = Run(calls=0, forwards=0, rows=0)
    for request in requests:
        run = run_steps(pipe, [request], one_at_a_time=True)
        total.made |= run.made
        for name in ("calls", "forwards", "rows"):
            setattr(total, name, getattr(total, name) + getattr(run, name))
    return total


# -- requests


def _working_maker(pipe: Any, capabilities: PipelineCapabilities) -> RequestMaker:
    """Return what makes requests with the pictures that the pipeline needs: as few as it takes."""
    makers = [
        RequestMaker(pipe, capabilities, inputs)
        for inputs in dict.fromkeys((capabilities.required_inputs, capabilities.inputs))
    ]
    for maker in makers[:-1]:
        try:
            run_alone(pipe, [maker.request(PROMPTS[0], 0)])
        except Exception as error:  # noqa: BLE001  # boundary: the next maker's requests may run
            logger.info("requests without pictures can't be run: %s", error)
            continue
        return maker
    run_alone(pipe, [makers[-1].request(PROMPTS[0], 0)])  # also warms up
    return makers[-1]


def _plain(maker: RequestMaker, count: int, **size: Any) -> list[DiffusionRequest]:
    return [
        maker.request(PROMPTS[i % len(PROMPTS)], 100 * i, steps=_STEPS, **size)
        for i in range(count)
    ]


def _mixed(maker: RequestMaker, count: int, **size: Any) -> list[DiffusionRequest]:
    """Return requests of other steps and guidance each; the second makes two pictures."""
    return [
        maker.request(
            PROMPTS[i % len(PROMPTS)],
            100 * i + 50,
            steps=_MIXED_STEPS[i % len(_MIXED_STEPS)],
            guidance=_MIXED_GUIDANCE[i % len(_MIXED_GUIDANCE)],
            outputs=2 if i == 1 else 1,
            **size,
        )
        for i in range(count)
    ]


def _join_at(index: int) -> int:
    """The first two begin together, then one more joins at every tick."""
    return max(0, index - 1)


# -- judging


def _reference(alone: Run) -> Mode:
    return Mode("single", "reference", True, 0.0, alone.calls, alone.forwards, _mean_rows(alone), 1)


def _compared(
    mode: str, alone: Run, run: Callable[[], Run], tolerance: float, *, served: bool = True
) -> Mode:
    try:
        found = fastest(run)
        apart = difference(alone, found)
    except Exception as error:  # boundary: one mode; the report says what failed
        logger.info("%s failed", mode, exc_info=True)
        return Mode(mode, "fails", served, note=f"{type(error).__name__}: {error}")
    return Mode(
        mode,
        "equal" if apart <= tolerance else "differs",
        served,
        apart if math.isfinite(apart) else None,
        found.calls,
        found.forwards,
        _mean_rows(found),
        found.seconds / alone.seconds if alone.seconds else None,
        "" if math.isfinite(apart) else "values that are not numbers",
    )


def _mean_rows(run: Run) -> float | None:
    return run.rows / run.forwards if run.rows and run.forwards else None
