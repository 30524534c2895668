"""The pictures of an edit: fetched, decoded, and matched to what the model takes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from omni_engine.engine.gateway.bodies import Given
from omni_engine.engine.gateway.byte_budget import Lease
from omni_engine.engine.gateway.catalog import ServedModel
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.picture_inputs import Pixels, mask_of
from omni_engine.engine.gateway.picture_sources import pictures_from
from omni_engine.engine.gateway.state import Gateway

MOST_PICTURES = 16
PICTURE_FIELDS = {"image": MOST_PICTURES, "mask": 1, "control_image": MOST_PICTURES}
"""The form's fields for pictures, and how many each may have."""

_ENGINE_NAMES = {"image": "image", "mask": "mask_image", "control_image": "control_image"}


def check_given(given: Given, model: ServedModel) -> None:
    """Refuse pictures that the model takes no notice of, and the lack of those that it needs.

    Raises:
        GatewayError: naming the field.
    """
    able = model.capabilities
    if able is None:
        return
    if not able.inputs:
        raise GatewayError(
            400,
            f"The model {model.name!r} takes no pictures: use POST /v1/images/generations, "
            "or a model that edits.",
            "model",
        )
    for field in given:
        if _ENGINE_NAMES[field] not in able.inputs:
            takes = ", ".join(sorted(f for f, name in _ENGINE_NAMES.items() if name in able.inputs))
            message = f"The model {model.name!r} takes no {field!r}. It takes: {takes}."
            raise GatewayError(400, message, field)
    for field, name in _ENGINE_NAMES.items():
        mask_may_be_in_image = field == "mask" and "image" in given
        if name in able.required_inputs and field not in given and not mask_may_be_in_image:
            raise _missing(field, model)


async def decoded(
    gateway: Gateway, given: Given, model: ServedModel, lease: Lease
) -> dict[str, Any]:
    """Return the engine's inputs.

    Args:
        gateway: whose settings and threads count.
        given: files and URLs by the form's fields.
        model: that runs them. If it needs a mask and none is given, it is in the picture's
            transparency.
        lease: takes the room for them.

    Raises:
        GatewayError: if one can't be had or read, or they don't fit together.
    """
    flat = [(field, source) for field, sources in given.items() for source in sources]
    found = iter(await pictures_from(gateway, flat, lease))
    inputs: dict[str, Any] = {}
    for field, sources in given.items():
        own = list(itertools.islice(found, len(sources)))
        inputs[_ENGINE_NAMES[field]] = own[0] if len(own) == 1 else own
    picture = _first(inputs.get("image"))
    able = model.capabilities
    if able is not None and "mask_image" in able.required_inputs and "mask_image" not in inputs:
        if picture is None or picture.shape[-1] != 4:
            raise _missing("mask", model)
        inputs["mask_image"] = mask_of(picture)
    if "mask_image" in inputs and picture is not None:
        _check_same_size(inputs["mask_image"], picture)
    return inputs


def size_like(inputs: dict[str, Any], model: ServedModel, most_side: int) -> tuple[int, int] | None:
    """Return height and width of a result that looks like its input, for size ``auto``.

    It has the first picture's proportions and, where that is known, the area of the model's usual
    size.

    Args:
        inputs: the engine's inputs.
        model: that runs them.
        most_side: pixels that a side may have.

    Returns:
        None where the model decides by itself.
    """
    able, picture = model.capabilities, _first(inputs.get("image"))
    if able is None or picture is None or not {"height", "width"} <= able.sampling_fields:
        return None
    height, width = picture.shape[:2]
    usual = model.default("height"), model.default("width")
    area = usual[0] * usual[1] if all(usual) else height * width
    scale = math.sqrt(area / (height * width))
    multiple = able.size_multiple
    most = most_side // multiple * multiple

    def fitting(side: int) -> int:
        return max(multiple, min(most, round(side * scale / multiple) * multiple))

    return fitting(height), fitting(width)


def _first(value: Any) -> Pixels | None:
    found: Pixels | None = value[0] if isinstance(value, list) else value
    return found


def _check_same_size(mask: Pixels, picture: Pixels) -> None:
    if mask.shape[:2] != picture.shape[:2]:
        sizes = [f"{shape[1]}x{shape[0]}" for shape in (mask.shape, picture.shape)]
        raise GatewayError(
            400, f"The mask is {sizes[0]}, but the picture is {sizes[1]}: they must agree.", "mask"
        )


def _missing(field: str, model: ServedModel) -> GatewayError:
    hint = " It may also be the picture's transparency." if field == "mask" else ""
    return GatewayError(400, f"The model {model.name!r} needs {field!r}.{hint}", field)
