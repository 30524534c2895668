"""One unmodified pipeline call under way: a greenlet on a view of the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from omni_engine.worker.failures import bare
from omni_engine.worker.observed_scheduler import estimate_clean_sample, replace_sample
from omni_engine.worker.process_state import ProcessState, RandomState
from omni_engine.worker.step_counts import StepCounts
from omni_engine.worker.suspension import Role, Suspended, SuspensionPoint
from omni_engine.worker.views import make_view

logger = logging.getLogger(__name__)

_MOST_THROWS = 3
"""How often a request is asked to end that catches even that."""


class Answer(NamedTuple):
    """What a suspended call is resumed with: its output, or the error it raises there."""

    output: Any = None
    error: BaseException | None = None


class CooperativeCall:
    """One pipeline call under way.

    Args:
        pipe: the shared pipeline; the call runs on a view of it.
        arguments: of its ``__call__``.
        seed: seeds the call's own copy of the global random state.
        owner: the request it belongs to; several calls may have one owner.
        scheduler: the call's own scheduler instead of a copy of the pipeline's.
        preview_every: steps between estimates of the clean sample, None for none.
        replayed: a sample that each scheduler step returns instead of its own.
        replays_one_step: whether its schedules hold one timestep only.

    Attributes:
        pending: what it is suspended in, or None.
        result: what the call returned.
        error: what it raised, bare.
        done: whether it has ended.
        aborted: whether it was ended by ``abort``.
        counts: of its denoiser forwards.
        held: how often its first forward was put off to get into step with others.
        step_index: scheduler steps taken.
        num_steps: scheduler steps in all; 0 before the first.
        clean_sample: an estimate of the result that is due as a preview, or None.
        last_outputs: with ``preview_every``: the latest output of each denoiser.
    """

    def __init__(
        self,
        pipe: Any,
        arguments: dict[str, Any],
        seed: int,
        owner: str,
        *,
        scheduler: Any = None,
        preview_every: int | None = None,
        replayed: torch.Tensor | None = None,
        replays_one_step: bool = False,
    ) -> None:
        self.owner = owner
        self.pending: Suspended | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = self.aborted = False
        self.counts = StepCounts()
        self.step_index = self.num_steps = self.held = 0
        self.clean_sample: torch.Tensor | None = None
        self.last_outputs: dict[SuspensionPoint, Any] = {}
        self._preview_every, self._replayed = preview_every, replayed
        self.replays_one_step = replays_one_step
        self._state = ProcessState(ProcessState.current().modes, RandomState.seeded(seed))
        self._greenlet: Any = greenlet(self._run)
        self._greenlet.call = self
        self._view = make_view(pipe, scheduler=scheduler, noise_seed=seed)
        self._arguments = arguments

    @property
    def waits_for(self) -> Role | None:
        """What it is suspended in; None once it has ended."""
        return None if self.pending is None else self.pending.point.role

    def suspend(self, suspended: Suspended) -> Any:
        """Leave the request in a call; returns that call's output when it is resumed."""
        self.pending = suspended
        return self._greenlet.parent.switch()

    def resume(self, answer: Answer | None = None) -> None:
        """Enter the request with what its call came to and run it to its next call or its end."""
        answer = answer or Answer()
        if answer.error is not None:
            error = bare(answer.error)
            self._enter(lambda: self._greenlet.throw(error))
            return
        pending = self.pending
        if self._preview_every and pending is not None and pending.point.role is Role.DENOISE:
            self.last_outputs[pending.point] = answer.output
        self._enter(lambda: self._greenlet.switch(answer.output))

    def abort(self) -> None:
        """Unwind the request; its tensors are free when this returns."""
        for _ in range(_MOST_THROWS):
            if self.done:
                return
            self._enter(lambda: self._greenlet.throw(GreenletExit()))
        logger.warning("request %s: its pipeline can't be stopped and is left behind", self.owner)
        self.pending = self._greenlet = None
        self.done = self.aborted = True

    def on_step(
        self, scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """Count a step that the view's scheduler took; returns what the pipeline gets of it."""
        self.step_index += 1
        if not self.num_steps:
            self.num_steps = vars(self._view).get("_num_timesteps") or len(scheduler.timesteps)
        if self._replayed is not None:
            return replace_sample(result, self._replayed)
        if self._preview_every and self.step_index % self._preview_every == 0:
            self.clean_sample = estimate_clean_sample(scheduler, args, kwargs)
        return result

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
            if self.done:
                self._greenlet = None  # it refers back to this call

    def _run(self, _: Any) -> None:
        try:
            self.result = self._view(**self._arguments)
        except GreenletExit:
            self.aborted = True
        except BaseException as error:  # noqa: BLE001  # boundary: one request, even if it calls exit()
            self.error = bare(error)
        finally:
            self.done = True
            self.clean_sample = None
            self.last_outputs.clear()
            del self._view, self._arguments
