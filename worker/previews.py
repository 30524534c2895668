"""Preview pictures of unfinished requests, made by each pipeline's own code.

The pipeline's call is replayed beside the real one: its denoiser is not run (an earlier output
stands for every forward) and every scheduler step returns the estimated clean sample, which the
pipeline then unpacks, scales and decodes as it would its final one. One step is replayed, or all
where a pipeline's loop needs them. The replay has a view and random state of its own, so the real
call is not touched.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from omni_engine.worker.cooperative import Answer, CooperativeCall, CooperativeStepper
from omni_engine.worker.failures import text_of
from omni_engine.worker.row_calls import unpack

logger = logging.getLogger(__name__)


class PreviewMaker:
    """Makes previews for one pipeline.

    Args:
        pipe: the pipeline.
        stepper: runs its calls.
    """

    def __init__(self, pipe: Any, stepper: CooperativeStepper) -> None:
        self._pipe, self._stepper = pipe, stepper
        self._warned = False
        self._one_step = True

    def make(self, call: CooperativeCall, arguments: dict[str, Any], seed: int) -> Any:
        """Return a preview of a call: an array shaped like its result, or None.

        Args:
            call: the call, suspended; its estimate of the clean sample is used up.
            arguments: fresh ones, as it was started with.
            seed: as it was started with.
        """
        sample, call.clean_sample = call.clean_sample, None
        if sample is None:
            self._warn("its scheduler's noise levels are not known")
            return None
        replay = self._replay(call, arguments, seed, sample)
        if replay.error is not None:
            self._warn(text_of(replay.error))
            return None
        return unpack(replay.result, latents=False)[0]

    def _replay(
        self, call: CooperativeCall, arguments: dict[str, Any], seed: int, sample: torch.Tensor
    ) -> CooperativeCall:
        while True:
            replay = CooperativeCall(
                self._pipe,
                {**arguments, "output_type": "np"},
                seed,
                call.owner,
                replayed=sample,
                replays_one_step=self._one_step,
            )
            replay.resume()
            while not replay.done:
                replay.resume(self._answer(replay, call))
            if not self._one_step or (replay.error is None and replay.step_index):
                return replay
            self._one_step = False
            if (generator := arguments.get("generator")) is not None:
                generator.manual_seed(seed)

    def _answer(self, replay: CooperativeCall, call: CooperativeCall) -> Answer:
        point = None if replay.pending is None else replay.pending.point
        if point in call.last_outputs:
            return Answer(copy.deepcopy(call.last_outputs[point]))
        return self._stepper.answer_alone(replay)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            logger.warning("%s gives no previews: %s", type(self._pipe).__name__, reason)
        self._warned = True
