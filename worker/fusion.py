"""Fuses calls of one module that different requests are waiting in, and splits the result.

Pure of scheduling: given suspended calls it tells which may share a forward (``key``), builds the
shared arguments and hands each request its rows of the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_engine.worker.call_rules import (
    FLOAT_TIMESTEPS,
    MERGEABLE_STATES,
    PADDED,
    RULES,
    Kind,
    NoRowsError,
    count_rows,
    fits,
    infer_kind,
)
from omni_engine.worker.joining import (
    CannotSplitError,
    items_of,
    join,
    split,
    split_state,
    tensors_in,
)
from omni_engine.worker.process_state import TorchModes
from omni_engine.worker.value_digest import DigestCache

__all__ = ["Call", "CallReader", "CannotSplitError", "Fusion"]


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
        self._float_timesteps = name in FLOAT_TIMESTEPS
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
        if self._float_timesteps and _is_whole(arguments.get("timestep")):
            arguments["timestep"] = arguments["timestep"].to(torch.float32)
        try:
            rows = count_rows(arguments, self._rules)
        except NoRowsError:
            return Call(self._module, arguments, 1, {}, modes, shareable=False)
        kinds = {name: self._kind(name, value, rows) for name, value in arguments.items()}
        return Call(self._module, arguments, rows, kinds, modes)

    def _kind(self, name: str, value: Any, rows: int) -> Kind:
        rule = self._rules.get(name)
        if rule is not None and fits(rule, value):
            return rule
        return infer_kind(value, rows, known_model=self._known)


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


class Fusion:
    """Groups, fuses and splits calls.

    Args:
        pad_calls_to: joins every forward's calls with copies of the first up to this number, and
            shares forwards only between calls of equal shapes: a call's result then doesn't depend
            by a bit on the calls it shared a forward with. None: no padding.

    Raises:
        ValueError: if ``pad_calls_to`` is less than 1.
    """

    def __init__(self, pad_calls_to: int | None = None) -> None:
        if pad_calls_to is not None and pad_calls_to < 1:
            raise ValueError(f"pad_calls_to must be at least 1, not {pad_calls_to}")
        self.pad_calls_to = pad_calls_to
        self._digests = DigestCache()
        self._written: set[Hashable] = set()

    def key(self, call: Call) -> Hashable:
        """Return what must be equal for two calls to share a forward."""
        if not call.shareable or Kind.OPAQUE in call.kinds.values():
            return ("alone", id(call))
        exact = self.pad_calls_to is not None
        padded = {} if exact else PADDED.get(type(call.module).__name__, {})
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
        return (id(call.module), call.modes, call.rows if exact else None, shared, tokens)

    def fuse(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the arguments of one forward for all calls; they must have equal keys.

        Raises:
            ValueError: if there are more than ``pad_calls_to``.
        """
        if self.pad_calls_to is None:
            _pad_tokens(calls)
        members = self.members(calls)
        if not self._pads(calls[0]) and len(calls) == 1:
            return calls[0].arguments
        sizes = [call.rows for call in members]
        return {
            name: join(
                [call.arguments[name] for call in members],
                kind,
                sizes,
                always=self.pad_calls_to is not None,
            )
            for name, kind in calls[0].kinds.items()
        }

    def split(self, output: Any, calls: Sequence[Call], fused: Mapping[str, Any]) -> list[Any]:
        """Return each call's part of the output of a forward with ``fuse``'s arguments.

        Raises:
            CannotSplitError: if a part of the output has no rows, or the forward wrote to an object
                of a class that isn't known.
        """
        if not self._pads(calls[0]) and len(calls) == 1:
            return [output]
        sizes = [call.rows for call in self.members(calls)]
        self._write_states_back(calls, fused, sizes)
        lists = any(kind is Kind.ROW_LIST for kind in calls[0].kinds.values())
        return split(output, sizes, lists=lists)[: len(calls)]

    def _pads(self, call: Call) -> bool:
        """Whether a call is filled up with copies; one with objects that don't join is not."""
        if self.pad_calls_to is None or not call.shareable:
            return False
        return not any(
            kind is Kind.OPAQUE
            or (kind is Kind.STATE and _is_opaque(self._state_form(call.arguments[name])))
            for name, kind in call.kinds.items()
        )

    def members(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls of a forward, those copies included that fill it up.

        Raises:
            ValueError: if there are more than ``pad_calls_to``.
        """
        if self.pad_calls_to is None or not self._pads(calls[0]):
            return list(calls)
        if len(calls) > self.pad_calls_to:
            raise ValueError(f"{len(calls)} calls don't fit into {self.pad_calls_to}")
        return [*calls, *[calls[0]] * (self.pad_calls_to - len(calls))]

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
                if self.pad_calls_to is None:
                    return "row list"
                return tuple((tuple(item.shape), item.dtype) for item in value)
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
                    for name, item in items_of(value)
                )
            case Kind.STATE | Kind.OPAQUE:
                return self._state_form(value)

    def _state_form(self, value: Any) -> Hashable:
        if value is None:
            return None
        tensors = list(tensors_in(value))
        if type(value).__name__ in MERGEABLE_STATES:
            return ("state", tuple((path, tuple(t.shape[1:])) for path, t in tensors))
        # With padding it would be too late to find out that the forward writes to it.
        if tensors or self.pad_calls_to is not None:
            return ("object", id(value))
        form = ("empty", type(value), self._digests.fields(value))
        return ("object", id(value)) if form in self._written else form

    def _write_states_back(
        self, calls: Sequence[Call], fused: Mapping[str, Any], sizes: list[int]
    ) -> None:
        """Give each request its part of a state object that the forward wrote to."""
        for name, kind in calls[0].kinds.items():
            if kind is not Kind.STATE or fused[name] is None:
                continue
            if type(fused[name]).__name__ in MERGEABLE_STATES:
                for call, part in zip(calls, split_state(fused[name], sizes), strict=False):
                    vars(call.arguments[name]).update(vars(part))
            elif self._was_written(calls[0].arguments[name], fused[name]):
                self._written.add(self._state_form(calls[0].arguments[name]))
                raise CannotSplitError(f"{name} was written to by a shared forward")

    def _was_written(self, before: Any, after: Any) -> bool:
        return before is not after and self._state_form(before) != self._state_form(after)


def _is_opaque(form: Hashable) -> bool:
    return isinstance(form, tuple) and form[0] == "object"


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
