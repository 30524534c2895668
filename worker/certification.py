"""Certifies at load that a pipeline's requests may share forwards: fused must equal alone.

Synthetic requests of two aspect ratios with equal token counts, two prompt lengths and different
step counts are run alone and together. Beyond tolerance, or when they can't be run, the pipeline
runs unfused, which is always exact, and status says why; what rounding does in half precision is
measured. Denoisers that the table doesn't know are observed first; where that doesn't pass,
inference is tried.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.worker.call_rules import RULES, Kind
from omni_engine.worker.cooperative import CooperativeCall, CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport, Source
from omni_engine.worker.joining import tensors_in
from omni_engine.worker.observation import observed_rules
from omni_engine.worker.row_calls import CallBuilder, Row, made_in
from omni_engine.worker.synthetic import RequestMaker, certification_requests
from omni_engine.worker.views import autoencoders, denoisers, is_exclusive, text_encoders

logger = logging.getLogger(__name__)

CERTIFICATION_VERSION = 2
"""Part of a stored certificate's key."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 5e-2
"""Largest difference of pixels in [0, 1] between alone and fused, after two or three steps."""

_ROUNDING_MARGIN = 3.0
"""In half precision: how much more a result may differ than by denoiser outputs' last bits."""

UNFUSED = FusionReport(False, "")

ObservedRules = Mapping[str, Mapping[str, Kind]]
"""Kinds of arguments, by component and argument."""


def certify(pipe: Any, capabilities: PipelineCapabilities) -> FusionReport:
    """Run synthetic requests alone and together and compare.

    Args:
        pipe: a loaded diffusers pipeline.
        capabilities: what it takes.
    """
    if is_exclusive(pipe):
        return FusionReport(False, "request by request: it rewires its model during a call")
    if not denoisers(pipe):
        return FusionReport(False, "request by request: it has no denoiser to share")
    observed = _observe(pipe, capabilities)
    failure = ""
    for inputs in dict.fromkeys((capabilities.required_inputs, capabilities.inputs)):
        requests = certification_requests(RequestMaker(pipe, capabilities, inputs))
        try:
            alone, calls = run_requests(pipe, requests, UNFUSED)
        except Exception as error:  # noqa: BLE001  # boundary: certification; it still runs unfused
            failure = str(error) or type(error).__name__
            continue
        return _certified(pipe, requests, observed, alone, calls.forwards)
    logger.warning("%s can't be certified: %s", capabilities.pipeline, failure)
    return _failed(failure)


def make_stepper(pipe: Any, report: FusionReport, **options: Any) -> CooperativeStepper:
    """Return a stepper around a pipeline that shares what was certified.

    Args:
        pipe: a diffusers pipeline.
        report: what certification found.
        options: see ``CooperativeStepper``.
    """
    named = named_denoisers(pipe)
    return CooperativeStepper(
        pipe,
        denoisers(pipe),
        encoders=text_encoders(pipe) if report.encoders else (),
        autoencoders=autoencoders(pipe),
        fused=report.fused,
        observed={named[name]: rules for name, rules in report.observed.items()},
        **options,
    )


def named_denoisers(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return the modules whose forwards requests share, by component; "inner.unet" if nested."""
    shared = set(denoisers(pipe))
    found: dict[str, torch.nn.Module] = {}
    for name, value in pipe.components.items():
        if hasattr(value, "components") and hasattr(value, "register_modules"):
            found |= {f"{name}.{n}": module for n, module in named_denoisers(value).items()}
        elif isinstance(value, torch.nn.Module) and value in shared:
            found[name] = value
    return found


def tolerance_of(pipe: Any) -> float:
    """Return by how much results in [0, 1] may differ from those of plain diffusers."""
    parameters = (p for module in denoisers(pipe) for p in module.parameters())
    first = next(parameters, None)
    dtype = torch.float32 if first is None else first.dtype
    return TOLERANCES.get(dtype, HALF_PRECISION_TOLERANCE)


def as_floats(item: Any) -> npt.NDArray[np.float64]:
    """Return a picture, clip or waveform as floats, whole numbers from 0 to 255 as 0 to 1."""
    array = item.double().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)
    scale = 255 if np.issubdtype(array.dtype, np.integer) else 1
    return array.astype(np.float64) / scale


def result_arrays(result: Any) -> list[npt.NDArray[np.float64]]:
    """Return the pictures, clips or waveforms of what a pipeline returned.

    Raises:
        ModelError: if there are none in it.
    """
    return [as_floats(item) for item in made_in(result)]


def _observe(pipe: Any, capabilities: PipelineCapabilities) -> ObservedRules:
    found = observed_rules(pipe, denoisers(pipe), capabilities)
    return {n: found[module] for n, module in named_denoisers(pipe).items() if module in found}


def _certified(
    pipe: Any,
    requests: list[DiffusionRequest],
    observed: ObservedRules,
    alone: list[npt.NDArray[np.float64]],
    calls: int,
) -> FusionReport:
    """Compare with the observed rules; without them, if that doesn't pass."""
    report = UNFUSED
    for rules in (observed, {}) if observed else ({},):
        found = FusionReport(True, "", sources=_sources(pipe, rules), observed=rules)
        try:
            report = _compare(pipe, requests, found, alone, calls)
        except Exception as error:  # noqa: BLE001  # boundary: certification; it still runs unfused
            logger.warning("%s can't be certified: %s", type(pipe).__name__, error)
            report = _failed(str(error) or type(error).__name__)
        if report.fused:
            break
    return report


def _sources(pipe: Any, observed: ObservedRules) -> dict[str, Source]:
    def source(name: str, module: torch.nn.Module) -> Source:
        if type(module).__name__ in RULES:
            return "table"
        return "observed" if name in observed else "inferred"

    return {name: source(name, module) for name, module in named_denoisers(pipe).items()}


def _compare(
    pipe: Any,
    requests: list[DiffusionRequest],
    wanted: FusionReport,
    alone: list[npt.NDArray[np.float64]],
    calls: int,
) -> FusionReport:
    """Compare alone with together, at first with shared text encoders, then without."""
    report = wanted
    for encoders in (True, False):
        wanted = dataclasses.replace(wanted, encoders=encoders)
        together, stepper = run_requests(pipe, requests, wanted)
        if stepper.forwards == calls:
            return _refused(wanted, "it is not clear how its calls combine")
        apart = _differences(alone, together)
        allowed = [tolerance_of(pipe)] * len(requests)
        if max(apart) > allowed[0] == HALF_PRECISION_TOLERANCE:
            rounding = _rounding(pipe, requests, alone)
            allowed = [max(allowed[0], _ROUNDING_MARGIN * found) for found in rounding]
        wanted = dataclasses.replace(wanted, tolerance=statistics.median(allowed))
        report = _judge(apart, allowed, stepper, wanted)
        if report.fused:
            break
    return report


def _rounding(
    pipe: Any, requests: list[DiffusionRequest], alone: list[npt.NDArray[np.float64]]
) -> list[float]:
    """Return what the last bit of the denoiser's outputs changes in each request's result.

    Kernels round differently for other numbers of rows and for padding; in half precision, and
    with guidance, that shows.
    """
    generator = torch.Generator().manual_seed(0)

    def disturb(_module: Any, _args: Any, output: Any) -> None:
        for _, tensor in tensors_in(output):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator).to(tensor) * 2 - 1
                tensor.mul_(1 + noise * torch.finfo(tensor.dtype).eps)

    hooks = [module.register_forward_hook(disturb) for module in denoisers(pipe)]
    try:
        disturbed, _ = run_requests(pipe, requests, UNFUSED)
    finally:
        for hook in hooks:
            hook.remove()
    return [found if np.isfinite(found) else 0.0 for found in _differences(alone, disturbed)]


def _differences(
    one: list[npt.NDArray[np.float64]], other: list[npt.NDArray[np.float64]]
) -> list[float]:
    """Return the largest difference of each result; not a number stays that."""
    return [float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)]


def _judge(
    differences: list[float],
    allowed: list[float],
    stepper: CooperativeStepper,
    wanted: FusionReport,
) -> FusionReport:
    for difference, tolerance in zip(differences, allowed, strict=True):
        if not difference <= tolerance:  # NaN is no pass
            return _refused(
                wanted,
                f"sharing forwards changes pictures by {difference:.1e}, more than {tolerance:.0e}",
            )
    if stepper.fallbacks:
        # It may have been memory that was short just now: not to be remembered.
        return dataclasses.replace(_refused(wanted, "shared forwards fail"), certified_at=None)
    return dataclasses.replace(
        wanted,
        finding="requests share the denoiser's forwards, "
        f"fused differs from alone by {max(differences):.1e} at most",
        certified_at=_now(),
    )


def _refused(wanted: FusionReport, why: str) -> FusionReport:
    return dataclasses.replace(
        wanted, fused=False, finding=f"request by request: {why}", certified_at=_now()
    )


def _failed(why: str) -> FusionReport:
    return FusionReport(False, f"request by request: certification failed ({why})")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def run_requests(
    pipe: Any, requests: list[DiffusionRequest], report: FusionReport, **options: Any
) -> tuple[list[npt.NDArray[np.float64]], CooperativeStepper]:
    """Run requests under way together on a stepper of their own.

    Args:
        pipe: a diffusers pipeline that no other stepper wraps.
        requests: one picture of each is made.
        report: what may be shared.
        options: see ``CooperativeStepper``.

    Returns:
        One picture, clip or waveform per request, and the stepper, closed, for its counts.

    Raises:
        Exception: whatever the first request that failed raised.
    """
    builder = CallBuilder(pipe)
    stepper = make_stepper(pipe, report, **options)
    try:
        calls = [
            stepper.start(builder.single(Row(request, 0)), request.seed, request.request_id)
            for request in requests
        ]
        stepper.run()
    finally:
        stepper.close()
    return [_result(call) for call in calls], stepper


def _result(call: CooperativeCall) -> npt.NDArray[np.float64]:
    if call.error is not None:
        raise call.error
    return result_arrays(call.result)[0]
