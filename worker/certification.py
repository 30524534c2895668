"""Certifies at load that a pipeline's requests may share forwards: fused must equal alone.

Synthetic requests of two aspect ratios with equal token counts, two prompt lengths and different
step counts are run alone and together. Beyond tolerance, or when they can't be run, the pipeline
runs unfused, which is always exact, and status says why.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.worker.cooperative import CooperativeCall, CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.row_calls import CallBuilder, Row, unpack
from omni_engine.worker.views import autoencoders, denoisers, is_exclusive, text_encoders

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
HALF_PRECISION_TOLERANCE = 5e-2
"""Largest difference of pixels in [0, 1] between alone and fused, after two or three steps."""

_PROMPTS = (
    "a cat",
    "a small red house beside a lake, with mountains behind it, in the morning",
    "a dog",
)


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
    failure = ""
    for inputs in dict.fromkeys((capabilities.required_inputs, capabilities.inputs)):
        try:
            return _compare(pipe, synthetic_requests(capabilities, inputs))
        except Exception as error:  # noqa: BLE001  # boundary: certification; it still runs unfused
            failure = str(error)
    logger.warning("%s can't be certified: %s", capabilities.pipeline, failure)
    return FusionReport(False, f"request by request: certification failed ({failure})")


def make_stepper(pipe: Any, report: FusionReport, **options: Any) -> CooperativeStepper:
    """Return a stepper around a pipeline that shares what was certified.

    Args:
        pipe: a diffusers pipeline.
        report: what certification found.
        options: see ``CooperativeStepper``.
    """
    return CooperativeStepper(
        pipe,
        denoisers(pipe),
        encoders=text_encoders(pipe) if report.encoders else (),
        autoencoders=autoencoders(pipe),
        fused=report.fused,
        **options,
    )


def _compare(pipe: Any, requests: list[DiffusionRequest]) -> FusionReport:
    """Compare alone with together, at first with shared text encoders, then without."""
    alone, unfused = _pictures(pipe, requests, FusionReport(False, ""))
    dtype = next(denoisers(pipe)[0].parameters()).dtype
    report = FusionReport(False, "")
    for encoders in (True, False):
        together, stepper = _pictures(pipe, requests, FusionReport(True, "", encoders=encoders))
        if stepper.forwards == unfused.forwards:
            note = "request by request: it is not clear how its calls combine"
            return FusionReport(False, note, encoders=encoders)
        report = _judge(alone, together, stepper, dtype, encoders=encoders)
        if report.fused:
            break
    return report


def synthetic_requests(
    capabilities: PipelineCapabilities, inputs: frozenset[str]
) -> list[DiffusionRequest]:
    """Return requests that would show wrong sharing: two shapes, two lengths, mixed steps.

    The first and the last have prompts of one length: they share even where none can be padded.

    Args:
        capabilities: what the pipeline takes.
        inputs: the pictures to give; many pipelines need some that their signature calls optional.
    """
    long, short = 16 * capabilities.size_multiple, 8 * capabilities.size_multiple
    plan = [(long, short, 0, 3), (short, long, 1, 2), (long, short, 1, 2), (long, short, 2, 2)]
    return [
        _synthetic(capabilities, inputs, height, width, _PROMPTS[prompt], steps, seed)
        for seed, (height, width, prompt, steps) in enumerate(plan)
    ]


def _synthetic(
    capabilities: PipelineCapabilities,
    inputs: frozenset[str],
    height: int,
    width: int,
    prompt: str,
    steps: int,
    seed: int,
) -> DiffusionRequest:
    wanted = {
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "num_frames": 9,
        "strength": 0.9,  # a pipeline's own may leave no step of two or three
    }
    fields: dict[str, Any] = {
        n: value for n, value in wanted.items() if n in capabilities.sampling_fields
    }
    if "true_cfg_scale" in capabilities.sampling_fields:
        fields |= {"negative_prompt": " "}
    defaults = {n: v for n, v in capabilities.defaults.items() if n not in ("height", "width")}
    params = OmniDiffusionSamplingParams(**fields, seed=seed).with_defaults(defaults)
    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return build_request(prompt, params, multi_modal_data=dict.fromkeys(inputs, picture))


def _pictures(
    pipe: Any, requests: list[DiffusionRequest], report: FusionReport
) -> tuple[list[Any], CooperativeStepper]:
    builder = CallBuilder(pipe)
    stepper = make_stepper(pipe, report)
    try:
        calls = [
            stepper.start(builder.single(Row(request, 0)), request.seed, request.request_id)
            for request in requests
        ]
        stepper.run()
    finally:
        stepper.close()
    return [_picture(call) for call in calls], stepper


def _picture(call: CooperativeCall) -> Any:
    if call.error is not None:
        raise call.error
    return unpack(call.result, latents=False)[0].astype(np.float64)


def _judge(
    alone: list[Any],
    together: list[Any],
    stepper: CooperativeStepper,
    dtype: torch.dtype,
    *,
    encoders: bool,
) -> FusionReport:
    difference = max(float(np.abs(a - b).max()) for a, b in zip(alone, together, strict=True))
    tolerance = TOLERANCES.get(dtype, HALF_PRECISION_TOLERANCE)
    found = f"certified at load: fused differs from alone by {difference:.1e} at most"
    if not difference <= tolerance:  # NaN is no pass
        note = (
            f"request by request: sharing forwards changes pictures by {difference:.1e}, "
            f"more than {tolerance:.0e}"
        )
        return FusionReport(False, note, encoders=encoders)
    if stepper.fallbacks and not encoders:
        return FusionReport(False, "request by request: shared forwards fail", encoders=encoders)
    return FusionReport(
        not stepper.fallbacks,
        f"requests share the denoiser's forwards ({found})",
        encoders=encoders,
    )
