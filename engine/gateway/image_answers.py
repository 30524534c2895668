"""Answers with pictures; built in an encoder's thread."""

from __future__ import annotations

import base64
import dataclasses
import time
from typing import Any

from omni_engine.engine.gateway.image_jobs import ImageJob
from omni_engine.engine.gateway.image_results import Usage
from omni_engine.engine.gateway.picture_encoding import TRANSPARENT_FORMATS, encode_picture
from omni_engine.protocol.outputs import DiffusionOutput

_NO_USAGE: dict[str, Any] = Usage().model_dump()


def base64_picture(pixels: Any, job: ImageJob) -> str:
    """Return a picture as a file in base64."""
    return base64.b64encode(encode_picture(pixels, job.fields.picture_format)).decode("ascii")


def ran(output: DiffusionOutput, job: ImageJob) -> dict[str, Any]:
    """Return what became of a request, whatever it made."""
    return {
        "request_id": output.request_id,
        "model": job.model.name,
        "seed": output.seed,
        "applied_loras": [dataclasses.asdict(lora) for lora in output.applied_loras],
        "metrics": dataclasses.asdict(output.metrics),
    }


def described(pixels: Any, job: ImageJob) -> dict[str, Any]:
    """Return what OpenAI tells of a picture."""
    how = job.fields.picture_format
    is_clear = pixels.shape[-1] == 4 and how.transparent and how.name in TRANSPARENT_FORMATS
    return {
        "background": "transparent" if is_clear else "opaque",
        "output_format": how.name,
        "quality": job.fields.quality or "auto",
        "size": f"{pixels.shape[1]}x{pixels.shape[0]}",
        "usage": _NO_USAGE,
    }


def seed_of(output: DiffusionOutput, index: int) -> int | None:
    """Return the seed of one of a request's pictures; layers of one have its seed."""
    if output.seed is None or output.images is None:
        return output.seed
    return output.seed + index


def answer(output: DiffusionOutput, job: ImageJob, items: list[dict[str, Any]], first: Any) -> Any:
    """Return the whole answer.

    Args:
        output: what the engine returned.
        job: what it was asked for.
        items: one per picture.
        first: the first picture.
    """
    return {
        "created": int(time.time()),
        "data": items,
        **described(first, job),
        **ran(output, job),
    }
