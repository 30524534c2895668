"""One group of requests stepped together: pacing, failures, previews, and what is counted."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_stepped import Counting, logged, request

from omni_engine import DiffusionOutput
from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import StepBatch, StepRequestState
from omni_engine.worker.residents import Pace
from omni_engine.worker.step_loop import StepLoop

AT_LEAST_ONE = 1e-9
"""Milliseconds that nothing fits into."""


def loop_of(pipeline: Any, aborted: set[str] | None = None, **options: Any) -> StepLoop:
    return StepLoop(pipeline, (set() if aborted is None else aborted).__contains__, **options)


def run(loop: StepLoop, most_ticks: int = 200) -> dict[str, DiffusionOutput]:
    outputs: dict[str, DiffusionOutput] = {}
    for _ in range(most_ticks):
        if not len(loop):
            return outputs
        outputs |= {output.request_id: output for output in loop.tick()}
    raise AssertionError(f"{loop.request_ids} still run")


# -- a tick


def test_a_tick_encodes_denoises_steps_and_decodes() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline)
    loop.join([request("a", 1, n=2), request("b", 2)])
    (output,) = loop.tick()
    assert pipeline.take_log() == [
        *(("encode", who) for who in ("a/0", "a/1", "b/0")),
        *(("denoise", who) for who in ("a/0", "a/1", "b/0")),
        *(("step", who) for who in ("a/0", "a/1", "b/0")),
        *(("decode", who) for who in ("a/0", "a/1")),
    ]
    assert output.request_id == "a"
    assert [picture[0, 0, 0] for picture in output.images or ()] == [97, 98]
    assert [(s.request_id, s.step_index, s.num_steps) for s in loop.states()] == [("b", 1, 2)]
    (other,) = loop.tick()
    assert (other.request_id, len(loop)) == ("b", 0)
    assert loop.tick() == []


def test_the_batch_holds_each_states_own_latents_and_timestep() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline)
    loop.join([request("a", 3)])
    loop.tick()
    loop.join([request("b", 5)])
    loop.tick()
    batch, who = pipeline.batches[-1]
    assert who == ["a/0", "b/0"]
    assert batch.latents.tolist() == [[97, 97], [98, 98]]
    assert batch.timesteps.tolist() == [2, 5], "at step 1 of 3, and at step 0 of 5"


def test_states_without_latents_get_an_empty_batch() -> None:
    class Own(Counting):
        def prepare_encode(self, state: StepRequestState) -> None:
            super().prepare_encode(state)
            state.latents = state.timesteps = None

        def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
            super().denoise_step(batch, states)
            return [torch.full((1, 2), float(state.seed)) for state in states]

    pipeline = Own()
    loop = loop_of(pipeline)
    loop.join([request("a"), request("b")])
    assert all(output.ok for output in run(loop).values())
    assert pipeline.batches[0][0] == StepBatch(None, None)


def test_metrics_count_requests_that_shared_not_pictures() -> None:
    loop = loop_of(Counting())
    loop.join([request("a", 4, n=2)])
    loop.tick()
    loop.join([request("b", 2)])
    outputs = run(loop)
    a, b = outputs["a"].metrics, outputs["b"].metrics
    assert (a.num_steps, a.num_forwards, a.mean_batch_size, a.max_batch_size) == (4, 4, 1.5, 2)
    assert (b.num_steps, b.num_forwards, b.mean_batch_size, b.max_batch_size) == (2, 2, 2.0, 2)


@pytest.mark.parametrize(
    ("made", "field", "shape"),
    [
        (np.full((4, 6, 3), 0.5), "images", (4, 6, 3)),
        (np.zeros((5, 4, 6, 3), np.float32), "frames", (5, 4, 6, 3)),
        (torch.zeros(4, 2, 2), "latents", (4, 2, 2)),
    ],
)
def test_what_post_decode_returns_becomes_the_output(made: Any, field: str, shape: Any) -> None:
    class Making(Counting):
        def post_decode(self, state: StepRequestState) -> Any:
            return made

    loop = loop_of(Making())
    asked = request("a", n=2)
    if field == "latents":
        params = dataclasses.replace(asked.sampling_params, output_type="latent")
        asked = dataclasses.replace(asked, sampling_params=params)
    loop.join([asked])
    output = run(loop)["a"].raise_for_error()
    found: Any = getattr(output, field)
    assert [picture.shape for picture in found] == [shape, shape]
    if field != "latents":
        assert found[0].dtype == np.uint8
        assert found[0].max() == round(255 * float(made.max()))
    output.to_wire()


# -- pacing


def test_pace_is_learnt_from_what_items_took() -> None:
    pace = Pace()
    assert pace.fitting(10.0) == 1, "nothing is known yet"
    assert pace.fitting(math.inf) > 1_000_000
    pace.note(2, 8.0)
    assert (pace.fitting(20.0), pace.fitting(4.0), pace.fitting(0.1)) == (5, 1, 1)
    pace.note(1, 14.0)
    assert pace.fitting(70.0) == 10, "0.7 x 4 ms + 0.3 x 14 ms"


def test_newcomers_are_spread_over_ticks_while_others_are_denoised() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline, max_stall_ms=AT_LEAST_ONE)
    loop.join([request("a", 9)])
    loop.tick()
    loop.join([request("b", 9), request("c", 9, n=2)])
    pipeline.take_log()
    for newcomer, running in (("b/0", 2), ("c/0", 3), ("c/1", 4)):
        loop.tick()
        log = pipeline.take_log()
        assert logged(log, "encode") == [newcomer]
        assert len(logged(log, "denoise")) == running, "a newcomer is denoised at once"
    loop.tick()
    assert logged(pipeline.take_log(), "encode") == []
    assert all(output.ok for output in run(loop).values())


def test_there_is_no_limit_while_nothing_is_denoised() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline, max_stall_ms=AT_LEAST_ONE)
    loop.join([request(name, 2) for name in "abcd"])
    loop.tick()
    assert logged(pipeline.take_log(), "encode") == ["a/0", "b/0", "c/0", "d/0"]
    outputs = loop.tick()
    assert logged(pipeline.take_log(), "decode") == ["a/0", "b/0", "c/0", "d/0"]
    assert len(outputs) == 4


def test_a_generous_limit_lets_everybody_in_at_once() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline, max_stall_ms=1e12)
    loop.join([request("a", 9)])
    loop.tick()
    loop.join([request(name, 9) for name in "bcd"])
    pipeline.take_log()
    loop.tick()
    assert logged(pipeline.take_log(), "encode") == ["b/0", "c/0", "d/0"]


def test_finishers_are_spread_over_ticks_while_others_are_denoised() -> None:
    pipeline = Counting()
    loop = loop_of(pipeline, max_stall_ms=AT_LEAST_ONE)
    loop.join([request("z", 4), *(request(name, 2) for name in "abcde")])
    loop.tick()
    left = [[output.request_id for output in loop.tick()] for _ in range(3)]
    assert left == [["a"], ["b"], ["z", "c", "d", "e"]], "nobody is held up in the last tick"
    assert Counter(logged(pipeline.log, "decode")) == Counter(f"{name}/0" for name in "zabcde")
    assert logged(pipeline.log, "denoise").count("c/0") == 2, "who waits is not denoised"


def test_one_at_a_time() -> None:
    class Exclusive(Counting):
        under_way: StepRequestState | None = None

        def prepare_encode(self, state: StepRequestState) -> None:
            assert self.under_way is None
            self.under_way = state
            super().prepare_encode(state)

        def post_decode(self, state: StepRequestState) -> Any:
            assert self.under_way is state
            self.under_way = None
            return super().post_decode(state)

    pipeline = Exclusive()
    loop = loop_of(pipeline, one_at_a_time=True)
    loop.join([request("a", 2, n=2), request("b", 3)])
    outputs = run(loop)
    assert all(output.ok for output in outputs.values())
    assert logged(pipeline.log, "encode") == ["a/0", "a/1", "b/0"]
    assert all(len(who) == 1 for _, who in pipeline.batches)
    assert outputs["b"].metrics.max_batch_size == 1


# -- failures


class Failing(Counting):
    """Raises in one method for request b's second picture."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.released = method, []

    def note(self, method: str, state: StepRequestState) -> None:
        super().note(method, state)
        if (method, state.request_id, state.row) == (self.method, "b", 1):
            raise ValueError(f"no {method} for you")

    def release(self, state: StepRequestState) -> None:
        self.released.append(f"{state.request_id}/{state.row}")


@pytest.mark.parametrize("method", ["encode", "denoise", "step", "decode"])
def test_a_failure_ends_one_request_with_all_its_pictures(method: str) -> None:
    pipeline = Failing(method)
    loop = loop_of(pipeline)
    loop.join([request("a"), request("b", n=2), request("c")])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["c"].ok
    error = outputs["b"].error
    assert error is not None
    assert (error.code, outputs["b"].seed) == ("model_error", 98)
    assert f"ValueError: no {method} for you" in str(error)
    assert sorted(pipeline.released) == ["a/0", "b/0", "b/1", "c/0"]


def test_too_few_predictions_of_pictures_that_are_right_alone_end_them_all() -> None:
    """Going on with each alone would hide it, at the cost of a failed forward every tick."""

    class Forgetful(Counting):
        def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
            return super().denoise_step(batch, states)[:1]

    pipeline = Forgetful()
    loop = loop_of(pipeline)
    loop.join([request("a"), request("b")])
    errors = [output.error for output in run(loop).values()]
    assert [error.code for error in errors if error is not None] == ["pipeline_contract"] * 2
    assert [members for _, members in pipeline.batches] == [["a/0", "b/0"], ["a/0"], ["b/0"]]


def test_too_few_predictions_are_the_error_of_the_request_that_gets_none_alone() -> None:
    class Rejecting(Counting):
        def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
            made = super().denoise_step(batch, states)
            return made[:-1] if any(state.request_id == "b" for state in states) else made

    loop = loop_of(Rejecting())
    loop.join([request(name) for name in "abc"])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["c"].ok
    assert outputs["b"].error is not None
    assert outputs["b"].error.code == "pipeline_contract"


@pytest.mark.parametrize("made", [RuntimeError("not one"), SystemExit(3)])
def test_a_state_that_cannot_be_made_is_its_requests_error(made: BaseException) -> None:
    class Picky(Counting):
        def make_state(self, request: DiffusionRequest, row: int) -> StepRequestState:
            if request.request_id == "b" and row == 1:
                raise made
            return StepRequestState(request, row)

    loop = loop_of(Picky())
    loop.join([request("a"), request("b", n=2)])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["b"].error is not None
    assert outputs["b"].error.code == "model_error"


class Unsteady(Counting):
    """Request "b" sets a field of its state to something after a method."""

    def __init__(self, method: str, field: str, value: Any) -> None:
        super().__init__()
        self.odd = (method, field, value)

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        self.spoil("encode", state)

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        super().step_scheduler(state, noise_pred)
        self.spoil("step", state)

    def spoil(self, method: str, state: StepRequestState) -> None:
        if state.request_id[0] == "b" and method == self.odd[0]:
            setattr(state, *self.odd[1:])


@pytest.mark.parametrize("method", ["encode", "step"])
@pytest.mark.parametrize("field", ["step_index", "num_steps"])
@pytest.mark.parametrize("value", [None, "6", 2.5, -1, 1 << 70, object()])
def test_what_is_no_count_of_steps_ends_its_request_only(
    method: str, field: str, value: Any
) -> None:
    loop = loop_of(Unsteady(method, field, value))
    loop.join([request("a"), request("b", n=2), request("c")])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["c"].ok
    error = outputs["b"].error
    assert error is not None
    assert (error.code, error.field) == ("pipeline_contract", f"StepRequestState.{field}")


@pytest.mark.parametrize("value", [np.int64(3), torch.tensor(3), True])
def test_whole_numbers_of_any_library_count_steps(value: Any) -> None:
    loop = loop_of(Unsteady("encode", "num_steps", value))
    loop.join([request("b")])
    outputs = loop.tick()
    assert [type(state.num_steps) for state in loop.states()] in ([int], [])
    assert [*outputs, *run(loop).values()][0].ok


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize("error", [UnprintableError(), SystemExit(3)])
@pytest.mark.parametrize("method", ["prepare_encode", "step_scheduler", "post_decode"])
def test_odd_exceptions_end_their_request_only(method: str, error: BaseException) -> None:
    class Raising(Counting):
        def note(self, what: str, state: StepRequestState) -> None:
            super().note(what, state)
            wanted = {"encode": "prepare_encode", "step": "step_scheduler", "decode": "post_decode"}
            if wanted.get(what) == method and state.request_id == "b":
                raise error

    loop = loop_of(Raising())
    loop.join([request("a"), request("b")])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["b"].error is not None
    assert type(error).__name__ in str(outputs["b"].error)


@pytest.mark.parametrize("made", [None, [], [1, 2], "x", {}, torch.zeros(3, 2)])
def test_a_wrong_number_of_predictions_is_the_contracts_error(made: Any) -> None:
    class Wrong(Counting):
        def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
            return made

    loop = loop_of(Wrong())
    loop.join([request("a")])
    error = run(loop)["a"].error
    assert isinstance(error, PipelineContractError)
    assert error.field == "denoise_step"
    assert error.expected == "a tensor or a list with 1 entries"


@pytest.mark.parametrize("stuck_in", ["step_scheduler", "post_decode"])
def test_a_pipeline_that_does_not_come_to_an_end_is_ended(stuck_in: str) -> None:
    class Stuck(Counting):
        def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
            if stuck_in != "step_scheduler" or state.request_id != "b":
                super().step_scheduler(state, noise_pred)

        def post_decode(self, state: StepRequestState) -> Any:
            stuck = stuck_in == "post_decode" and state.request_id == "b"
            return None if stuck else super().post_decode(state)

    loop = loop_of(Stuck())
    loop.join([request("a"), request("b"), request("c", steps=100)])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["c"].ok
    assert isinstance(outputs["b"].error, PipelineContractError)
    assert "does not come to an end" in str(outputs["b"].error)
    assert outputs["c"].metrics.num_forwards == 100


def test_a_decode_may_need_the_denoiser_again() -> None:
    class TwoPasses(Counting):
        """Refines: after the first pass, two more steps."""

        def post_decode(self, state: StepRequestState) -> Any:
            made = super().post_decode(state)
            if state.extra.setdefault("refined", False):
                return made
            state.extra["refined"] = True
            state.num_steps += 2
            state.timesteps = torch.arange(state.num_steps, 0, -1)
            return None

    loop = loop_of(TwoPasses())
    loop.join([request("a", 3)])
    output = run(loop)["a"].raise_for_error()
    assert output.metrics.num_steps == output.metrics.num_forwards == 5


def test_something_that_is_no_picture_fails_its_request() -> None:
    class Odd(Counting):
        def post_decode(self, state: StepRequestState) -> Any:
            return "no picture" if state.request_id == "b" else super().post_decode(state)

    loop = loop_of(Odd())
    loop.join([request("a"), request("b")])
    outputs = run(loop)
    assert outputs["a"].ok
    assert outputs["b"].error is not None
    assert outputs["b"].error.code == "pipeline_contract"


def test_a_release_that_raises_harms_nobody() -> None:
    class Clinging(Counting):
        def release(self, state: StepRequestState) -> None:
            raise ValueError("never")

    loop = loop_of(Clinging())
    loop.join([request("a"), request("b", n=2)])
    assert all(output.ok for output in run(loop).values())


def test_pipelines_may_encode_and_decode_many_at_once() -> None:
    class Batched(Counting):
        def prepare_encode_batch(self, states: Sequence[StepRequestState]) -> list[Any]:
            errors: list[Any] = []
            for state in states:
                super().prepare_encode(state)
                errors.append(ValueError("not b") if state.request_id == "b" else None)
            return errors

        def post_decode_batch(self, states: Sequence[StepRequestState]) -> list[Any]:
            return [ValueError("not c") if state.request_id == "c" else self.post_decode(state)
                    for state in states]  # fmt: skip

        def prepare_encode(self, state: StepRequestState) -> None:
            raise AssertionError("one by one")

    loop = loop_of(Batched())
    loop.join([request(name) for name in "abc"])
    outputs = run(loop)
    assert outputs["a"].ok
    assert "not b" in str(outputs["b"].error)
    assert "not c" in str(outputs["c"].error)


# -- aborts


def test_an_aborted_newcomer_is_never_encoded() -> None:
    aborted: set[str] = set()
    pipeline = Counting()
    loop = loop_of(pipeline, aborted, max_stall_ms=AT_LEAST_ONE)
    loop.join([request("a", 9)])
    loop.tick()
    loop.join([request("b"), request("c", n=2), request("d", 9)])
    loop.tick()
    aborted.add("c")
    (output,) = loop.tick()
    assert (output.request_id, output.aborted, output.metrics.num_forwards) == ("c", True, 0)
    assert logged(pipeline.log, "encode") == ["a/0", "b/0", "d/0"], "d came in its place"


def test_an_abort_ends_a_request_before_the_next_forward() -> None:
    aborted: set[str] = set()
    pipeline = Counting()
    loop = loop_of(pipeline, aborted)
    loop.join([request("a", 9, n=2), request("b", 9)])
    loop.tick()
    pipeline.take_log()
    aborted.add("a")
    (output,) = loop.tick()
    assert (output.request_id, output.aborted) == ("a", True)
    assert output.error is not None
    assert output.error.code == "aborted"
    assert logged(pipeline.log, "denoise") == ["b/0"]
    assert loop.request_ids == ["b"]


def test_all_of_a_group_may_be_ended() -> None:
    loop = loop_of(Counting())
    loop.join([request("a", n=2), request("b")])
    loop.tick()
    error = PipelineContractError("over")
    assert [output.error for output in loop.fail_all(error)] == [error, error]
    assert len(loop) == 0


# -- previews


class Showing(Counting):
    """Its previews are what it is given."""

    def __init__(self, shown: Iterator[Any]) -> None:
        super().__init__()
        self.shown = shown

    def preview(self, state: StepRequestState) -> Any:
        self.note("preview", state)
        found = next(self.shown)
        if isinstance(found, Exception):
            raise found
        return found


def previews(shown: Any, requests: Sequence[DiffusionRequest]) -> list[dict[str, Any]]:
    """Previews by tick."""
    loop = loop_of(Showing(iter(shown)))
    loop.join(requests)
    made = []
    while len(loop):
        loop.tick()
        made.append(loop.previews())
    return made


def test_previews_are_made_every_so_many_steps_but_not_of_the_last() -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    made = previews([picture] * 9, [request("a", 6, n=2, preview_every=2), request("b", 6)])
    assert [list(found) for found in made] == [[], ["a"], [], ["a"], [], []]


@pytest.mark.parametrize(
    ("shown", "shape"),
    [
        (np.zeros((8, 12, 3), np.uint8), (8, 12, 3)),
        (np.ones((512, 1024, 3), np.float32), (128, 256, 3)),
        (np.ones((3, 600, 300, 3)), (256, 128, 3)),
    ],
)
def test_previews_are_small_uint8_pictures(shown: Any, shape: tuple[int, ...]) -> None:
    found = previews([shown], [request("a", 2, preview_every=1)])[0]["a"]
    assert (found.shape, found.dtype) == (shape, np.uint8)
    assert found.max() == (0 if shown.dtype == np.uint8 else 255)


def test_previews_that_would_hold_up_the_others_come_later_in_turns() -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    requests = [
        request(name, 12, preview_every=every) for name, every in zip("abc", (1, 1, 4), strict=True)
    ]
    pipeline, found = Showing(iter([picture] * 99)), []
    loop = loop_of(pipeline, max_stall_ms=AT_LEAST_ONE)
    loop.join(requests)
    while len(loop):
        loop.tick()
        found.append([*loop.previews()])
    assert all(len(made) <= 1 for made in found), "one per tick"
    assert found[3:10].count(["c"]) >= 1, "due at step 4, and not left behind by the others"
    assert {"a", "b", "c"} == {name for made in found for name in made}


def test_a_clip_shows_its_middle_frame() -> None:
    clip = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((5, 4, 4, 3), np.uint8)
    assert previews([clip], [request("a", 2, preview_every=1)])[0]["a"].max() == 2


@pytest.mark.parametrize(
    "shown", [None, "x", np.zeros((4, 4)), np.zeros((4, 4, 4)), ValueError("not now")]
)  # fmt: skip
def test_what_is_no_preview_is_left_out(shown: Any) -> None:
    assert previews([shown], [request("a", 2, preview_every=1)]) == [{}, {}]


def test_a_pipeline_without_previews_shows_none() -> None:
    loop = loop_of(Counting())
    loop.join([request("a", preview_every=1)])
    loop.tick()
    assert loop.previews() == {}
