"""One picture of one request as one call of a diffusers pipeline.

n outputs are n rows, each a picture of its own with seed + i; ``num_images_per_prompt`` is never
passed on, since several pipelines pair pictures and prompts wrongly for n > 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from omni_engine.protocol.errors import ModelError
from omni_engine.protocol.requests import DiffusionRequest

_SET_HERE = frozenset(
    {"seed", "num_outputs_per_prompt", "output_type", "lora_request", "extra_args",
     "negative_prompt", "fps"}
)  # fmt: skip

RESULT_FIELDS = ("images", "image", "frames", "videos", "audios")
"""Where diffusers' pipelines return what they made; Kandinsky 5 returns ``image``."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One picture of one request."""

    request: DiffusionRequest
    index: int

    @property
    def seed(self) -> int:
        """Picture i uses the request's seed + i."""
        return self.request.seed + self.index

    @property
    def wants_latents(self) -> bool:
        """Whether raw latents were asked for instead of pictures."""
        return self.request.sampling_params.output_type == "latent"

    def generator(self) -> torch.Generator:
        """A CPU generator, so that the same seed starts from the same noise on every device."""
        return torch.Generator("cpu").manual_seed(self.seed)


def rows_of(requests: Sequence[DiffusionRequest]) -> list[Row]:
    """Return the rows of requests, contiguous per request."""
    return [Row(request, i) for request in requests for i in range(request.num_outputs)]


class CallBuilder:
    """Builds the arguments of a pipeline's ``__call__``.

    Args:
        pipe: the pipeline; its class's signature is read, and whether it takes pictures with alpha.
    """

    def __init__(self, pipe: Any) -> None:
        self._alpha = picture_channels(pipe) == 4
        self.parameters = frozenset(inspect.signature(type(pipe).__call__).parameters)

    def single(self, row: Row) -> dict[str, Any]:
        """Return the arguments of a call for one row."""
        return {name: values[0] for name, values in self._per_row([row]).items()} | self._shared(
            row
        )

    def batch(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the arguments of one list call for rows that are equal in all but their own."""
        return self._per_row(rows) | self._shared(rows[0])

    def _shared(self, row: Row) -> dict[str, Any]:
        params = row.request.sampling_params
        arguments = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in params.given().items()
            if name not in _SET_HERE and name in self.parameters
        }
        arguments |= params.extra_args
        if "output_type" in self.parameters:
            arguments["output_type"] = "latent" if row.wants_latents else "np"
        return arguments

    def _per_row(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        first = rows[0].request
        values: dict[str, list[Any]] = {"generator": [row.generator() for row in rows]}
        if "prompt" in self.parameters:
            values["prompt"] = [row.request.prompt for row in rows]
        if first.sampling_params.negative_prompt is not None:
            values["negative_prompt"] = [r.request.sampling_params.negative_prompt for r in rows]
        for name in first.multi_modal_data:
            given = [row.request.multi_modal_data[name] for row in rows]
            values[name] = [_pictures(value, alpha=self._alpha) for value in given]
        return values


def unpack(result: Any, *, latents: bool) -> list[Any]:
    """Return one entry per row of what a pipeline returned: arrays, or tensors for latents.

    Raises:
        ModelError: if there are no pictures, frames or sounds in it.
    """
    found = made_in(result)
    if latents and isinstance(found, torch.Tensor):
        return list(found)
    return [_array(item) for item in found]


def made_in(result: Any) -> Any:
    """Return the pictures, clips, sounds or latents in what a pipeline returned.

    Raises:
        ModelError: if there are none.
    """
    for name in RESULT_FIELDS:
        if (found := getattr(result, name, None)) is not None:
            return found
    kind, expected = type(result).__name__, ", ".join(RESULT_FIELDS)
    raise ModelError(f"the pipeline returned {kind} without any of {expected}")


def picture_channels(pipe: Any) -> int:
    """Return 4 for pipelines that encode pictures with alpha, else 3."""
    config = getattr(getattr(pipe, "vae", None), "config", None)
    found = [getattr(config, name, None) for name in ("input_channels", "in_channels")]
    return 4 if 4 in found else 3


def sample_rate_of(pipe: Any) -> int | None:
    """Return the samples per second of the sounds a pipeline makes; None if it tells none."""
    for name in ("vae", "vocoder"):
        config = getattr(getattr(pipe, name, None), "config", None)
        if isinstance(rate := getattr(config, "sampling_rate", None), int):
            return rate
    return None


def _array(item: Any) -> Any:
    return item.float().cpu().numpy() if isinstance(item, torch.Tensor) else np.asarray(item)


def _pictures(value: Any, *, alpha: bool) -> Any:
    if isinstance(value, list):
        return [_picture(picture, alpha=alpha) for picture in value]
    return _picture(value, alpha=alpha)


def _picture(pixels: Any, *, alpha: bool) -> Image.Image:
    """Give a picture in colour the alpha that the pipeline takes: opaque, or none."""
    picture = Image.fromarray(pixels)
    return picture if picture.mode == "L" else picture.convert("RGBA" if alpha else "RGB")
