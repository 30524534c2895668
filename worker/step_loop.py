"""Steps one group of running requests under the stepwise contract.

A tick encodes newcomers, runs the denoiser once for every picture that is not finished, takes each
picture's scheduler step and decodes what is finished. Whatever one request raises ends that request
only. While pictures are being denoised, encoding and decoding each take up to ``max_stall_ms`` of a
tick, but always advance by at least one picture.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.errors import OmniError, PipelineContractError, RequestAbortedError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import StepState
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import StepRequestState
from omni_engine.worker.adapter_access import AdapterAccess, NoAdapters
from omni_engine.worker.failures import pipeline_error, text_of
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.newcomers import Newcomers
from omni_engine.worker.residents import Pace, Picture, Resident, metrics_of
from omni_engine.worker.results import make_output
from omni_engine.worker.step_calls import error_of, preview_of, result_of
from omni_engine.worker.step_methods import StepMethods

logger = logging.getLogger(__name__)

_MAX_TICKS_WITHOUT_STEP = 64
"""No scheduler needs so many forwards for one step: a pipeline that does has stopped advancing."""


_MAX_PREVIEW_MS = 100.0
"""Previews are news: what doesn't fit into this time of a tick comes later, in every mode."""


class StepLoop:
    """Runs requests of one group together.

    Args:
        pipeline: fulfils the stepwise contract; see ``StepPipeline``. It may also have
            ``prepare_encode_batch`` and ``post_decode_batch`` (one entry per state, an exception
            for a failure), ``make_state``, ``release``, ``preview`` and ``sample_rate``.
        is_aborted: whether a request was aborted.
        max_stall_ms: see above, in milliseconds.
        one_at_a_time: for pipelines that can't have two pictures under way.
        adapters: tells whether a request's adapters are loaded; one whose are not joins later.
        memory: remembers how many pictures a forward of the pipeline's own has room for.
    """

    def __init__(
        self,
        pipeline: Any,
        is_aborted: Callable[[str], bool],
        *,
        max_stall_ms: float = math.inf,
        one_at_a_time: bool = False,
        adapters: AdapterAccess | None = None,
        memory: MemoryCaps | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._methods = StepMethods(pipeline, memory or MemoryCaps())
        self._is_aborted = is_aborted
        self._max_stall_ms = max_stall_ms
        self._one_at_a_time = one_at_a_time
        self._adapters = adapters or NoAdapters()
        self._make_state = getattr(pipeline, "make_state", StepRequestState)
        self._residents: dict[str, Resident] = {}
        self._newcomers = Newcomers(self._adapters)
        self._encode_pace, self._decode_pace, self._preview_pace = Pace(), Pace(), Pace()

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def request_ids(self) -> list[str]:
        """The running requests."""
        return list(self._residents)

    @property
    def runnable(self) -> bool:
        """Whether a tick can do something without waiting for an adapter to be loaded."""
        return any(
            resident.ended or self._adapters.is_ready(request_id) or self._is_aborted(request_id)
            for request_id, resident in self._residents.items()
        )

    @property
    def cramped(self) -> bool:
        """Whether a request waits for room for its adapters only, which a tick would make."""
        return any(map(self._adapters.lacks_room, self._residents))

    def join(self, requests: Iterable[DiffusionRequest]) -> None:
        """Take requests in; they are encoded in the next tick."""
        for request in requests:
            made: list[Picture] | BaseException = result_of(self._pictures_of, request)
            error = pipeline_error(made) if isinstance(made, BaseException) else None
            pictures = [] if isinstance(made, BaseException) else made
            resident = Resident(request, pictures, time.perf_counter(), error)
            self._residents[request.request_id] = resident
            self._newcomers.extend(pictures)

    def tick(self) -> list[DiffusionOutput]:
        """Advance every request by one denoiser forward; return the outputs of those that ended."""
        ended = self.end_aborted()
        self._encode()
        self._denoise()
        self._decode()
        return ended + self._take_ended()

    def end_aborted(self) -> list[DiffusionOutput]:
        """End the requests that were aborted: their tensors are free when this returns."""
        for resident in self._residents.values():
            if self._is_aborted(resident.request.request_id):
                resident.error = RequestAbortedError("the request was aborted")
        return self._take_ended()

    def fail_all(self, error: OmniError) -> list[DiffusionOutput]:
        """End every request with an error."""
        for resident in self._residents.values():
            resident.error = error
        return self._take_ended()

    def states(self) -> list[StepState]:
        """Return how far each running request is."""
        return [
            StepState(
                resident.request.request_id,
                min(picture.step_index for picture in resident.pictures),
                max(picture.num_steps for picture in resident.pictures),
            )
            for resident in self._residents.values()
        ]

    def previews(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return preview pictures that are due, by request id.

        They too hold the others up, for ``max_stall_ms`` at most but for one; the rest come later.
        """
        made: dict[str, npt.NDArray[np.uint8]] = {}
        preview = getattr(self._pipeline, "preview", None)
        due = sorted((p for p in self._pictures() if p.preview_due), key=lambda p: p.previews)
        chunk = due[: self._preview_pace.fitting(min(self._stall_ms(), _MAX_PREVIEW_MS))]
        if preview is None or not chunk:
            return made
        started = time.perf_counter()
        for picture in chunk:
            picture.preview_due, picture.previews = False, picture.previews + 1
            shown = preview_of(preview, picture.state) if picture.denoising else None
            if shown is not None:
                made[picture.request_id] = shown
        self._preview_pace.note(len(chunk), (time.perf_counter() - started) * 1000)
        return made

    # -- the parts of a tick

    def _pictures_of(self, request: DiffusionRequest) -> list[Picture]:
        rows = range(request.num_outputs)
        return [Picture(request.request_id, self._make_state(request, row)) for row in rows]

    def _pictures(self) -> Iterable[Picture]:
        for resident in self._residents.values():
            if resident.error is None:
                yield from resident.pictures

    def _stall_ms(self) -> float:
        """How long encoding or decoding may take: without limit if nobody is held up."""
        held_up = any(picture.denoising for picture in self._pictures())
        return self._max_stall_ms if held_up else math.inf

    def _encode(self) -> None:
        most = self._encode_pace.fitting(self._stall_ms())
        if self._one_at_a_time:
            under_way = any(p.prepared and p.result is None for p in self._pictures())
            most = 0 if under_way else 1
        nobody_runs = not any(picture.prepared for picture in self._pictures())
        chunk = self._newcomers.take(most, self._goes_on, self._fail, wait=nobody_runs)
        if not chunk:
            return
        started = time.perf_counter()
        errors = self._methods.prepare([picture.state for picture in chunk])
        self._encode_pace.note(len(chunk), (time.perf_counter() - started) * 1000)
        for picture, raised in zip(chunk, errors, strict=True):
            error = raised if raised is not None else error_of(picture.note_progress)
            picture.prepared = error is None
            if error is not None:
                self._fail(picture, error)

    def _denoise(self) -> None:
        running = [picture for picture in self._pictures() if picture.denoising]
        if not running:
            return
        for picture, prediction in zip(running, self._methods.predict(running), strict=True):
            if isinstance(prediction, BaseException):
                self._fail(picture, prediction)
                continue
            before = picture.step_index
            error = error_of(self._step, picture, prediction)
            if error is not None:
                self._fail(picture, error)
                continue
            advanced = picture.step_index > before
            picture.ticks_without_step = 0 if advanced else picture.ticks_without_step + 1
            picture.preview_due |= advanced and self._wants_preview(picture)
            if picture.ticks_without_step > _MAX_TICKS_WITHOUT_STEP and picture.denoising:
                self._fail(picture, _stuck(picture))

    def _step(self, picture: Picture, prediction: Any) -> None:
        self._pipeline.step_scheduler(picture.state, prediction)
        picture.note_progress()

    def _decode(self) -> None:
        waiting = [picture for picture in self._pictures() if picture.undecoded]
        chunk = waiting[: self._decode_pace.fitting(self._stall_ms())]
        if not chunk:
            return
        started = time.perf_counter()
        results = self._methods.finish([picture.state for picture in chunk])
        self._decode_pace.note(len(chunk), (time.perf_counter() - started) * 1000)
        for picture, result in zip(chunk, results, strict=True):
            picture.result = None if isinstance(result, BaseException) else result
            picture.ticks_without_step += result is None
            if isinstance(result, BaseException):
                self._fail(picture, result)
            elif result is None and (error := error_of(picture.note_progress)) is not None:
                self._fail(picture, error)
            elif picture.ticks_without_step > _MAX_TICKS_WITHOUT_STEP:
                self._fail(picture, _stuck(picture))

    # -- ends

    def _wants_preview(self, picture: Picture) -> bool:
        """Whether a preview is due after the step just taken: of a request's first picture only."""
        resident = self._residents[picture.request_id]
        every = resident.request.preview_every
        first = picture is resident.pictures[0]
        return every is not None and first and picture.step_index % every == 0

    def _goes_on(self, picture: Picture) -> bool:
        resident = self._residents.get(picture.request_id)
        return resident is not None and picture in resident.pictures and resident.error is None

    def _fail(self, picture: Picture, error: BaseException) -> None:
        self._residents[picture.request_id].error = pipeline_error(error)

    def _take_ended(self) -> list[DiffusionOutput]:
        ended = [resident for resident in self._residents.values() if resident.ended]
        return [self._end(resident) for resident in ended]

    def _end(self, resident: Resident) -> DiffusionOutput:
        request = resident.request
        del self._residents[request.request_id]
        metrics = metrics_of(resident)
        output = None
        if resident.error is None:
            results = [picture.result for picture in resident.pictures]
            output = result_of(self._output, request, results, metrics)
            if isinstance(output, BaseException):  # what a pipeline made may be anything
                resident.error = pipeline_error(output)
        if resident.error is not None:
            output = DiffusionOutput.failed(request.request_id, resident.error, request.seed)
            output.metrics = metrics
        if (release := getattr(self._pipeline, "release", None)) is not None:
            for picture in resident.pictures:
                if (failure := error_of(release, picture.state)) is not None:
                    logger.warning("release() failed: %s", text_of(failure))
        resident.pictures.clear()
        assert isinstance(output, DiffusionOutput)
        return output

    def _output(
        self, request: DiffusionRequest, results: list[Any], metrics: OutputMetrics
    ) -> DiffusionOutput:
        rate = getattr(self._pipeline, "sample_rate", None)
        return make_output(request, results, metrics, rate)


def _stuck(picture: Picture) -> PipelineContractError:
    return PipelineContractError(
        "the pipeline does not come to an end: step_scheduler() must advance step_index, and "
        "post_decode() must return a picture",
        field="step_scheduler",
        value=f"step_index = {picture.step_index} after {_MAX_TICKS_WITHOUT_STEP} more ticks",
        expected="state.step_index to grow until it is state.num_steps",
    )
