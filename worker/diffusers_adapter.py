"""Gives any diffusers pipeline both contracts: request batches and steps.

Steps are those of cooperative stepping. A request batch runs as a wave of steps from start to end,
or as one list call where that is exact and was faster at load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_engine.protocol.errors import ModelError, RequestAbortedError
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import PipelineCapabilities, StepState
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import DiffusionRequestBatch, StepBatch, StepRequestState
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.cooperative import Answer, CooperativeCall, CooperativeStepper
from omni_engine.worker.previews import PreviewMaker
from omni_engine.worker.results import make_output
from omni_engine.worker.row_calls import CallBuilder, Row, rows_of, sample_rate_of, unpack
from omni_engine.worker.samplers import with_sampler
from omni_engine.worker.step_calls import error_of, result_of
from omni_engine.worker.step_counts import StepCounts
from omni_engine.worker.suspension import Role
from omni_engine.worker.wave import OnStates, run_wave


@dataclass(slots=True, eq=False)
class CooperativeState(StepRequestState):
    """A picture whose pipeline call is under way."""

    call: CooperativeCall | None = None

    @property
    def denoised(self) -> bool:
        """Whether the call has ended or waits for its decode."""
        assert self.call is not None
        return self.call.waits_for not in (Role.DENOISE, Role.ENCODE)

    @property
    def counts(self) -> StepCounts | None:
        """The call's forwards; None before it has begun."""
        return None if self.call is None else self.call.counts


class DiffusersPipeline:
    """A diffusers pipeline under the request-batch and the stepwise contract.

    Args:
        pipe: a loaded pipeline; called unmodified.
        stepper: wraps it.
        capabilities: what it can do.
        aborts: consulted between steps.
        list_call: whether request batches run as one list call.
    """

    supports_step_execution = True

    def __init__(
        self,
        pipe: Any,
        stepper: CooperativeStepper,
        capabilities: PipelineCapabilities,
        aborts: AbortFlags,
        *,
        list_call: bool = False,
    ) -> None:
        self.pipe, self.stepper, self.capabilities = pipe, stepper, capabilities
        self.supports_request_batch = capabilities.supports_request_batch
        self._aborts = aborts
        self.list_call = list_call
        self.sample_rate = sample_rate_of(pipe)
        self._builder = CallBuilder(pipe)
        self._previews = PreviewMaker(pipe, stepper)

    # -- request batches

    def forward(
        self, batch: DiffusionRequestBatch, on_states: OnStates | None = None
    ) -> list[DiffusionOutput]:
        """Run the batch; a request that fails or was aborted carries its error.

        Raises:
            RequestAbortedError: when every request of a list call was aborted.
        """
        if self._runs_as_list(batch):
            return self.run_list_call(batch, on_states)
        return self.run_wave(batch, on_states)

    def run_wave(
        self, batch: DiffusionRequestBatch, on_states: OnStates | None = None
    ) -> list[DiffusionOutput]:
        """Step the batch from start to end, request by request if forwards can't be shared."""
        one_at_a_time = not self.supports_request_batch
        return run_wave(
            self,
            batch,
            self._aborts.is_set,
            on_states,
            one_at_a_time=one_at_a_time,
            adapters=self.stepper.adapters,
        )

    def run_list_call(
        self, batch: DiffusionRequestBatch, on_states: OnStates | None = None
    ) -> list[DiffusionOutput]:
        """Run the batch as one call of the pipeline with lists."""
        rows = rows_of(batch.requests)
        steps = _ListCallSteps(self._aborts, batch.requests, on_states)
        arguments = self._builder.batch(rows)
        if "callback_on_step_end" in self._builder.parameters:
            arguments["callback_on_step_end"] = steps
        before = self.stepper.direct_forwards
        torch.manual_seed(rows[0].seed)  # pipelines that draw from global state stay reproducible
        made = unpack(self.pipe(**arguments), latents=rows[0].wants_latents)
        if len(made) != len(rows):
            raise ModelError(f"the pipeline returned {len(made)} results for {len(rows)} rows")
        metrics = OutputMetrics(
            num_steps=steps.count,
            num_forwards=self.stepper.direct_forwards - before,
            mean_batch_size=batch.num_reqs,
            max_batch_size=batch.num_reqs,
        )
        remaining = iter(made)
        return [
            make_output(
                request,
                [next(remaining) for _ in range(request.num_outputs)],
                dataclasses.replace(metrics),
                self.sample_rate,
            )
            for request in batch.requests
        ]

    def _runs_as_list(self, batch: DiffusionRequestBatch) -> bool:
        wants_own = any(r.sampling_params.sampler or r.preview_every for r in batch.requests)
        return self.list_call and not wants_own

    # -- steps

    def make_state(self, request: DiffusionRequest, row: int) -> CooperativeState:
        """Return the state of one picture."""
        return CooperativeState(request, row)

    def prepare_encode(self, state: CooperativeState) -> None:
        """Begin a picture's call and run it to its first denoiser forward."""
        (error,) = self.prepare_encode_batch([state])
        if error is not None:
            raise error

    def prepare_encode_batch(
        self, states: Sequence[CooperativeState]
    ) -> list[BaseException | None]:
        """Begin the calls of several pictures, which share their text encoders' forwards."""
        errors = [error_of(self._start, state) for state in states]
        self.stepper.encode([state.call for state in states if state.call is not None])
        for index, state in enumerate(states):
            if state.call is not None:
                errors[index] = state.call.error
                _note_progress(state)
        return errors

    def denoise_step(
        self, batch: StepBatch, states: Sequence[CooperativeState]
    ) -> list[Answer | None]:
        """Run one forward for every group of calls that can share it; None for one held back."""
        answers = self.stepper.forward(_call(state) for state in states)
        return [answers.get(_call(state)) for state in states]

    def step_scheduler(self, state: CooperativeState, noise_pred: Answer | None) -> None:
        """Resume a call with its part of the forward; it takes its own guidance and step."""
        if noise_pred is None:
            return
        call = _call(state)
        self.stepper.resume(call, noise_pred)
        _note_progress(state)
        if call.error is not None:
            raise call.error

    def post_decode(self, state: CooperativeState) -> Any:
        """Run a call to its end; None if it needs the denoiser again."""
        (result,) = self.post_decode_batch([state])
        if isinstance(result, BaseException):
            raise result
        return result

    def post_decode_batch(self, states: Sequence[CooperativeState]) -> list[Any]:
        """Decode several pictures, small ones together."""
        self.stepper.step([_call(state) for state in states if not _call(state).done])
        return [self._result(state) for state in states]

    def release(self, state: CooperativeState) -> None:
        """Forget a picture; what is under way is unwound."""
        if state.call is not None:
            self.stepper.abort(state.call)
            state.call = None

    def preview(self, state: CooperativeState) -> Any:
        """Return a picture of what the result will look like, or None."""
        row = Row(state.request, state.row)
        return self._previews.make(_call(state), self._builder.single(row), row.seed)

    def _start(self, state: CooperativeState) -> None:
        row, request = Row(state.request, state.row), state.request
        state.call = self.stepper.start(
            self._builder.single(row),
            row.seed,
            request.request_id,
            scheduler=with_sampler(self.pipe, request.sampling_params.sampler, row.seed),
            preview_every=request.preview_every if state.row == 0 else None,
        )

    def _result(self, state: CooperativeState) -> Any:
        call = _call(state)
        if call.error is not None:
            return call.error
        return result_of(self._one_result, call, state) if call.done else None

    def _one_result(self, call: CooperativeCall, state: CooperativeState) -> Any:
        made = unpack(call.result, latents=Row(state.request, state.row).wants_latents)
        if len(made) != 1:
            raise ModelError(f"the pipeline returned {len(made)} results for one picture")
        return made[0]


def _call(state: CooperativeState) -> CooperativeCall:
    assert state.call is not None
    return state.call


def _note_progress(state: CooperativeState) -> None:
    call = _call(state)
    expected = state.request.sampling_params.num_inference_steps or 0
    state.step_index, state.num_steps = call.step_index, call.num_steps or expected


class _ListCallSteps:
    """Counts a list call's steps; ends it when all of its requests were aborted."""

    def __init__(
        self,
        aborts: AbortFlags,
        requests: Sequence[DiffusionRequest],
        on_states: Callable[..., None] | None,
    ) -> None:
        self.count = 0
        self._aborts = aborts
        self._requests = requests
        self._on_states = on_states

    def __call__(
        self, pipe: Any, step: int, timestep: Any, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Act as diffusers' ``callback_on_step_end``."""
        self.count += 1
        if all(self._aborts.is_set(request.request_id) for request in self._requests):
            raise RequestAbortedError("the request was aborted")
        if self._on_states is not None:
            total = getattr(pipe, "num_timesteps", 0)
            self._on_states(
                [StepState(r.request_id, self.count, total) for r in self._requests], {}
            )
        return state
