"""Finds out how the arguments of a model that no table knows combine, by watching two calls.

A pipeline is called with two and with three equal prompts. What grows from two to three has rows,
what stays is shared. Shapes can't tell a model that reads only the first row of an argument: of
whole numbers and masks, which are the usual ones, requests must have equal rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.worker.call_rules import RULES, Kind, infer_kind
from omni_engine.worker.fusion import CallReader
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.probe import probe_arguments
from omni_engine.worker.process_state import ProcessState, RandomState
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.views import make_view

logger = logging.getLogger(__name__)

Rules = dict[str, Kind]

_FEW, _MORE = 2, 3
_SEED = 0


def observed_rules(
    pipe: Any,
    modules: Sequence[torch.nn.Module],
    capabilities: PipelineCapabilities | None = None,
) -> dict[torch.nn.Module, Rules]:
    """Observe those of a pipeline's modules that the table doesn't know.

    Args:
        pipe: a loaded diffusers pipeline.
        modules: whose forwards requests may share.
        capabilities: what the pipeline takes, if that was found out already.

    Returns:
        For ``CallReader(observed=...)``; nothing for modules that couldn't be observed.
    """
    unknown = [module for module in modules if type(module).__name__ not in RULES]
    if not unknown:
        return {}
    known = capabilities or diffusers_capabilities(pipe, FusionReport(False, ""))
    for inputs in dict.fromkeys((known.required_inputs, known.inputs)):
        arguments_for = functools.partial(probe_arguments, pipe, capabilities=known, inputs=inputs)
        if found := observe(pipe, unknown, arguments_for):
            return found
    return {}


def observe(
    pipe: Any,
    modules: Sequence[torch.nn.Module],
    arguments_for: Callable[[int], dict[str, Any]],
) -> dict[torch.nn.Module, Rules]:
    """Return the kinds of the arguments of each module's forward, as two calls show them.

    Args:
        pipe: a diffusers pipeline; each call runs on a view of it.
        modules: whose forwards to watch; their forwards are the old ones afterwards.
        arguments_for: gives the pipeline's call arguments for n prompts; the calls should differ
            in n only.

    Returns:
        Only modules whose rows could be told apart: {} if the pipeline can't be called that way.
    """
    try:
        few, more = (_watch(pipe, modules, arguments_for(count)) for count in (_FEW, _MORE))
    except Exception as error:  # noqa: BLE001  # boundary: a probe; inference decides instead
        logger.info("%s can't be observed: %s: %s", type(pipe).__name__, type(error).__name__,
                    error)  # fmt: skip
        return {}
    found = {}
    for module in modules:
        if rules := _rules(module, few[module], more[module]):
            found[module] = rules
        else:
            logger.info("no rows observed in the calls of %s", type(module).__name__)
    return found


# -- watching


@dataclass(frozen=True, slots=True)
class _Object:
    """Stands for an object of an unknown class."""

    kind: type


Watched = dict[torch.nn.Module, list[dict[str, Any]]]
"""Arguments of each call of each module, with tensors that have no data."""


def _watch(pipe: Any, modules: Sequence[torch.nn.Module], arguments: Mapping[str, Any]) -> Watched:
    watched: Watched = {module: [] for module in modules}
    state = ProcessState.current()
    RandomState.seeded(_SEED).apply()
    try:
        with contextlib.ExitStack() as stack:
            for module, calls in watched.items():
                stack.enter_context(_recording(module, calls))
            make_view(pipe)(**arguments)
    finally:
        state.apply()
    return watched


@contextlib.contextmanager
def _recording(module: torch.nn.Module, calls: list[dict[str, Any]]) -> Iterator[None]:
    original, wrapped = module.forward, module.__dict__.get("forward")
    reader = CallReader(module, original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = reader.read(args, kwargs)
        if not call.positional:
            calls.append({name: _outline(value) for name, value in call.arguments.items()})
        return original(*args, **kwargs)

    forward.__signature__ = reader.signature  # type: ignore[attr-defined]
    module.forward = forward
    try:
        yield
    finally:
        module.__dict__.pop("forward")
        if wrapped is not None:
            module.forward = wrapped


def _outline(value: Any) -> Any:
    """Return a value with its tensors replaced by ones without data."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        items = [_outline(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    return _Object(type(value)) if infer_kind(value, 1) is Kind.STATE else value


# -- comparing


def _rules(
    module: torch.nn.Module, few: list[dict[str, Any]], more: list[dict[str, Any]]
) -> Rules | None:
    """Return the kinds that all of a module's calls agree on; None if it has no rows."""
    if len(few) != len(more):
        return None  # prompts are called one after the other
    trusted = type(module).__name__ in RULES
    found: dict[str, set[Kind]] = {}
    for one, other in zip(few, more, strict=True):
        rows = _rows(one, other)
        if rows is None or set(one) != set(other):
            return None
        for name in one:
            if one[name] is not None or other[name] is not None:
                kind = _Comparison(rows, trusted).kind(one[name], other[name])
                found.setdefault(name, set()).add(kind)
    rules = {name: kinds.pop() for name, kinds in found.items() if len(kinds) == 1}
    unclear = {name: Kind.OPAQUE for name, kinds in found.items() if Kind.OPAQUE in kinds}
    return rules | unclear or None


def _rows(few: Mapping[str, Any], more: Mapping[str, Any]) -> int | None:
    """Return the rows of the call with fewer prompts: the shortest of what grows with them."""
    lengths = [
        length
        for name, value in few.items()
        if (length := _length(value)) is not None and _grows(length, _length(more.get(name)))
    ]
    return min(lengths, default=None)


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.ndim >= 2 else None
    return len(value) if isinstance(value, list) else None


def _grows(few: int, more: int | None) -> bool:
    return more is not None and few > 0 and few * _MORE == more * _FEW


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Tells kinds from a value with fewer and with more prompts.

    Attributes:
        rows: of the call with fewer.
        trusted: whether whole numbers and masks with rows are rows.
    """

    rows: int
    trusted: bool

    def kind(self, few: Any, more: Any) -> Kind:
        if type(few) is not type(more):
            return Kind.OPAQUE
        if isinstance(few, torch.Tensor):
            return self._of_tensors(few, more)
        if isinstance(few, list) and len(few) != len(more):
            return self._of_row_lists(few, more)
        if isinstance(few, list | tuple | dict):
            return self._of_containers(few, more)
        if isinstance(few, _Object):
            return Kind.STATE
        return Kind.SAME if few == more else Kind.OPAQUE

    def _of_tensors(self, few: torch.Tensor, more: torch.Tensor) -> Kind:
        if few.ndim != more.ndim or few.dtype != more.dtype:
            return Kind.OPAQUE
        if few.shape == more.shape:
            return Kind.EXPAND if few.shape in ((), (1,)) else Kind.SAME
        grown = [d for d in range(few.ndim) if few.shape[d] != more.shape[d]]
        if len(grown) > 1 or not _grows(few.shape[grown[0]], more.shape[grown[0]]):
            return Kind.OPAQUE
        whole = not few.is_floating_point() and few.ndim > 1 and not self.trusted
        if grown == [0] and few.shape[0] % self.rows == 0:
            return Kind.SAME_ROWS if whole else Kind.ROWS
        if grown == [1] and few.shape[1] == self.rows and not whole:
            return Kind.ROWS_1
        return Kind.OPAQUE

    def _of_row_lists(self, few: list[Any], more: list[Any]) -> Kind:
        if len(few) != self.rows or not _grows(len(few), len(more)):
            return Kind.OPAQUE
        kinds = {self.kind(few[0], item) for item in more}
        if kinds - {Kind.SAME, Kind.EXPAND}:
            return Kind.OPAQUE
        tensors = all(isinstance(item, torch.Tensor) for item in few)
        floats = tensors and all(item.is_floating_point() for item in few)
        return Kind.ROW_LIST if floats or (tensors and self.trusted) else Kind.SAME_LIST

    def _of_containers(self, few: Any, more: Any) -> Kind:
        if len(few) != len(more) or (isinstance(few, dict) and set(few) != set(more)):
            return Kind.OPAQUE
        names = list(few) if isinstance(few, dict) else range(len(few))
        kinds = {name: self.kind(few[name], more[name]) for name in names}
        if set(kinds.values()) <= {Kind.SAME, Kind.EXPAND}:
            return Kind.SAME
        clear = all(self._is_inferred(few[name], kind) for name, kind in kinds.items())
        return Kind.EACH if clear else Kind.OPAQUE

    def _is_inferred(self, item: Any, kind: Kind) -> bool:
        """Whether inference, which judges the items of a container, always agrees about one."""
        if kind is Kind.SAME:
            return not isinstance(item, torch.Tensor | list | tuple | dict)
        return kind in (Kind.ROWS, Kind.EXPAND, Kind.EACH) and kind is infer_kind(item, self.rows)
