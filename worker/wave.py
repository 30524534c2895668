"""Runs a request batch by steps, from start to end: what request mode does by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepState
from omni_engine.stages.contracts import DiffusionRequestBatch
from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.step_loop import StepLoop

OnStates = Callable[[list[StepState], dict[str, npt.NDArray[np.uint8]]], None]
"""Told after each tick how far the requests are, with the previews that were due."""


def run_wave(
    pipeline: Any,
    batch: DiffusionRequestBatch,
    is_aborted: Callable[[str], bool],
    on_states: OnStates | None = None,
    *,
    one_at_a_time: bool = False,
    adapters: AdapterAccess | None = None,
    memory: MemoryCaps | None = None,
) -> list[DiffusionOutput]:
    """Run a batch on a pipeline that fulfils the stepwise contract.

    Args:
        pipeline: see ``StepPipeline``.
        batch: the requests.
        is_aborted: whether a request was aborted; asked before every tick.
        on_states: told of progress.
        one_at_a_time: finish a picture before the next begins.
        adapters: see ``StepLoop``.
        memory: see ``StepLoop``.

    Returns:
        One output per request, in order; a failed one carries its error.
    """
    loop = StepLoop(
        pipeline, is_aborted, one_at_a_time=one_at_a_time, adapters=adapters, memory=memory
    )
    loop.join(batch.requests)
    outputs: dict[str, DiffusionOutput] = {}
    while len(loop):
        outputs |= {output.request_id: output for output in loop.tick()}
        if on_states is not None and len(loop):
            on_states(loop.states(), loop.previews())
    return [outputs[request_id] for request_id in batch.request_ids]


class WavePipeline:
    """The request-batch contract around a hand-written pipeline that only has steps.

    Args:
        pipeline: fulfils the stepwise contract.
        is_aborted: whether a request was aborted.
        one_at_a_time: finish a picture before the next begins.
        memory: see ``StepLoop``.
    """

    supports_request_batch = True

    def __init__(
        self,
        pipeline: Any,
        is_aborted: Callable[[str], bool],
        *,
        one_at_a_time: bool = False,
        memory: MemoryCaps | None = None,
    ) -> None:
        self._pipeline, self._is_aborted = pipeline, is_aborted
        self._one_at_a_time, self._memory = one_at_a_time, memory

    def forward(
        self, batch: DiffusionRequestBatch, on_states: OnStates | None = None
    ) -> list[DiffusionOutput]:
        """Run the batch; one output per request, in order."""
        return run_wave(
            self._pipeline,
            batch,
            self._is_aborted,
            on_states,
            one_at_a_time=self._one_at_a_time,
            memory=self._memory,
        )
