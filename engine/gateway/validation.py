"""What a body may hold, and what its sender is told when it holds something else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.weights import refuse_crowded
from omni_engine.protocol.errors import nearest, shorten

B = TypeVar("B", bound=BaseModel)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_EXPECTED = {
    "size": 'WIDTHxHEIGHT, such as "1024x1024", or "auto"',
    "lora": 'a mapping such as {"name": "sketch", "scale": 0.8}, or a list of such mappings',
}
"""What a field takes, where pydantic has no words for people."""


class Body(BaseModel):
    """A mapping that someone sends: what is unknown in it is refused with the nearest name.

    Attributes:
        where: the field that holds it; empty for a whole body.
        synonyms: names that others use for a field, and ours.
        refused: fields that are known elsewhere and can't be served, and why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    where: ClassVar[str] = ""
    synonyms: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields:
                raise cls._unknown(str(name))
        return given

    @classmethod
    def _unknown(cls, name: str) -> GatewayError:
        shown = shorten(f"{cls.where}.{name}" if cls.where else name)
        if (reason := cls.refused.get(name)) is not None:
            return GatewayError(400, f"{shown} is not served: {reason}.", shown, "unknown_field")
        close = cls.synonyms.get(name) or nearest(name, set(cls.model_fields))
        known = ", ".join(cls.model_fields)
        hint = f"Did you mean {close!r}?" if close else f"Known here: {known}."
        return GatewayError(400, f"There is no field {shown!r}. {hint}", shown, "unknown_field")

    @classmethod
    def schema_for_openapi(cls) -> dict[str, Any]:
        """Return the JSON schema, with nothing in it that refers to elsewhere."""
        schema = cls.model_json_schema()
        inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}))
        return inlined

    @classmethod
    def of_json(cls, text: bytes) -> Self:
        """Read a body of JSON.

        Raises:
            GatewayError: 413 if it holds too many values, 400 naming the field that is wrong.
        """
        refuse_crowded(text)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise GatewayError(
                400, f"The body is not JSON: {error}.", code="invalid_json"
            ) from None
        return validated(cls, data)


def validated(model: type[B], data: Any, *, text: bool = False) -> B:
    """Return data as a model.

    Args:
        model: what it should be.
        data: plain values.
        text: whether numbers and flags may be text, as in forms.

    Raises:
        GatewayError: naming the first field that is wrong.
    """
    try:
        return model.model_validate(data, strict=False if text else None)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False)) from None


def refusal_of(errors: Sequence[Any]) -> GatewayError:
    """Return what to answer to what pydantic found wrong: the first of it, as OpenAI does."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if _is_name(part)]
    param = ".".join(where) or None
    if first["type"] == "missing":
        return GatewayError(400, f"{param or 'The body'} is missing.", param)
    if first["type"] == "extra_forbidden":
        return GatewayError(400, f"There is no field {param!r}.", param, "unknown_field")
    if param in _EXPECTED:
        message = f"{param} can't be {shorten(repr(first['input']))}. Expected: {_EXPECTED[param]}."
        return GatewayError(400, message, param)
    given = shorten(repr(first["input"])) if param else ""
    shown = f" Given: {given}." if given else ""
    return GatewayError(400, f"{param or 'The body'}: {first['msg']}.{shown}", param)


def _is_name(part: Any) -> bool:
    """Whether a part of a place is a field or an index: pydantic also tells which kind it tried."""
    if isinstance(part, int):
        return True
    return part not in ("body", "query", "path") and _NAME.fullmatch(part) is not None


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        own = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[reference.rpartition("/")[2]], definitions), **own}
    return {name: _inlined(item, definitions) for name, item in schema.items()}
