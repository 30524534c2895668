"""The stepwise contract's methods, run for several pictures at once: only a culprit fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omni_engine.protocol.errors import PipelineContractError
from omni_engine.stages.contracts import StepRequestState
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.progress import main_thread
from omni_engine.worker.request_kinds import kind_of_request
from omni_engine.worker.residents import Picture
from omni_engine.worker.retries import SharedRun
from omni_engine.worker.step_calls import batch_of, parts_of, result_of
from omni_engine.worker.step_counts import StepCounts


class StepMethods:
    """Calls a pipeline for many pictures; each gets its result, or the error that it caused.

    Args:
        pipeline: fulfils the stepwise contract, with the optional methods that ``StepLoop`` names.
        memory: remembers how many pictures a forward of the pipeline's own has room for.
    """

    def __init__(self, pipeline: Any, memory: MemoryCaps) -> None:
        self._pipeline, self._memory = pipeline, memory

    def prepare(self, states: Sequence[StepRequestState]) -> list[BaseException | None]:
        """Encode pictures; return what each raised."""
        if hasattr(self._pipeline, "prepare_encode_batch"):
            return self._in_batches("encode", self._pipeline.prepare_encode_batch, states)
        raised = [result_of(self._pipeline.prepare_encode, state) for state in states]
        return [error if isinstance(error, BaseException) else None for error in raised]

    def finish(self, states: Sequence[StepRequestState]) -> list[Any]:
        """Return one picture per state, an exception for a failure, None if it goes on."""
        if hasattr(self._pipeline, "post_decode_batch"):
            return self._in_batches("decode", self._pipeline.post_decode_batch, states)
        return [result_of(self._pipeline.post_decode, state) for state in states]

    def predict(self, pictures: Sequence[Picture]) -> list[Any]:
        """Return one prediction per picture, an exception for one that failed even alone."""
        kind = kind_of_request(self._pipeline, pictures[0].state.request)
        miscounted: list[BaseException] = []

        def attempt(part: Sequence[Picture]) -> list[Any] | BaseException:
            predictions = self._forward(part)
            if isinstance(predictions, PipelineContractError) and len(part) > 1:
                miscounted.append(predictions)
            return predictions

        run = SharedRun("a step", kind, attempt, _one_row, self._memory)
        results = run.run(pictures)
        if miscounted and not any(isinstance(result, BaseException) for result in results):
            # Each is right alone: going on so would hide it, at a failed forward every tick.
            return miscounted[:1] * len(pictures)
        return results

    def _forward(self, pictures: Sequence[Picture]) -> list[Any] | BaseException:
        states = [picture.state for picture in pictures]
        predictions: list[Any] | BaseException = result_of(
            lambda: parts_of(self._pipeline.denoise_step(batch_of(states), states), states)
        )
        if not isinstance(predictions, BaseException):
            requests = len({picture.request_id for picture in pictures})
            own_counts = getattr(states[0], "counts", None)
            main_thread.forwards += not isinstance(own_counts, StepCounts)
            for picture in pictures:
                picture.counts.add(requests)
        return predictions

    def _in_batches(
        self, what: str, method: Callable[..., Any], states: Sequence[StepRequestState]
    ) -> list[Any]:
        kind = f"{kind_of_request(self._pipeline, states[0].request)} {what}"

        def attempt(part: Sequence[StepRequestState]) -> list[Any] | BaseException:
            found = result_of(lambda: list(method(part)))
            if isinstance(found, BaseException) or len(found) == len(part):
                checked: list[Any] | BaseException = found
                return checked
            return PipelineContractError(
                f"{method.__name__}() did not return one entry per state",
                field=method.__name__,
                value=len(found),
                expected=f"{len(part)} entries",
            )

        return SharedRun(what, kind, attempt, _one_row, self._memory).run(states)


def _one_row(_: object) -> int:
    return 1
