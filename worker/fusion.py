"""Fuses calls of one module that different requests are waiting in, and splits the result.

Pure of scheduling: given suspended calls it tells which may share a forward (``key``), builds the
shared arguments and hands each request its rows of the output.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_engine.worker.call_rules import (
    MERGEABLE_STATES,
    PADDED,
    RULES,
    Kind,
    NoRowsError,
    count_rows,
    infer_kind,
)
from omni_engine.worker.process_state import TorchModes
from omni_engine.worker.value_digest import DigestCache


class CannotSplitError(TypeError):
    """An output of a fused forward has no rows to hand out."""


@dataclass(slots=True)
class Call:
    """A call of a module's forward, with how its arguments combine.

    Attributes:
        module: whose forward is called.
        arguments: by parameter name.
        rows: rows of the call.
        kinds: how each argument combines.
        modes: torch modes the caller has on.
        shareable: False if the call's form is not understood: it runs alone, always exact.
        positional: arguments that have no name; only a call that is not shareable has any.
    """

    module: torch.nn.Module
    arguments: dict[str, Any]
    rows: int
    kinds: dict[str, Kind]
    modes: TorchModes
    shareable: bool = True
    positional: tuple[Any, ...] = ()


class CallReader:
    """Turns positional and keyword arguments of one module's forward into a ``Call``.

    Args:
        module: the module.
        forward: its original forward.
        observed: kinds found by a probe call; the table goes before them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        observed: Mapping[str, Kind] | None = None,
    ) -> None:
        self.signature = inspect.signature(forward)
        self._module = module
        parameters = self.signature.parameters.values()
        nameless = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        self._has_nameless = any(p.kind in nameless for p in parameters)
        self._variadic = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        name = type(module).__name__
        self._known = name in RULES
        self._rules = {**(observed or {}), **RULES.get(name, {})}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call; one whose form is not understood is marked as not shareable."""
        modes = TorchModes.current()
        bound = self.signature.bind(*args, **kwargs)
        if self._has_nameless:
            return Call(self._module, kwargs, 1, {}, modes, shareable=False, positional=args)
        arguments = dict(bound.arguments)
        if self._variadic is not None:
            arguments |= arguments.pop(self._variadic, {})
        try:
            rows = count_rows(arguments, self._rules)
        except NoRowsError:
            return Call(self._module, arguments, 1, {}, modes, shareable=False)
        kinds = {
            name: self._rules.get(name) or infer_kind(value, rows, known_model=self._known)
            for name, value in arguments.items()
        }
        return Call(self._module, arguments, rows, kinds, modes)


class Fusion:
    """Groups, fuses and splits calls."""

    def __init__(self) -> None:
        self._digests = DigestCache()

    def key(self, call: Call) -> Hashable:
        """Return what must be equal for two calls to share a forward."""
        if not call.shareable:
            return ("alone", id(call))
        padded = PADDED.get(type(call.module).__name__, {})
        apart = set(padded) | set(padded.values())
        shared = tuple(
            (name, self._form(value, call.kinds[name], call.rows))
            for name, value in sorted(call.arguments.items())
            if name not in apart
        )
        tokens = tuple(
            (name, call.arguments[name].shape[2:], call.arguments[name].dtype)
            for name in padded
            if name in call.arguments
        )
        return (id(call.module), call.modes, shared, tokens)

    def fuse(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the arguments of one forward for all calls; they must have equal keys."""
        _pad_tokens(calls)
        if len(calls) == 1:
            return calls[0].arguments
        sizes = [call.rows for call in calls]
        return {
            name: _join([call.arguments[name] for call in calls], kind, sizes)
            for name, kind in calls[0].kinds.items()
        }

    def split(self, output: Any, calls: Sequence[Call], fused: Mapping[str, Any]) -> list[Any]:
        """Return each call's part of the output of a forward with ``fuse``'s arguments.

        Raises:
            CannotSplitError: if a part of the output has no rows.
        """
        if len(calls) == 1:
            return [output]
        sizes = [call.rows for call in calls]
        _write_states_back(calls, fused, sizes)
        lists = any(kind is Kind.ROW_LIST for kind in calls[0].kinds.values())
        return _split(output, sizes, lists)

    def _form(self, value: Any, kind: Kind, rows: int) -> Hashable:
        if value is None:
            return None
        match kind:
            case Kind.ROWS:
                return (tuple(value.shape[1:]), value.dtype, value.shape[0] // rows)
            case Kind.ROWS_1:
                return (value.shape[0], tuple(value.shape[2:]), value.dtype)
            case Kind.EXPAND:
                return ("scalar", value.dtype)
            case Kind.ROW_LIST:
                return "row list"
            case Kind.SAME:
                return self._digests.digest(value)
            case Kind.SAME_ROWS:
                return self._digests.equal_rows(value)
            case Kind.SAME_LIST:
                forms = {self._digests.digest(item) for item in value}
                return forms.pop() if len(forms) == 1 else ("object", id(value))
            case Kind.EACH:
                return tuple(
                    (name, self._form(item, infer_kind(item, rows), rows))
                    for name, item in _items(value)
                )
            case Kind.STATE:
                return _state_form(value)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return sorted(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _state_form(value: Any) -> Hashable:
    tensors = list(_tensors(value))
    if type(value).__name__ in MERGEABLE_STATES:
        return ("state", tuple((path, tuple(t.shape[1:])) for path, t in tensors))
    if not tensors and not isinstance(value, torch.Tensor):
        return ("empty", type(value))
    return ("object", id(value))


def _tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield the tensors inside an object with where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, index))
    elif isinstance(value, dict) or hasattr(value, "__dict__"):
        for name, item in (value if isinstance(value, dict) else vars(value)).items():
            yield from _tensors(item, (*path, name))


def _merge(values: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Return an object shaped like the first, each tensor joined with its counterparts."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return join(list(values))
    if isinstance(first, list | tuple):
        return type(first)(_merge([v[i] for v in values], join) for i in range(len(first)))
    if isinstance(first, dict):
        return {name: _merge([v[name] for v in values], join) for name in first}
    if hasattr(first, "__dict__"):
        merged = copy.copy(first)
        merged.__dict__ = {n: _merge([vars(v)[n] for v in values], join) for n in vars(first)}
        return merged
    return first


def _join(values: list[Any], kind: Kind, sizes: list[int]) -> Any:
    first = values[0]
    if first is None:
        return None
    match kind:
        case Kind.ROWS | Kind.SAME_ROWS:
            return torch.cat(values)
        case Kind.ROWS_1:
            return torch.cat(values, 1)
        case Kind.EXPAND:
            if first.ndim == 0 and all(value is first for value in values):
                return first
            rows = zip(values, sizes, strict=True)
            return torch.cat([value.reshape(1).expand(n) for value, n in rows])
        case Kind.ROW_LIST | Kind.SAME_LIST:
            return [item for value in values for item in value]
        case Kind.SAME:
            return first
        case Kind.EACH:
            return _join_each(values, sizes)
        case Kind.STATE:
            return first if all(v is first for v in values) else _merge(values, torch.cat)


def _join_each(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    joined = {
        name: _join([value[name] for value in values], infer_kind(item, sizes[0]), sizes)
        for name, item in _items(first)
    }
    return joined if isinstance(first, dict) else type(first)(joined.values())


def _pad_tokens(calls: Sequence[Call]) -> None:
    """Pad token arguments to the longest and make the masks that hide the padding."""
    padded = PADDED.get(type(calls[0].module).__name__, {})
    if len(calls) == 1:
        return
    for tokens, mask in padded.items():
        lengths = {call.arguments[tokens].shape[1] for call in calls}
        if len(lengths) == 1 and all(call.arguments.get(mask) is None for call in calls):
            continue
        for call in calls:
            _pad_call(call, tokens, mask, max(lengths))


def _pad_call(call: Call, tokens: str, mask: str, length: int) -> None:
    states, shown = call.arguments[tokens], call.arguments.get(mask)
    missing = length - states.shape[1]
    if shown is None:
        shown = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
    call.arguments[tokens] = torch.nn.functional.pad(states, (0, 0, 0, missing))
    call.arguments[mask] = torch.nn.functional.pad(shown, (0, missing))
    call.kinds[mask] = Kind.ROWS


def _write_states_back(calls: Sequence[Call], fused: Mapping[str, Any], sizes: list[int]) -> None:
    """Give each request its part of a state object that the forward wrote to."""
    for name, kind in calls[0].kinds.items():
        if kind is Kind.STATE and type(fused[name]).__name__ in MERGEABLE_STATES:
            for call, part in zip(calls, _split_state(fused[name], sizes), strict=True):
                vars(call.arguments[name]).update(vars(part))


def _split_state(state: Any, sizes: list[int]) -> list[Any]:
    def part(index: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        return lambda tensors: torch.split(tensors[0], sizes)[index]

    return [_merge([state], part(index)) for index in range(len(sizes))]


def _split(output: Any, sizes: list[int], lists: bool) -> list[Any]:
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
        parts = [_split(item, sizes, lists) for item in output]
        return [type(output)(part[i] for part in parts) for i in range(len(sizes))]
    if isinstance(output, dict):  # diffusers' output classes are dicts
        parts_by_name = {name: _split(item, sizes, lists) for name, item in output.items()}
        return [
            type(output)(**{name: part[i] for name, part in parts_by_name.items()})
            for i in range(len(sizes))
        ]
    return _split_state(output, sizes)
