"""Runs step plans: keeps groups of requests, and steps the group whose turn it is."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from omni_engine.protocol.errors import ModelError, OmniError
from omni_engine.protocol.outputs import AppliedLoRA, DiffusionOutput
from omni_engine.protocol.plans import AdapterActivation, StepPlan, StepReport
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_switch import AdapterSwitch
from omni_engine.worker.results import text_of
from omni_engine.worker.step_loop import StepLoop

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Group:
    """Requests that share an adapter and, as far as the engine knows, forwards."""

    loop: StepLoop
    activation: AdapterActivation | None
    applied: list[AppliedLoRA] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """A plan with ticks left to run."""

    plan_id: int
    group_id: int
    ticks: int


class StepRunner:
    """Runs step plans in order on a pipeline that fulfils the stepwise contract.

    Args:
        pipeline: see ``StepPipeline``.
        adapters: switches adapters.
        aborts: requests aborted meanwhile.
        worker_id: reported in each output.
        max_stall_ms: see ``StepLoop``.
        one_at_a_time: see ``StepLoop``.
    """

    def __init__(
        self,
        pipeline: Any,
        adapters: AdapterSwitch,
        aborts: AbortFlags,
        worker_id: str,
        *,
        max_stall_ms: float = math.inf,
        one_at_a_time: bool = False,
    ) -> None:
        self._pipeline, self._adapters, self._aborts = pipeline, adapters, aborts
        self._worker_id = worker_id
        self._max_stall_ms, self._one_at_a_time = max_stall_ms, one_at_a_time
        self._groups: dict[int, _Group] = {}
        self._turns: deque[_Turn] = deque()

    @property
    def has_turn(self) -> bool:
        """Whether a plan has ticks left."""
        return bool(self._turns)

    def add(self, plan: StepPlan) -> None:
        """Take a plan: its requests join their group, its ticks run in turn."""
        group = self._groups.get(plan.group_id)
        if group is None and (plan.requests or plan.ticks):
            loop = StepLoop(
                self._pipeline,
                self._aborts.is_set,
                max_stall_ms=self._max_stall_ms,
                one_at_a_time=self._one_at_a_time,
            )
            group = self._groups[plan.group_id] = _Group(loop, plan.activation)
        if group is not None:
            group.loop.join(plan.requests)
        if plan.ticks:
            self._turns.append(_Turn(plan.plan_id, plan.group_id, plan.ticks))

    def tick(self) -> StepReport:
        """Run one tick of the oldest plan."""
        turn = self._turns[0]
        group = self._groups[turn.group_id]
        started = time.perf_counter()
        report = StepReport(turn.plan_id)
        for other in self._groups.values():
            report.outputs += self._completed(other, other.loop.end_aborted())
        if len(group.loop):
            report.outputs += self._completed(group, self._tick(group))
            report.ticks = 1
            report.states = group.loop.states()
            report.previews = group.loop.previews()
            turn.ticks -= 1
        report.tick_ms = (time.perf_counter() - started) * 1000
        report.plan_done = turn.ticks <= 0 or not len(group.loop)
        if report.plan_done:
            self._turns.popleft()
        self._forget_empty_groups()
        return report

    def _tick(self, group: _Group) -> list[DiffusionOutput]:
        try:
            group.applied = self._adapters.activate(group.activation)
        except OmniError as error:
            return group.loop.fail_all(error)
        try:
            return group.loop.tick()
        except Exception as error:  # boundary: one group; its requests end, the worker goes on
            logger.exception("a tick failed")
            reason = f"the step failed: {text_of(error)}"
            return group.loop.fail_all(ModelError(reason))

    def _completed(self, group: _Group, outputs: list[DiffusionOutput]) -> list[DiffusionOutput]:
        for output in outputs:
            output.metrics.worker = self._worker_id
            output.applied_loras = group.applied
        self._aborts.clear(output.request_id for output in outputs)
        return outputs

    def _forget_empty_groups(self) -> None:
        planned = {turn.group_id for turn in self._turns}
        for group_id, group in list(self._groups.items()):
            if not len(group.loop) and group_id not in planned:
                del self._groups[group_id]
