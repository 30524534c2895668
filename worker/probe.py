"""Arguments of short calls of a pipeline that show how its denoiser's arguments combine."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.row_calls import CallBuilder, Row, picture_channels
from omni_engine.worker.signatures import diffusers_capabilities

_STEPS = 2
_SEED = 0


def probe_arguments(
    pipe: Any,
    prompts: int,
    *,
    capabilities: PipelineCapabilities | None = None,
    inputs: frozenset[str] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a short call of a diffusers pipeline with equal prompts and seeds.

    Args:
        pipe: the pipeline.
        prompts: how many.
        capabilities: what it takes, if that was found out already.
        inputs: pictures to give, one for all prompts; None gives those the pipeline requires.
    """
    found = capabilities or diffusers_capabilities(pipe, FusionReport(False, ""))
    given = found.required_inputs if inputs is None else inputs
    builder = CallBuilder(pipe)
    request = _probe_request(found, given, picture_channels(pipe))
    arguments = builder.batch([Row(request, 0)] * prompts)
    # A list of pictures is one per prompt for some pipelines and several for one prompt for others.
    arguments |= {name: arguments[name][0] for name in given}
    if "output_type" in builder.parameters:
        arguments["output_type"] = "latent"
    return arguments


def _probe_request(
    capabilities: PipelineCapabilities, inputs: frozenset[str], channels: int
) -> DiffusionRequest:
    side = 8 * capabilities.size_multiple
    wanted = {
        "height": side,
        "width": side,
        "num_inference_steps": _STEPS,
        "num_frames": 9,
        "strength": 1.0,
        "negative_prompt": " ",
    }
    fields: dict[str, Any] = {
        name: value for name, value in wanted.items() if name in capabilities.sampling_fields
    }
    defaults = {n: v for n, v in capabilities.defaults.items() if n not in ("height", "width")}
    params = OmniDiffusionSamplingParams(**fields, seed=_SEED).with_defaults(defaults)
    pixels = np.random.default_rng(_SEED).integers(0, 255, (side, side, channels), dtype=np.uint8)
    return build_request(
        "a small red house", params, multi_modal_data=dict.fromkeys(inputs, pixels)
    )
