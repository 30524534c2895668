"""Cooperative stepping: many unmodified pipeline calls under way at once, sharing forwards.

Each request runs its pipeline's ``__call__`` in a greenlet, on a view of the pipeline. The forward
of the shared modules is wrapped on the instance: a call from inside a request's greenlet is
suspended with its arguments. A tick groups the suspended calls, runs one forward per group, and
resumes every greenlet with its part of the result, up to its next call or its end.

A call whose form is not understood runs alone; when a fused forward fails its members run alone and
only the culprit gets the error. The wrapper must stay outside of anything compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from omni_engine.worker.fusion import Call, CallReader, Fusion
from omni_engine.worker.process_state import ProcessState, RandomState
from omni_engine.worker.views import is_exclusive, make_view

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepCounts:
    """What a request's forwards cost and whom it shared them with."""

    forwards: int = 0
    shared_with: int = 0
    largest: int = 0

    def add(self, requests: int) -> None:
        """Count one forward that ``requests`` requests took part in."""
        self.forwards += 1
        self.shared_with += requests
        self.largest = max(self.largest, requests)


class CooperativeCall:
    """One pipeline call under way.

    Args:
        pipe: the shared pipeline; the call runs on a view of it.
        arguments: of its ``__call__``.
        seed: seeds the call's own copy of the global random state.
        owner: the request it belongs to; several calls may have one owner.

    Attributes:
        pending: the forward it is suspended in, or None.
        result: what the call returned.
        error: what it raised; its traceback is dropped, since it would keep tensors alive.
        done: whether it has ended.
        aborted: whether it was ended by ``abort``.
        counts: of its forwards.
    """

    def __init__(self, pipe: Any, arguments: dict[str, Any], seed: int, owner: str) -> None:
        self.owner = owner
        self.pending: Call | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = self.aborted = False
        self.counts = StepCounts()
        self._state = ProcessState(ProcessState.current().modes, RandomState.seeded(seed))
        self._greenlet: Any = greenlet(self._run)
        self._greenlet.call = self
        self._view, self._arguments = make_view(pipe), arguments

    def suspend(self, call: Call) -> Any:
        """Leave the request in a forward; returns that forward's output when it is resumed."""
        self.pending = call
        return self._greenlet.parent.switch()

    def resume(self, output: Any = None) -> None:
        """Enter the request with a forward's output and run it to its next forward or its end."""
        self._enter(lambda: self._greenlet.switch(output))

    def fail(self, error: BaseException) -> None:
        """Enter the request with an error where it waits for a forward."""
        self._enter(lambda: self._greenlet.throw(error))

    def abort(self) -> None:
        """Unwind the request; its tensors are free when this returns."""
        if not self.done:
            self._enter(lambda: self._greenlet.throw(GreenletExit()))

    def _enter(self, switch: Callable[[], Any]) -> None:
        hub = ProcessState.current()
        self.pending = None
        self._greenlet.parent = getcurrent()
        self._state.apply()
        try:
            switch()
        finally:
            self._state = ProcessState.current()
            hub.apply()

    def _run(self, _: Any) -> None:
        try:
            self.result = self._view(**self._arguments)
        except GreenletExit:
            self.aborted = True
        except Exception as error:  # noqa: BLE001  # boundary: one request
            self.error = error.with_traceback(None)
        finally:
            self.done = True
            del self._view, self._arguments


class CooperativeStepper:
    """Runs pipeline calls together, one forward per group and tick.

    Args:
        pipe: a diffusers pipeline.
        modules: those whose forwards are shared; they are wrapped until ``close``.
        max_rows: most rows of one forward.
        fused: False runs every call's forwards alone: always exact.
    """

    def __init__(
        self,
        pipe: Any,
        modules: Iterable[torch.nn.Module],
        *,
        max_rows: int = 64,
        fused: bool = True,
    ) -> None:
        self._pipe = pipe
        self._max_rows = max_rows
        self.fused = fused and not is_exclusive(pipe)
        self._fusion = Fusion()
        self._forwards: dict[torch.nn.Module, Callable[..., Any]] = {}
        self.live: list[CooperativeCall] = []
        self.forwards = self.rows = self.fallbacks = self.direct_forwards = 0
        for module in modules:
            if module not in self._forwards:
                self._wrap(module)

    def start(self, arguments: dict[str, Any], seed: int, owner: str) -> CooperativeCall:
        """Begin a call and run it to its first shared forward; see ``CooperativeCall``."""
        call = CooperativeCall(self._pipe, arguments, seed, owner)
        call.resume()
        if not call.done:
            self.live.append(call)
        return call

    def tick(self) -> None:
        """Run one forward for every group of suspended calls and resume them."""
        groups: dict[Any, list[CooperativeCall]] = {}
        for call in self.live:
            if call.pending is not None:
                groups.setdefault(self._key(call.pending), []).append(call)
        for members in groups.values():
            for part in self._parts(members):
                self._run_group(part)
        self.live = [call for call in self.live if not call.done]

    def abort(self, call: CooperativeCall) -> None:
        """End a call; its slot and tensors are free when this returns."""
        call.abort()
        self.live = [other for other in self.live if not other.done]

    def run(self) -> None:
        """Tick until every call has ended."""
        while self.live:
            self.tick()

    def close(self) -> None:
        """End all calls and restore the modules' forwards."""
        for call in list(self.live):
            self.abort(call)
        for module in self._forwards:
            module.__dict__.pop("forward", None)
        self._forwards.clear()

    def _wrap(self, module: torch.nn.Module) -> None:
        original = module.forward
        reader = CallReader(module, original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = getattr(getcurrent(), "call", None)
            if call is None:
                self.direct_forwards += 1
                return original(*args, **kwargs)
            return call.suspend(reader.read(args, kwargs))

        forward.__signature__ = reader.signature  # type: ignore[attr-defined]
        self._forwards[module] = original
        module.forward = forward

    def _key(self, call: Call) -> Any:
        if not self.fused:
            return id(call)
        try:
            return self._fusion.key(call)
        except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            logger.warning("a call of %s can't be shared: %s", type(call.module).__name__, error)
            return id(call)

    def _parts(self, members: list[CooperativeCall]) -> list[list[CooperativeCall]]:
        """Split a group so that no forward has more than ``max_rows`` rows."""
        parts: list[list[CooperativeCall]] = []
        rows = self._max_rows + 1
        for member in members:
            more = member.pending.rows if member.pending is not None else 0
            if rows + more > self._max_rows:
                parts.append([])
                rows = 0
            parts[-1].append(member)
            rows += more
        return parts

    def _run_group(self, members: Sequence[CooperativeCall]) -> None:
        calls = [member.pending for member in members if member.pending is not None]
        try:
            outputs = self._forward(calls)
        except Exception as error:  # noqa: BLE001  # boundary: one batch
            if len(members) > 1:
                self.fallbacks += 1
                logger.warning("a forward shared by %d failed (%s); each runs alone",
                               len(members), error)  # fmt: skip
                for member in members:
                    self._run_group([member])
                return
            members[0].fail(error.with_traceback(None))
            return
        requests = len({member.owner for member in members})
        for member, output in zip(members, outputs, strict=True):
            member.counts.add(requests)
            member.resume(output)

    def _forward(self, calls: Sequence[Call]) -> list[Any]:
        hub = ProcessState.current()
        calls[0].modes.apply()
        try:
            arguments = self._fusion.fuse(calls)
            output = self._forwards[calls[0].module](*calls[0].positional, **arguments)
            parts = self._fusion.split(output, calls, arguments)
        finally:
            hub.modes.apply()
        self.forwards += 1
        self.rows += sum(call.rows for call in calls)
        return parts
