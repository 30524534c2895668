"""Runs requests on a pipeline as a worker does, and watches what becomes of them.

The step runner, step loop and abort flags are those of a worker; the pipeline is the one under
test behind ``Watched``, which passes everything on.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepPlan, StepReport
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import StepBatch, StepRequestState
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import NoAdapters
from omni_engine.worker.step_runner import StepRunner

_MOST_TICKS = 10_000
_BATCHED = {"prepare_encode_batch": "prepare_encode", "post_decode_batch": "post_decode"}

Reference = weakref.ReferenceType[Any]


class InjectedError(Exception):
    """What ``Watched`` raises in the place of a pipeline."""


class WatchedRequest(DiffusionRequest):
    """A request that can be referred to weakly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Injection:
    """A method of the stepwise contract that is to fail for one request."""

    method: str
    request_id: str

    def hits(self, method: str, state: StepRequestState) -> bool:
        """Whether a method is to fail for a state; a scheduler step not before the second."""
        early = method == "step_scheduler" and state.step_index < min(1, state.num_steps - 1)
        return (method, state.request_id) == (self.method, self.request_id) and not early

    def error(self) -> InjectedError:
        """Return what to raise."""
        return InjectedError(f"injected into {self.method}")


class Watched:
    """A pipeline, with weak references to its states and a record of their progress.

    Args:
        pipeline: the pipeline; everything is passed on to it.
        injection: what is to fail.

    Attributes:
        states: of each request, by id.
        progress: (request id, row) to (step_index, num_steps) after each scheduler step.
    """

    def __init__(self, pipeline: Any, injection: Injection | None = None) -> None:
        self._pipeline, self._injection = pipeline, injection
        self.states: dict[str, list[Reference]] = {}
        self.progress: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._pipeline, name)
        if name not in _BATCHED:
            return found

        def batched(states: Sequence[StepRequestState]) -> list[Any]:
            results = found(states)
            return [
                self._injected(_BATCHED[name], state) or result
                for state, result in zip(states, results, strict=True)
            ]

        return batched

    def make_state(self, request: DiffusionRequest, row: int) -> StepRequestState:
        """Make a state as the pipeline does, and remember it."""
        state: StepRequestState = getattr(self._pipeline, "make_state", StepRequestState)(
            request, row
        )
        self.states.setdefault(request.request_id, []).append(weakref.ref(state))
        return state

    def prepare_encode(self, state: StepRequestState) -> None:
        """Pass on; an injected failure comes after the pipeline's own work."""
        self._pipeline.prepare_encode(state)
        self._fail_if_injected("prepare_encode", state)

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        """Pass on; an injected failure hits the whole batch that holds the request."""
        for state in states:
            self._fail_if_injected("denoise_step", state)
        return self._pipeline.denoise_step(batch, states)

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        """Pass on and record the progress."""
        self._fail_if_injected("step_scheduler", state)
        self._pipeline.step_scheduler(state, noise_pred)
        record = self.progress.setdefault((state.request_id, state.row), [])
        record.append((state.step_index, state.num_steps))

    def post_decode(self, state: StepRequestState) -> Any:
        """Pass on."""
        self._fail_if_injected("post_decode", state)
        return self._pipeline.post_decode(state)

    def _injected(self, method: str, state: StepRequestState) -> InjectedError | None:
        hit = self._injection is not None and self._injection.hits(method, state)
        return self._injection.error() if hit and self._injection is not None else None

    def _fail_if_injected(self, method: str, state: StepRequestState) -> None:
        if (error := self._injected(method, state)) is not None:
            raise error


class Trial:
    """Requests stepped by a worker's own runner, tick by tick.

    Args:
        pipeline: fulfils the stepwise contract.
        exclusive: whether it can't have two pictures under way.
        injection: what is to fail.

    Attributes:
        outputs: of the requests that have ended.
        watched: the pipeline as the runner sees it.
        ticks: ticks run so far.
    """

    def __init__(
        self, pipeline: Any, *, exclusive: bool = False, injection: Injection | None = None
    ) -> None:
        self.watched = Watched(pipeline, injection)
        self._aborts = AbortFlags()
        self._runner = StepRunner(
            self.watched, NoAdapters(), self._aborts, "trial", one_at_a_time=exclusive
        )
        self._plan_ids = itertools.count()
        self._requests: list[Reference] = []
        self._running: dict[str, int] = {}
        self.outputs: dict[str, DiffusionOutput] = {}
        self.ticks = 0

    def join(self, requests: Iterable[DiffusionRequest], group: int = 0) -> None:
        """Let requests join a group."""
        watched = tuple(_watched(request) for request in requests)
        self._requests += [weakref.ref(request) for request in watched]
        ids = [request.request_id for request in watched]
        self._running |= dict.fromkeys(ids, group)
        self._aborts.expect(ids)
        bare = (None,) * len(watched)
        self._runner.add(StepPlan(next(self._plan_ids), group, watched, bare, ticks=0))

    def tick(self, group: int | None = None) -> StepReport:
        """Run one tick of a group; without one, of the group of the oldest running request."""
        if group is None:
            group = next(iter(self._running.values()))
        self._runner.add(StepPlan(next(self._plan_ids), group, (), (), ticks=1))
        report = self._runner.tick()
        self.ticks += 1
        for output in report.outputs:
            self.outputs[output.request_id] = output
            del self._running[output.request_id]
        return report

    def run(self, requests: Iterable[DiffusionRequest] = ()) -> dict[str, DiffusionOutput]:
        """Let requests join and tick until all have ended, each group in turn; return the outputs.

        Raises:
            AssertionError: if they do not come to an end.
        """
        self.join(requests)
        while self._running:
            for group in sorted(set(self._running.values())):
                self.tick(group)
            assert self.ticks < _MOST_TICKS, f"{list(self._running)} do not come to an end"
        return self.outputs

    def abort(self, request_id: str) -> None:
        """Abort a request; it ends at the next tick."""
        self._aborts.set([request_id])

    def held_by(self, request_id: str) -> list[tuple[str, Reference]]:
        """Return (what, weak reference) for what the states of a request hold now."""
        found: list[tuple[str, Reference]] = []
        for row, reference in enumerate(self.watched.states[request_id]):
            found.append((f"the state of picture {row}", reference))
            found += [
                (f"{what} of picture {row}", weakref.ref(held)) for what, held in _held(reference())
            ]
        return found

    def alive(self) -> list[str]:
        """Name requests and states that are still referred to."""
        states = [
            f"a state of {request_id}"
            for request_id, references in self.watched.states.items()
            for reference in references
            if reference() is not None
        ]
        return states + [
            f"request {request.request_id}"
            for reference in self._requests
            if (request := reference()) is not None
        ]


def _watched(request: DiffusionRequest) -> WatchedRequest:
    fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(DiffusionRequest)}
    return WatchedRequest(**fields)


def _held(state: Any) -> Iterable[tuple[str, Any]]:
    """Yield what is a request's own for certain: latents, scheduler, the pipeline call."""
    if state is None:
        return
    if isinstance(state.latents, torch.Tensor):
        yield "the latents", state.latents
    if hasattr(state.scheduler, "__weakref__"):
        yield "the scheduler", state.scheduler
    if (call := getattr(state, "call", None)) is None:
        return
    yield "the pipeline call", call
    if call.pending is not None:
        tensors = [v for v in call.pending.call.arguments.values() if isinstance(v, torch.Tensor)]
        yield from (("the denoiser's input", tensor) for tensor in tensors[:1])
