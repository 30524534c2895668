"""Errors outlive what raised them, and must not keep its tensors: not until the next collection."""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_stable_diffusion

from omni_engine.protocol.errors import AdapterError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import BatchPlan
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.contracts import DiffusionRequestBatch, StepBatch, StepRequestState
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import NoAdapters
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.cooperative_call import CooperativeCall
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.failures import bare, pipeline_error
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.request_runner import RequestRunner
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.step_loop import StepLoop

Raise = Callable[[], None]


class Witness:
    """Fails calls as ordered, with large tensors in their frames, and knows which still live."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[torch.Tensor]] = []

    def fail(self, kind: type[BaseException]) -> None:
        large = torch.zeros(1 << 20)
        self._held.append(weakref.ref(large))
        try:
            self._fail_within(large)
        except ValueError as error:
            raise kind("out of memory: as ordered") from error

    def _fail_within(self, large: torch.Tensor) -> None:
        larger = torch.cat([large, large])
        self._held.append(weakref.ref(larger))
        raise ValueError("within")

    def assert_nothing_lives(self) -> None:
        assert self._held, "nothing failed"
        assert not [tensor for tensor in self._held if tensor() is not None]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """A cycle of an error and a frame would wait for the collector: it must not be needed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def request(name: str) -> DiffusionRequest:
    params = OmniDiffusionSamplingParams(
        seed=1, num_inference_steps=2, height=16, width=16, guidance_scale=1.0
    )
    return build_request(f"a cat {name}", params, request_id=name)


REQUESTS = tuple(request(name) for name in "abcd")
KINDS = pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError])


def assert_only_b_failed(outputs: Sequence[DiffusionOutput]) -> None:
    assert [output.request_id for output in outputs if output.error is not None] == ["b"]


@KINDS
def test_a_failing_batch_keeps_nothing(kind: type[BaseException]) -> None:
    witness = Witness()

    class Pipeline:
        supports_request_batch = True

        def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
            if "b" in batch.request_ids:
                witness.fail(kind)
            picture = np.zeros((8, 8, 3), np.uint8)
            return [DiffusionOutput(name, images=[picture]) for name in batch.request_ids]

    runner = RequestRunner(Pipeline(), NoAdapters(), AbortFlags(), "worker", lambda _: None)
    outputs = runner.run(BatchPlan(0, REQUESTS, (None,) * 4))
    assert_only_b_failed(outputs)
    witness.assert_nothing_lives()


@KINDS
@pytest.mark.parametrize("place", ["make_state", "encode", "denoise", "step", "decode", "preview"])
def test_a_failing_step_keeps_nothing(kind: type[BaseException], place: str) -> None:
    witness = Witness()

    def fail(here: str, *states: StepRequestState) -> None:
        if here == place and any(state.request_id == "b" for state in states):
            witness.fail(kind)

    class Pipeline:
        def make_state(self, request: DiffusionRequest, row: int) -> StepRequestState:
            state = StepRequestState(request, row)
            fail("make_state", state)
            return state

        def prepare_encode(self, state: StepRequestState) -> None:
            state.num_steps = 8
            fail("encode", state)

        def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
            fail("denoise", *states)
            return [None] * len(states)

        def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
            state.step_index += 1
            fail("step", state)

        def post_decode(self, state: StepRequestState) -> Any:
            fail("decode", state)
            return np.zeros((8, 8, 3), np.uint8)

        def preview(self, state: StepRequestState) -> Any:
            fail("preview", state)

    loop = StepLoop(Pipeline(), lambda _: False)
    loop.join(build_request(r.prompt, r.sampling_params, request_id=r.request_id, preview_every=1)
              for r in REQUESTS)  # fmt: skip
    outputs = []
    while len(loop):
        outputs += loop.tick()
        loop.previews()
    if place != "preview":
        assert_only_b_failed(outputs)
    witness.assert_nothing_lives()


@KINDS
@pytest.mark.parametrize("place", ["unet", "vae", "scheduler"])
def test_a_failing_cooperative_call_keeps_nothing(kind: type[BaseException], place: str) -> None:
    torch.set_num_threads(1)
    witness, pipe = Witness(), tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    if place == "scheduler":  # each request's own, so the first to step is the culprit
        real = type(pipe.scheduler).step

        class Scheduler(type(pipe.scheduler)):  # type: ignore[misc]
            def step(self, *args: Any, **kwargs: Any) -> Any:
                if not witness._held:
                    witness.fail(kind)
                return real(self, *args, **kwargs)

        pipe.scheduler.__class__ = Scheduler
    else:
        module, method = getattr(pipe, place), {"unet": "forward", "vae": "decode"}[place]
        original = getattr(module, method)

        @functools.wraps(original)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if len(next(iter((*args, *kwargs.values())))) > 1:
                witness.fail(kind)
            return original(*args, **kwargs)

        setattr(module, method, failing)
    report = FusionReport(True, "")
    pipeline = DiffusersPipeline(pipe, make_stepper(pipe, report),
                                 diffusers_capabilities(pipe, report), AbortFlags())  # fmt: skip
    loop = StepLoop(pipeline, lambda _: False)
    loop.join(REQUESTS)
    outputs: list[DiffusionOutput] = []
    while len(loop):
        outputs += loop.tick()
    assert [output.request_id for output in outputs if not output.ok] == (
        ["a"] if place == "scheduler" else []
    )
    witness.assert_nothing_lives()
    assert pipeline.stepper.live == []


def test_a_bare_error_has_its_text_and_tells_where_it_was_raised() -> None:
    witness = Witness()
    try:
        witness.fail(RuntimeError)
    except RuntimeError as raised:
        error = bare(raised)
    assert error.__traceback__ is error.__cause__ is error.__context__ is None
    witness.assert_nothing_lives()
    shown = "".join(traceback.format_exception(pipeline_error(error)))
    assert "in fail" in shown
    assert "as ordered" in shown
    assert bare(bare(error)).__notes__ == error.__notes__, "told once"


def test_a_group_of_errors_and_an_error_about_an_object_keep_nothing() -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    errors: list[BaseException] = []
    try:
        thing.missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as raised:
        errors.append(bare(raised))
    try:
        try:
            raise ValueError(thing.__class__.__name__)
        except ValueError as raised:
            raise ExceptionGroup("several", [raised]) from None
    except ExceptionGroup as raised:
        errors.append(bare(raised))
    del thing
    assert gone() is None
    assert len(errors) == 2


def test_an_error_of_ours_is_passed_on_bare() -> None:
    try:
        raise AdapterError("no room")
    except AdapterError as raised:
        error = pipeline_error(raised)
    assert (error.code, error.__traceback__) == ("adapter_unusable", None)


def test_a_pipeline_that_cannot_be_stopped_is_left_behind() -> None:
    """It catches even the exception that ends a greenlet, and calls its denoiser again."""
    pipe = tiny_stable_diffusion()
    stepper = make_stepper(pipe, FusionReport(True, ""))

    class Stubborn(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            for _ in range(9):
                with contextlib.suppress(BaseException):
                    self.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 7, 16))

    pipe.__class__ = Stubborn
    call: CooperativeCall = stepper.start({}, 1, "r")
    assert not call.done
    stepper.abort(call)
    assert call.done
    assert call.aborted
    assert stepper.live == []
