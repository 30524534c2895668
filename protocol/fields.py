"""Rules for single fields of a request: each normalises a value or says what it expected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_engine.protocol.errors import InvalidRequestError, UnknownFieldError, nearest
from omni_engine.protocol.tensors import TensorData

MAX_NESTING = 16


@dataclass(frozen=True, slots=True)
class FieldRule:
    """What a field accepts: ``normalise`` returns the canonical value or raises ``ValueError``."""

    normalise: Callable[[Any], Any]
    expected: str

    def apply(self, field: str, value: object) -> Any:
        """Return the canonical value.

        Raises:
            InvalidRequestError: naming the field, its value and what is allowed.
        """
        try:
            return self.normalise(value)
        except (ValueError, TypeError, OverflowError):
            raise InvalidRequestError(
                f"{field} is not acceptable",
                field=field,
                value=describe(value),
                expected=self.expected,
            ) from None


def describe(value: object) -> str:
    """Return a short text for a rejected value that also tells its type where that matters."""
    if isinstance(value, np.ndarray):
        return f"array of shape {value.shape}, dtype {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def integer(low: int, high: int) -> FieldRule:
    """An integer in [low, high]; booleans are not integers here."""

    def normalise(value: object) -> int:
        number = _integer(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return FieldRule(normalise, f"an integer from {low} to {high}")


def number(low: float, high: float = math.inf) -> FieldRule:
    """A finite number in [low, high]."""

    def normalise(value: object) -> float:
        found = _number(value)
        if not low <= found <= high:
            raise ValueError
        return found

    bound = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
    return FieldRule(normalise, f"a finite number {bound}")


def text() -> FieldRule:
    """A string that can be written as UTF-8."""

    def normalise(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        value.encode("utf-8")
        return value

    return FieldRule(normalise, "a string of valid Unicode text")


def one_of(*choices: str) -> FieldRule:
    """One of a few names."""

    def normalise(value: object) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return FieldRule(normalise, "one of " + ", ".join(repr(choice) for choice in choices))


def number_list(low: float, high: float, max_length: int) -> FieldRule:
    """A list of 1 to ``max_length`` finite numbers in [low, high], kept as a tuple."""

    def normalise(value: object) -> tuple[float, ...]:
        if isinstance(value, str | bytes | Mapping):
            raise TypeError
        items = tuple(_number(item) for item in value)  # type: ignore[attr-defined]
        if not 1 <= len(items) <= max_length or any(not low <= item <= high for item in items):
            raise ValueError
        return items

    return FieldRule(
        normalise, f"a list of 1 to {max_length} finite numbers from {low:g} to {high:g}"
    )


def plain_mapping() -> FieldRule:
    """A dict of string keys to plain values: None, bool, numbers, str, bytes, arrays, nested."""

    def normalise(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_key(key): _plain(item, 1) for key, item in value.items()}

    return FieldRule(
        normalise, f"a dict of names to plain values or arrays, nested at most {MAX_NESTING} deep"
    )


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError
    return key


def _plain(value: object, depth: int) -> Any:
    if depth > MAX_NESTING:
        raise ValueError
    if value is None or isinstance(value, bool | int | str | bytes | np.ndarray | TensorData):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise TypeError


def refuse_unknown(given: Mapping[str, object], known: frozenset[str], where: str) -> None:
    """Raise for the first key of ``given`` that is not known, naming the nearest one.

    Args:
        given: the mapping as received.
        known: allowed keys.
        where: prefix of the field's dotted name; "" at the top.

    Raises:
        UnknownFieldError: for the first unknown key.
    """
    for key in given:
        if key not in known:
            raise unknown_field(str(key), known, where)


def unknown_field(key: str, known: frozenset[str], where: str, what: str = "field") -> Exception:
    """Build the error for an unknown key, naming the nearest known one and all allowed ones."""
    close = nearest(key, known)
    return UnknownFieldError(
        f"unknown {what} {key!r}",
        field=f"{where}.{key}" if where else key,
        expected="one of " + ", ".join(sorted(known)) if known else f"no {what} at all",
        hint=f"Did you mean {close!r}?" if close else None,
    )
