"""Joins the arguments of several calls into one call's, and splits its output again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from omni_engine.worker.call_rules import Kind, infer_kind


class CannotSplitError(TypeError):
    """What came out of a fused forward can't be handed out to its calls."""


def join(values: Sequence[Any], kind: Kind, sizes: Sequence[int], *, always: bool = False) -> Any:
    """Return one argument for all calls.

    Args:
        values: the argument of each call.
        kind: how it combines.
        sizes: rows of each call.
        always: whether to join even what is one object for all calls, so that the result's shape
            depends on the sizes only.
    """
    first = values[0]
    if first is None:
        return None
    match kind:
        case Kind.ROWS | Kind.SAME_ROWS:
            return torch.cat(list(values))
        case Kind.ROWS_1:
            return torch.cat(list(values), 1)
        case Kind.EXPAND:
            if first.ndim == 0 and not always and _all_one(values):
                return first
            rows = zip(values, sizes, strict=True)
            return torch.cat([value.reshape(1).expand(n) for value, n in rows])
        case Kind.ROW_LIST | Kind.SAME_LIST:
            return [item for value in values for item in value]
        case Kind.EACH:
            return _join_each(values, sizes, always)
        case Kind.STATE:
            return first if not always and _all_one(values) else merge(values, torch.cat)
        case Kind.SAME | Kind.OPAQUE:
            return first


def split(output: Any, sizes: Sequence[int], *, lists: bool) -> list[Any]:
    """Return each call's part of an output.

    Args:
        output: of a forward.
        sizes: rows of each call.
        lists: whether a list with one entry per row holds rows.

    Raises:
        CannotSplitError: if a part of the output has no rows.
    """
    total = sum(sizes)
    if isinstance(output, torch.Tensor):
        if not output.ndim or not output.shape[0] or output.shape[0] % total:
            raise CannotSplitError(f"an output of shape {tuple(output.shape)} has no {total} rows")
        return list(torch.split(output, [n * (output.shape[0] // total) for n in sizes]))
    if output is None or isinstance(output, int | float | bool | str):
        return [output] * len(sizes)
    if isinstance(output, list) and lists and len(output) == total:
        remaining = iter(output)
        return [[next(remaining) for _ in range(n)] for n in sizes]
    if isinstance(output, list | tuple):
        parts = [split(item, sizes, lists=lists) for item in output]
        return [type(output)(part[i] for part in parts) for i in range(len(sizes))]
    if isinstance(output, dict):  # diffusers' output classes are dicts
        by_name = {name: split(item, sizes, lists=lists) for name, item in output.items()}
        return [
            type(output)(**{name: part[i] for name, part in by_name.items()})
            for i in range(len(sizes))
        ]
    return split_state(output, sizes)


def tensors_in(
    value: Any, path: tuple[Any, ...] = (), within: tuple[int, ...] = ()
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the tensors inside an object with where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in within or isinstance(value, type):
        return
    inside = (*within, id(value))
    if isinstance(value, list | tuple):
        named: Any = enumerate(value)
    else:
        named = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).items()
    for name, item in named:
        yield from tensors_in(item, (*path, name), inside)


def merge(values: Sequence[Any], combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Return an object shaped like the first, each tensor combined with its counterparts."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return combine(list(values))
    if isinstance(first, list | tuple):
        return type(first)(merge([v[i] for v in values], combine) for i in range(len(first)))
    if isinstance(first, dict):
        return {name: merge([v[name] for v in values], combine) for name in first}
    if hasattr(first, "__dict__"):
        merged = copy.copy(first)
        merged.__dict__ = {n: merge([vars(v)[n] for v in values], combine) for n in vars(first)}
        return merged
    return first


def split_state(state: Any, sizes: Sequence[int]) -> list[Any]:
    """Return each call's part of an object whose tensors have rows in dimension 0."""

    def part(index: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        return lambda tensors: torch.split(tensors[0], list(sizes))[index]

    return [merge([state], part(index)) for index in range(len(sizes))]


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a dict, list or tuple with their names, in an order of their own."""
    return sorted(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _join_each(values: Sequence[Any], sizes: Sequence[int], always: bool) -> Any:
    first = values[0]
    joined = {
        name: join(
            [value[name] for value in values], infer_kind(item, sizes[0]), sizes, always=always
        )
        for name, item in items_of(first)
    }
    return joined if isinstance(first, dict) else type(first)(joined.values())


def _all_one(values: Sequence[Any]) -> bool:
    return all(value is values[0] for value in values)
