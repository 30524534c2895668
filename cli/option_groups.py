"""Lets a command take a whole group of options as one dataclass parameter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of each parameter that is a dataclass."""
    hints = get_type_hints(command, include_extras=True)
    del hints["return"]
    groups: dict[str, Any] = {
        n: hint for n, hint in hints.items() if dataclasses.is_dataclass(hint)
    }

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            names = [field.name for field in dataclasses.fields(group)]
            given[name] = group(**{field: given.pop(field) for field in names})
        command(**given)

    parameters = list(_single_parameters(command, hints))
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _single_parameters(
    command: Callable[..., None], hints: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not dataclasses.is_dataclass(hint):
            kind = inspect.Parameter.KEYWORD_ONLY
            yield parameter.replace(kind=kind, annotation=hint)
            continue
        types = get_type_hints(hint, include_extras=True)
        for field in dataclasses.fields(hint):
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY,
                default=field.default, annotation=types[field.name],
            )  # fmt: skip
