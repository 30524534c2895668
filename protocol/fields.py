"""Rules for single fields of a request: each normalises a value or says what it expected."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_engine.protocol.errors import (
    InvalidRequestError,
    UnknownFieldError,
    nearest,
    shorten,
)
from omni_engine.protocol.tensors import ITEM_SIZES, TensorData

MAX_NESTING = 16
MAX_SHOWN_CHARS = 200


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
    if isinstance(value, np.ndarray | TensorData):
        return shorten(value)
    text = repr(value[:MAX_SHOWN_CHARS]) if isinstance(value, str) else shorten(value)
    return f"{shorten(text)} ({type(value).__name__})"


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


def text(max_chars: int | None = None) -> FieldRule:
    """A string that can be written as UTF-8."""

    def normalise(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        if max_chars is not None and len(value) > max_chars:
            raise ValueError
        return _unicode(value)

    bound = "" if max_chars is None else f", at most {max_chars} characters"
    return FieldRule(normalise, f"a string of valid Unicode text{bound}")


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
        few = itertools.islice(value, max_length + 1)  # type: ignore[call-overload]
        items: tuple[float, ...] = tuple(_number(item) for item in few)
        if not 1 <= len(items) <= max_length or any(not low <= item <= high for item in items):
            raise ValueError
        return items

    return FieldRule(
        normalise, f"a list of 1 to {max_length} finite numbers from {low:g} to {high:g}"
    )


def plain_mapping(where: str) -> FieldRule:
    """A dict of string keys to plain values (None, bool, int, float, str, bytes, arrays, nested).

    Args:
        where: the field's name, for errors that name one of its entries.
    """
    expected = (
        "None, booleans, 64-bit integers, finite numbers, Unicode text, bytes, arrays, and lists "
        f"and dicts of these, nested at most {MAX_NESTING} deep"
    )

    def normalise(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return {_key(key): entry(str(key), item) for key, item in value.items()}

    def entry(key: str, item: object) -> Any:
        rule = FieldRule(lambda item: _plain(item, 1), expected)
        return rule.apply(f"{where}.{shorten(key)}", item)

    return FieldRule(normalise, "a dict of names to plain values or arrays")


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError
    return _unicode(key)


def _unicode(value: str) -> str:
    value.encode("utf-8")  # lone surrogates raise, a ValueError
    return value


def _plain(value: object, depth: int) -> Any:
    """Return a value as the codec can carry it.

    Raises:
        ValueError, TypeError, OverflowError: if it can't.
    """
    if depth > MAX_NESTING:
        raise ValueError
    match value:
        case None | bool() | bytes() | TensorData():
            return value
        case str():
            return _unicode(value)
        case np.ndarray():
            if value.dtype.name not in ITEM_SIZES:
                raise TypeError
            return value.astype(value.dtype.newbyteorder("<"), copy=False)
        case numbers.Integral():
            if not -(2**63) <= (number := int(value)) < 2**64:
                raise OverflowError
            return number
        case numbers.Real():
            return _number(value)
        case Mapping():
            return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
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
    close, key = nearest(key, known), shorten(key)
    return UnknownFieldError(
        f"unknown {what} {key!r}",
        field=f"{where}.{key}" if where else key,
        expected="one of " + ", ".join(sorted(known)) if known else f"no {what} at all",
        hint=f"Did you mean {close!r}?" if close else None,
    )
