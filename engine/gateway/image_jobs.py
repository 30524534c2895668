"""A request for pictures on its way to the engine: checked against the model, then submitted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from omni_engine.engine.async_client import AsyncRequestHandle
from omni_engine.engine.gateway.catalog import ServedModel, unknown_model
from omni_engine.engine.gateway.errors import GatewayError, from_engine
from omni_engine.engine.gateway.image_schemas import PASSED_ON, ImageFields
from omni_engine.engine.gateway.state import Gateway
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import presentable_id
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

_PASSED_ON = (
    *PASSED_ON,
    "max_sequence_length",
    "extra_args",
)
_SMALLEST_PREVIEW, _LARGEST_PREVIEW = 16, 4096
"""Longest sides of previews that the engine makes, in pixels."""
_USUAL_SIDE = 1024
"""Of previews where a picture's size is not known."""


@dataclass(frozen=True)
class ImageJob:
    """What the engine is asked for.

    Attributes:
        fields: what was asked for over HTTP.
        model: that runs it.
        params: sampling parameters.
        inputs: pictures by the engine's names.
        request_id: the caller's, or None.
    """

    fields: ImageFields
    model: ServedModel
    params: OmniDiffusionSamplingParams
    inputs: Mapping[str, Any] = field(default_factory=dict)
    request_id: str | None = None

    async def submit(self, gateway: Gateway) -> AsyncRequestHandle:
        """Hand it to the engine.

        Raises:
            OmniError: if it is wrong in itself, or the engine has gone.
        """
        every = self._preview_every()
        prompt: dict[str, Any] = {"prompt": self.fields.prompt}
        if self.inputs:
            prompt["multi_modal_data"] = dict(self.inputs)
        return await gateway.client.submit(
            prompt,
            self.params,
            request_id=self.request_id,
            model=self.model.name,
            preview_every=every,
            preview_max_side=None if every is None else self._longest_side(),
            timeout_s=self.fields.timeout_s,
            in_thread=not self.fields.is_light,
        )

    def _preview_every(self) -> int | None:
        """Return the steps between previews; None for none."""
        able = self.model.capabilities
        if not self.fields.partial_images or able is None or not able.makes_previews:
            return None
        steps = self._value("num_inference_steps")
        if not isinstance(steps, int):
            return 1
        if (strength := self._value("strength")) is not None and self.inputs:
            steps = max(1, int(steps * strength))
        return preview_interval(steps, self.fields.partial_images)

    def _longest_side(self) -> int:
        sides = [self._value("height"), self._value("width")]
        known = [side for side in sides if isinstance(side, int)] or [_USUAL_SIDE]
        return min(max(*known, _SMALLEST_PREVIEW), _LARGEST_PREVIEW)

    def _value(self, name: str) -> Any:
        given = getattr(self.params, name)
        return self.model.default(name) if given is None else given


def preview_interval(steps: int, wanted: int) -> int:
    """Return every how many steps a preview is made, so that there are enough to choose from.

    Args:
        steps: in all, >= 1.
        wanted: previews, >= 1, spread evenly between the first step and the last.
    """
    seldom = math.ceil(steps / (wanted + 1))
    enough = (steps - 1) // seldom >= wanted
    return seldom if enough else max(1, steps // (wanted + 1))


async def model_for_pictures(
    gateway: Gateway, fields: ImageFields, *, loaded: bool = False
) -> ServedModel:
    """Return the model that a request names.

    Args:
        gateway: that knows it.
        fields: what was asked for.
        loaded: whether to wait until it is known what the model can do, should it still load; a
            request whose meaning depends on that waits in any case.

    Raises:
        GatewayError: 404 if there is none of that name, 400 if it makes videos, 504 if the
            request's time is up before it is loaded.
    """
    model = await gateway.catalog.find(fields.model)
    if model is None:
        raise unknown_model(fields.model or "", await gateway.catalog.models())
    if loaded or fields.partial_images or fields.background == "transparent":
        try:
            model = await asyncio.wait_for(gateway.catalog.loaded(model), fields.timeout_s)
        except TimeoutError:
            message = f"The model {model.name!r} is still loading."
            raise GatewayError(504, message, "timeout_s", "timeout") from None
    if model.capabilities is not None and model.capabilities.makes_video:
        raise _is_for_videos(model)
    return model


def sampling_params(fields: ImageFields, **more: Any) -> OmniDiffusionSamplingParams:
    """Return the sampling parameters of what was asked for.

    Args:
        fields: as asked for.
        more: further ones; they win.

    Raises:
        OmniError: for a value that no engine takes.
    """
    height, width = fields.height_and_width or (None, None)
    given = {name: getattr(fields, name) for name in _PASSED_ON}
    given["extra_args"] = given["extra_args"] or {}
    return OmniDiffusionSamplingParams(
        **{
            **given,
            "height": height,
            "width": width,
            "num_outputs_per_prompt": fields.n,
            "lora_request": fields.lora_request,
            "output_type": "np",
            **more,
        }
    )


async def checked_params(
    gateway: Gateway, fields: ImageFields, **more: Any
) -> OmniDiffusionSamplingParams:
    """Return ``sampling_params``, off the event loop where they hold much.

    Raises:
        OmniError: for a value that no engine takes.
    """
    if fields.is_light:
        return sampling_params(fields, **more)
    return await gateway.encoders.run(sampling_params, fields, **more)


def check_background(fields: ImageFields, model: ServedModel) -> None:
    """Refuse transparency of a model that makes none.

    Raises:
        GatewayError: naming the field.
    """
    able = model.capabilities
    if fields.background == "transparent" and able is not None and not able.makes_transparency:
        raise GatewayError(
            400,
            f"The model {model.name!r} makes no transparency. "
            'Expected: background "opaque" or "auto".',
            "background",
            "unsupported_option",
        )


def caller_id(request: Request) -> str | None:
    """Return the id that a caller gave the request, if a request may have it."""
    given = request.headers.get("x-request-id")
    return presentable_id(given) if given is not None and given.isascii() else None


def pictures_of(output: DiffusionOutput, job: ImageJob) -> list[Any]:
    """Return what a finished request made; layers of a picture count as pictures.

    Raises:
        GatewayError: what went wrong, if anything did.
    """
    if output.error is not None:
        raise from_engine(output.error)
    if output.images is not None:
        return list(output.images)
    if output.frames is not None and output.frames[0].shape[-1] == 4:
        return [layer for picture in output.frames for layer in picture]
    if output.frames is not None:
        raise _is_for_videos(job.model)
    raise GatewayError(400, f"The model {job.model.name!r} makes no pictures.", "model")


def _is_for_videos(model: ServedModel) -> GatewayError:
    return GatewayError(
        400, f"The model {model.name!r} makes videos, not pictures: use POST /v1/videos.", "model"
    )
