"""Small requests made up for a pipeline from what it takes: for certification and parity.

They have few pixels and few steps, and pictures of noise where a pipeline needs some.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.worker.row_calls import picture_channels

PROMPTS = (
    "a cat",
    "a small red house beside a lake, with mountains behind it, in the morning",
    "a dog",
    "a bird on a tree",
)
"""The first and the third are of one length: they share even where prompts can't be padded."""


class RequestMaker:
    """Makes requests that a pipeline can run.

    Args:
        pipe: the pipeline; one with an autoencoder for alpha gets pictures with alpha.
        capabilities: what it takes.
        inputs: the pictures to give; many pipelines need some that their signature calls optional.
    """

    def __init__(
        self, pipe: Any, capabilities: PipelineCapabilities, inputs: frozenset[str]
    ) -> None:
        self._capabilities, self._inputs = capabilities, inputs
        self._channels = picture_channels(pipe)
        self.short = 8 * capabilities.size_multiple
        """Pixels of the short side; the long one has twice as many."""

    def request(
        self,
        prompt: str,
        seed: int,
        *,
        height: int | None = None,
        width: int | None = None,
        steps: int = 2,
        guidance: float | None = None,
        outputs: int = 1,
    ) -> DiffusionRequest:
        """Return one request; what its pipeline doesn't take is left out.

        Args:
            prompt: the text.
            seed: of the picture and of the pictures given.
            height: in pixels; None: the long side.
            width: in pixels; None: the short side.
            steps: denoising steps.
            guidance: None: the pipeline's own.
            outputs: pictures to make.
        """
        known = self._capabilities
        height, width = height or 2 * self.short, width or self.short
        wanted: dict[str, Any] = {
            "height": height,
            "width": width,
            "num_inference_steps": steps,
            "num_frames": 9,
            "strength": 0.9,  # a pipeline's own may leave no step of two or three
        }
        if guidance is not None:
            wanted |= {_guidance_field(known): guidance}
        fields = {n: value for n, value in wanted.items() if n in known.sampling_fields}
        if "true_cfg_scale" in known.sampling_fields:
            fields |= {"negative_prompt": " "}
        extra = {
            # Pipelines that resize what they are given to a million pixels
            "max_area": height * width,
            "_auto_resize": False,
            "use_resolution_binning": False,
            # Pictures in layers: two are enough
            "layers": 2,
        }
        extra = {name: value for name, value in extra.items() if name in known.extra_args}
        defaults = {n: v for n, v in known.defaults.items() if n not in ("height", "width")}
        params = OmniDiffusionSamplingParams(
            **fields, seed=seed, num_outputs_per_prompt=outputs, extra_args=extra
        ).with_defaults(defaults)
        rng = np.random.default_rng(seed)
        picture = rng.integers(0, 255, (height, width, self._channels), dtype=np.uint8)
        return build_request(prompt, params, multi_modal_data=dict.fromkeys(self._inputs, picture))


def certification_requests(maker: RequestMaker) -> list[DiffusionRequest]:
    """Return requests that would show wrong sharing: two shapes, two lengths, mixed steps."""
    short, long = maker.short, 2 * maker.short
    plan = [(long, short, 0, 3), (short, long, 1, 2), (long, short, 1, 2), (long, short, 2, 2)]
    return [
        maker.request(PROMPTS[prompt], seed, height=height, width=width, steps=steps)
        for seed, (height, width, prompt, steps) in enumerate(plan)
    ]


def list_call_requests(maker: RequestMaker) -> list[DiffusionRequest]:
    """Return a batch that one list call can run: ragged prompts, one and two pictures."""
    outputs = (1, 2, 1)
    return [
        maker.request(prompt, 10 * seed, outputs=n)
        for seed, (prompt, n) in enumerate(zip(PROMPTS, outputs, strict=False))
    ]


def _guidance_field(capabilities: PipelineCapabilities) -> str:
    taken = capabilities.sampling_fields
    return "true_cfg_scale" if "true_cfg_scale" in taken else "guidance_scale"
