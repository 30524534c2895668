"""Runs step plans: keeps groups of requests, and steps the group whose turn it is."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from omni_engine.protocol.adapters import AdapterActivation
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepPlan, StepReport
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import AdapterAccess, under_shared
from omni_engine.worker.failures import log_failure, pipeline_error
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.progress import main_thread
from omni_engine.worker.step_calls import result_of
from omni_engine.worker.step_loop import StepLoop

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Group:
    """Requests that, as far as the engine knows, share forwards.

    Attributes:
        loop: runs them.
        activations: what they run under; one, unless the stage mixes adapters.
    """

    loop: StepLoop
    activations: set[AdapterActivation | None] = field(default_factory=set)


@dataclass(slots=True)
class _Turn:
    """A plan with ticks left to run, and when it came."""

    plan_id: int
    group_id: int
    ticks: int
    since: float = field(default_factory=time.perf_counter)


class StepRunner:
    """Runs step plans in order on a pipeline that fulfils the stepwise contract.

    A plan whose adapters are not loaded yet lets later ones go first. If all that it lacks is room
    that the adapters of others take, it gets it when nobody else can go on, or after
    ``max_skip_ms``: requests may each hold what the other one waits for, or come in a stream that
    never ends.

    Args:
        pipeline: see ``StepPipeline``.
        adapters: makes the requests' adapters active.
        aborts: requests aborted meanwhile.
        worker_id: reported in each output.
        max_stall_ms: see ``StepLoop``.
        max_skip_ms: how long a plan is passed over at most that lacks nothing but room.
        one_at_a_time: see ``StepLoop``.
        memory: see ``StepLoop``.
    """

    def __init__(
        self,
        pipeline: Any,
        adapters: AdapterAccess,
        aborts: AbortFlags,
        worker_id: str,
        *,
        max_stall_ms: float = math.inf,
        max_skip_ms: float = math.inf,
        one_at_a_time: bool = False,
        memory: MemoryCaps | None = None,
    ) -> None:
        self._memory = memory or MemoryCaps()
        self._pipeline, self._adapters, self._aborts = pipeline, adapters, aborts
        self._worker_id = worker_id
        self._max_skip_ms = max_skip_ms
        self._max_stall_ms, self._one_at_a_time = max_stall_ms, one_at_a_time
        self._groups: dict[int, _Group] = {}
        self._turns: deque[_Turn] = deque()

    @property
    def has_turn(self) -> bool:
        """Whether a plan has ticks left that need not wait for an adapter to be loaded."""
        return self._next_turn() is not None

    def add(self, plan: StepPlan) -> None:
        """Take a plan: its requests join their group, its ticks run in turn."""
        group = self._groups.get(plan.group_id)
        if group is None and (plan.requests or plan.ticks):
            loop = StepLoop(
                self._pipeline,
                self._aborts.is_set,
                max_stall_ms=self._max_stall_ms,
                one_at_a_time=self._one_at_a_time,
                adapters=self._adapters,
                memory=self._memory,
            )
            group = self._groups[plan.group_id] = _Group(loop)
        if group is not None:
            for request, activation in zip(plan.requests, plan.activations, strict=True):
                self._adapters.assign(request.request_id, activation)
            group.activations.update(plan.activations)
            if plan.requests:
                ids = [request.request_id for request in plan.requests]
                logger.info("plan %d: %d join group %d", plan.plan_id, len(ids), plan.group_id)
                logger.debug("plan %d: %s", plan.plan_id, ids)
            group.loop.join(plan.requests)
        if plan.ticks:
            self._turns.append(_Turn(plan.plan_id, plan.group_id, plan.ticks))

    def tick(self) -> StepReport:
        """Run one tick of the oldest plan that need not wait for an adapter to be loaded."""
        turn = self._next_turn() or self._turns[0]
        group = self._groups[turn.group_id]
        started = time.perf_counter()
        report = StepReport(turn.plan_id)
        for other in self._groups.values():
            report.outputs += self._completed(other.loop.end_aborted())
        if len(group.loop):
            report.outputs += self._completed(self._tick(group))
            report.ticks = 1
            report.states = group.loop.states()
            report.previews = group.loop.previews()
            turn.ticks -= 1
        report.forwards = main_thread.forwards
        report.tick_ms = (time.perf_counter() - started) * 1000
        report.plan_done = turn.ticks <= 0 or not len(group.loop)
        if report.plan_done:
            self._turns.remove(turn)
        self._forget_empty_groups()
        return report

    def _next_turn(self) -> _Turn | None:
        cramped: _Turn | None = None
        for turn in self._turns:
            if self._is_runnable(turn):
                return turn
            if cramped is None and self._groups[turn.group_id].loop.cramped:
                cramped = turn
                if (time.perf_counter() - turn.since) * 1000 >= self._max_skip_ms:
                    break
        return cramped

    def _is_runnable(self, turn: _Turn) -> bool:
        loop = self._groups[turn.group_id].loop
        return not len(loop) or loop.runnable

    def _tick(self, group: _Group) -> list[DiffusionOutput]:
        outputs: list[DiffusionOutput] | BaseException = result_of(self._tick_under, group)
        if isinstance(outputs, BaseException):  # one group's requests end, the worker goes on
            return group.loop.fail_all(pipeline_error(outputs))
        return outputs

    def _tick_under(self, group: _Group) -> list[DiffusionOutput]:
        with under_shared(self._adapters, group.activations):
            return group.loop.tick()

    def _completed(self, outputs: list[DiffusionOutput]) -> list[DiffusionOutput]:
        for output in outputs:
            output.metrics.worker = self._worker_id
            if output.error is None:
                output.applied_loras = self._adapters.applied(output.request_id)
            else:
                log_failure(output.request_id, output.error)
        self._aborts.clear(output.request_id for output in outputs)
        self._adapters.release(output.request_id for output in outputs)
        return outputs

    def _forget_empty_groups(self) -> None:
        planned = {turn.group_id for turn in self._turns}
        for group_id, group in list(self._groups.items()):
            if not len(group.loop) and group_id not in planned:
                del self._groups[group_id]
