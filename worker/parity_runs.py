"""Ways to run the same requests: by the pipeline alone, in one call with lists, in shared steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_engine.protocol.errors import ModelError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch, StepBatch, StepRequestState
from omni_engine.worker.certification import as_floats, result_arrays
from omni_engine.worker.fusion import CallReader
from omni_engine.worker.row_calls import CallBuilder, rows_of
from omni_engine.worker.step_loop import StepLoop
from omni_engine.worker.views import denoisers

_REPEATS = 2
"""The faster of two runs tells the time: the first may still allocate."""


@dataclass(slots=True)
class Run:
    """What running some requests came to.

    Attributes:
        made: every picture by request id and index: floats, pictures in [0, 1].
        calls: denoiser calls that the pictures asked for; None if that can't be seen.
        forwards: forwards that ran for them.
        rows: rows in those.
        seconds: wall-clock time.
    """

    made: dict[tuple[str, int], npt.NDArray[np.float64]] = field(default_factory=dict)
    calls: int | None = None
    forwards: int | None = None
    rows: int | None = None
    seconds: float = 0.0


def fastest(run: Callable[[], Run]) -> Run:
    """Run several times; return the fastest."""
    return min((_timed(run) for _ in range(_REPEATS)), key=lambda found: found.seconds)


def difference(one: Run, other: Run) -> float:
    """Return the largest difference between two runs of the same requests; infinite for NaN.

    Raises:
        ModelError: if they made other pictures, or pictures of other shapes.
    """
    shapes = [{key: a.shape for key, a in run.made.items()} for run in (one, other)]
    if shapes[0] != shapes[1]:
        raise ModelError(f"shapes differ: {list(shapes[0].values())}, {list(shapes[1].values())}")
    found = [float(np.abs(one.made[key] - other.made[key]).max()) for key in one.made]
    return max(float("inf") if np.isnan(apart) else apart for apart in found)


def run_alone(pipe: Any, requests: Sequence[DiffusionRequest]) -> Run:
    """Call a diffusers pipeline once for every picture, as a program without an engine would."""
    builder, run = CallBuilder(pipe), Run()
    with _counted(pipe, run):
        for row in rows_of(requests):
            torch.manual_seed(row.seed)
            result = pipe(**builder.single(row))
            run.made[row.request.request_id, row.index] = result_arrays(result)[0]
    run.calls = run.forwards
    return run


def run_list_call(pipe: Any, requests: Sequence[DiffusionRequest], calls: int | None) -> Run:
    """Call a diffusers pipeline once with lists of prompts and generators.

    Args:
        pipe: the pipeline.
        requests: equal in all but prompt and seed.
        calls: denoiser calls of the same requests alone.
    """
    rows, run = rows_of(requests), Run(calls=calls)
    with _counted(pipe, run):
        torch.manual_seed(rows[0].seed)
        result = pipe(**CallBuilder(pipe).batch(rows))
    found = result_arrays(result)
    if len(found) != len(rows):
        raise ModelError(f"{len(found)} pictures for {len(rows)} prompts")
    for row, item in zip(rows, found, strict=True):
        run.made[row.request.request_id, row.index] = item
    return run


def run_steps(
    pipeline: Any,
    requests: Sequence[DiffusionRequest],
    *,
    join_at: Callable[[int], int] = lambda index: 0,
    one_at_a_time: bool = False,
) -> Run:
    """Step requests as a worker does.

    Args:
        pipeline: fulfils the stepwise contract.
        requests: to run together.
        join_at: before which tick request i joins.
        one_at_a_time: whether a picture must be finished before the next begins.
    """
    recorder = _Recorder(pipeline)
    stepper = getattr(pipeline, "stepper", None)
    before = (0, 0) if stepper is None else (stepper.forwards, stepper.rows)
    loop = StepLoop(recorder, lambda _: False, one_at_a_time=one_at_a_time)
    waiting = list(enumerate(requests))
    tick = 0
    outputs: list[DiffusionOutput] = []
    while waiting or len(loop):
        loop.join(request for index, request in waiting if join_at(index) <= tick)
        waiting = [(index, request) for index, request in waiting if join_at(index) > tick]
        outputs += loop.tick()
        tick += 1
    for output in outputs:
        output.raise_for_error()
    run = Run(recorder.made, recorder.calls, recorder.forwards, recorder.calls)
    if stepper is not None:  # one step of the contract may be several forwards
        run.calls = recorder.cooperative_calls
        run.forwards, run.rows = stepper.forwards - before[0], stepper.rows - before[1]
    return run


def run_forward(pipeline: Any, batches: Sequence[Sequence[DiffusionRequest]]) -> Run:
    """Call a hand-written pipeline's ``forward`` once for every batch."""
    run = Run()
    for batch in batches:
        for output in pipeline.forward(DiffusionRequestBatch(tuple(batch))):
            output.raise_for_error()
            made = output.images or output.frames or output.audio
            for index, picture in enumerate(made or ()):
                run.made[output.request_id, index] = as_floats(picture)
    return run


class _Recorder:
    """Passes everything on to a stepwise pipeline, counts forwards and keeps what it decodes."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self.made: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
        self.forwards = self.calls = self.cooperative_calls = 0
        if hasattr(pipeline, "post_decode_batch"):
            self.post_decode_batch = self._decode_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        self.forwards += 1
        self.calls += len(states)
        return self._pipeline.denoise_step(batch, states)

    def post_decode(self, state: StepRequestState) -> Any:
        made = self._pipeline.post_decode(state)
        self._keep(state, made)
        return made

    def _decode_batch(self, states: Sequence[StepRequestState]) -> list[Any]:
        results: list[Any] = self._pipeline.post_decode_batch(states)
        for state, made in zip(states, results, strict=True):
            self._keep(state, made)
        return results

    def _keep(self, state: StepRequestState, made: Any) -> None:
        if made is None or isinstance(made, BaseException):
            return
        self.made[state.request_id, state.row] = as_floats(made)
        counts = getattr(state, "counts", None)
        self.cooperative_calls += 0 if counts is None else counts.forwards


@contextmanager
def _counted(pipe: Any, run: Run) -> Iterator[None]:
    """Count a diffusers pipeline's denoiser forwards and their rows."""
    run.forwards = run.rows = 0
    hooks = []
    for module in denoisers(pipe):
        reader = CallReader(module, module.forward)

        def count(_: Any, args: Any, kwargs: Any, reader: CallReader = reader) -> None:
            assert run.forwards is not None
            assert run.rows is not None
            run.forwards += 1
            run.rows += reader.read(args, kwargs).rows

        hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _timed(run: Callable[[], Run]) -> Run:
    started = time.perf_counter()
    found = run()
    found.seconds = time.perf_counter() - started
    return found
