"""What a user asks for: prompt, sampling parameters, adapter; checked when they are built."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_engine.protocol import fields
from omni_engine.protocol.errors import InvalidRequestError
from omni_engine.protocol.fields import describe, refuse_unknown
from omni_engine.protocol.sampling import MAX_NAME_CHARS, OmniDiffusionSamplingParams
from omni_engine.protocol.tensors import TensorData

MAX_REQUEST_ID_CHARS = 200
PROMPT_FIELDS = frozenset({"prompt", "negative_prompt", "multi_modal_data"})
INPUT_NAMES = frozenset({"image", "mask_image", "control_image"})
REQUEST_FIELDS = frozenset(
    {
        "request_id",
        "model",
        "prompt",
        "multi_modal_data",
        "sampling_params",
        "detached",
        "preview_every",
        "preview_max_side",
        "timeout_s",
    }
)
MAX_TIMEOUT_S = 30 * 24 * 3600.0
_STEPS = fields.integer(1, 2**31 - 1)
_PREVIEW_SIDE = fields.integer(16, 4096)
_TIMEOUT = fields.number(0.001, MAX_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class DiffusionRequest:
    """One request: one prompt, its inputs, its sampling parameters.

    Args:
        request_id: unique among the engine's live requests.
        prompt: the text; not blank.
        multi_modal_data: input pictures by name ("image", "mask_image", "control_image"): uint8
            arrays of shape (height, width, 3), (height, width, 4) with alpha, or (height, width),
            or lists of them.
        sampling_params: see ``OmniDiffusionSamplingParams``.
        model: a served model's name; None picks the engine's first.
        detached: keep running when the client goes away.
        preview_every: send a small preview picture every so many steps, >= 1; None sends none.
        preview_max_side: longest side of previews in pixels; None: 256.
        timeout_s: seconds from its arrival after which the engine ends it; None: never.
    """

    request_id: str
    prompt: str
    sampling_params: OmniDiffusionSamplingParams
    multi_modal_data: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    detached: bool = False
    preview_every: int | None = None
    preview_max_side: int | None = None
    timeout_s: float | None = None

    @property
    def seed(self) -> int:
        """The seed of picture 0; drawn at admission when the user gave none."""
        if self.sampling_params.seed is None:
            raise ValueError("the seed is drawn at admission")
        return self.sampling_params.seed

    @property
    def num_outputs(self) -> int:
        """Pictures this request makes."""
        return self.sampling_params.num_outputs_per_prompt or 1

    def to_wire(self) -> dict[str, Any]:
        """Return a dict of plain values and arrays, ready for the codec."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "prompt": self.prompt,
            "multi_modal_data": self.multi_modal_data,
            "sampling_params": self.sampling_params.to_wire(),
            "detached": self.detached,
            "preview_every": self.preview_every,
            "preview_max_side": self.preview_max_side,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_wire(cls, wire: object) -> DiffusionRequest:
        """Check and build a request from a decoded message.

        Raises:
            InvalidRequestError: naming the offending field.
        """
        if not isinstance(wire, Mapping):
            raise InvalidRequestError(
                "a request must be a map",
                field="requests",
                value=describe(wire),
                expected="a map of fields",
            )
        refuse_unknown(wire, REQUEST_FIELDS, "")
        params, detached = wire.get("sampling_params"), wire.get("detached")
        return build_request(
            wire.get("prompt"),
            None if params is None else OmniDiffusionSamplingParams.from_mapping(params),
            request_id=wire.get("request_id"),
            model=wire.get("model"),
            detached=False if detached is None else detached,
            multi_modal_data=wire.get("multi_modal_data"),
            preview_every=wire.get("preview_every"),
            preview_max_side=wire.get("preview_max_side"),
            timeout_s=wire.get("timeout_s"),
        )


def checked_patience(timeout_s: object) -> float | None:
    """Return how long a caller waits, in seconds; None: without end.

    Raises:
        InvalidRequestError: if it is no finite number from 0 to 30 days.
    """
    rule = fields.number(0.0, MAX_TIMEOUT_S)
    return None if timeout_s is None else rule.apply("timeout_s", timeout_s)


def new_request_id() -> str:
    """Return a fresh random request id."""
    return f"req-{uuid.uuid4().hex[:16]}"


def build_request(
    prompt: object,
    sampling_params: OmniDiffusionSamplingParams | None = None,
    *,
    request_id: object = None,
    model: object = None,
    detached: object = False,
    multi_modal_data: object = None,
    preview_every: object = None,
    preview_max_side: object = None,
    timeout_s: object = None,
) -> DiffusionRequest:
    """Build a checked request from what a user passes as a prompt.

    Args:
        prompt: a string, or a dict with "prompt" and optionally "negative_prompt" and
            "multi_modal_data".
        sampling_params: see ``OmniDiffusionSamplingParams``; a prompt's own "negative_prompt" wins.
        request_id: 1 to 200 printable characters; drawn when None.
        model: a served model's name, or None.
        detached: keep running when the client goes away.
        multi_modal_data: input pictures by name; see ``DiffusionRequest``.
        preview_every: steps between preview pictures, or None.
        preview_max_side: longest side of previews in pixels, 16 to 4096, or None.
        timeout_s: seconds from its arrival after which the engine ends it, or None.

    Raises:
        InvalidRequestError: naming the offending field.
    """
    params = sampling_params if sampling_params is not None else OmniDiffusionSamplingParams()
    if isinstance(prompt, Mapping):
        refuse_unknown(prompt, PROMPT_FIELDS, "prompt")
        if prompt.get("negative_prompt") is not None:
            params = dataclasses.replace(params, negative_prompt=prompt["negative_prompt"])
        multi_modal_data = _only_one(prompt.get("multi_modal_data"), multi_modal_data)
        prompt = prompt.get("prompt")
    if detached is not True and detached is not False:
        raise InvalidRequestError(
            "detached is a flag",
            field="detached",
            value=describe(detached),
            expected="true or false",
        )
    if preview_max_side is not None and preview_every is None:
        raise InvalidRequestError(
            "preview_max_side has no effect without preview_every",
            field="preview_max_side",
            value=describe(preview_max_side),
            expected="preview_every to be given as well",
        )
    return DiffusionRequest(
        request_id=_checked_id(request_id),
        prompt=_checked_prompt(prompt),
        sampling_params=params,
        multi_modal_data=_checked_inputs({} if multi_modal_data is None else multi_modal_data),
        model=None if model is None else fields.text(MAX_NAME_CHARS).apply("model", model),
        detached=detached,
        preview_every=None
        if preview_every is None
        else _STEPS.apply("preview_every", preview_every),
        preview_max_side=None
        if preview_max_side is None
        else _PREVIEW_SIDE.apply("preview_max_side", preview_max_side),
        timeout_s=None if timeout_s is None else _TIMEOUT.apply("timeout_s", timeout_s),
    )


def _only_one(in_prompt: object, beside: object) -> object:
    """Return the inputs, which may be given in the prompt or beside it."""
    if in_prompt is not None and isinstance(beside, Mapping) and beside:
        raise InvalidRequestError(
            "multi_modal_data is given twice",
            field="multi_modal_data",
            expected="inputs in the prompt's map or beside it, not both",
        )
    return beside if in_prompt is None else in_prompt


def presentable_id(request_id: object) -> str | None:
    """Return a request id if it is one that a request may have, else None."""
    if (
        isinstance(request_id, str)
        and 0 < len(request_id) <= MAX_REQUEST_ID_CHARS
        and request_id.isprintable()
    ):
        return request_id
    return None


def _checked_id(request_id: object) -> str:
    if request_id is None:
        return new_request_id()
    if (checked := presentable_id(request_id)) is not None:
        return checked
    raise InvalidRequestError(
        "request_id is not acceptable",
        field="request_id",
        value=describe(request_id),
        expected=f"1 to {MAX_REQUEST_ID_CHARS} printable characters",
    )


def _checked_prompt(prompt: object) -> str:
    if isinstance(prompt, list | tuple):
        raise InvalidRequestError(
            "one request holds one prompt",
            field="prompt",
            value=f"a list of {len(prompt)}",
            expected="a string or one dict",
            hint="Submit several requests instead: generate([...]) makes each item its own.",
        )
    if prompt is None:
        raise InvalidRequestError("the prompt is missing", field="prompt", expected="a string")
    checked: str = fields.text().apply("prompt", prompt)
    if not checked.strip():
        raise InvalidRequestError(
            "the prompt is empty",
            field="prompt",
            value=repr(checked),
            expected="text with at least one visible character",
        )
    return checked


def _checked_inputs(inputs: object) -> dict[str, Any]:
    if not isinstance(inputs, Mapping):
        raise InvalidRequestError(
            "multi_modal_data must be a map",
            field="multi_modal_data",
            value=describe(inputs),
            expected="a map of input names to pictures",
        )
    refuse_unknown(inputs, INPUT_NAMES, "multi_modal_data")
    return {name: _checked_pictures(f"multi_modal_data.{name}", v) for name, v in inputs.items()}


def _checked_pictures(where: str, value: object) -> Any:
    if isinstance(value, list | tuple) and value:
        return [_checked_picture(f"{where}[{i}]", item) for i, item in enumerate(value)]
    return _checked_picture(where, value)


def _checked_picture(where: str, value: object) -> np.ndarray[Any, Any]:
    if isinstance(value, TensorData) and value.dtype == "uint8":
        value = value.to_numpy()
    if (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and value.size
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4)))
    ):
        return value
    raise InvalidRequestError(
        "an input picture is not acceptable",
        field=where,
        value=describe(value),
        expected="a uint8 array of shape (height, width, 3 or 4) or (height, width)",
    )
