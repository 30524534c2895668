"""The conformance suite: native and adapted pipelines pass it, broken ones fail the right check."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from tiny_flow import TinyFlow
from tiny_models import save_tiny_stable_diffusion

from omni_engine import OmniDiffusionSamplingParams
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.protocol.requests import DiffusionRequest, build_request
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.config import EngineArgs
from omni_engine.stages.contracts import LoadContext, StepBatch, StepRequestState
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.building import build_pipeline
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.conformance import CHECKS, ConformanceError, check_conformance
from omni_engine.worker.conformance_trial import Trial
from omni_engine.worker.diffusers_adapter import DiffusersPipeline
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.loading import load_pipeline

EXACT = 1e-12
"""Of full scale, in float64."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def request(i: int, **params: Any) -> DiffusionRequest:
    given = {"seed": 7 * i, "num_inference_steps": 2 + i % 4, "output_type": "latent", **params}
    prompts = ["a cat", "a small red circle", "a blue square on a cat beside a red circle"]
    return build_request(prompts[i % 3], OmniDiffusionSamplingParams.from_mapping(given))


def flow_request(i: int) -> DiffusionRequest:
    return request(i, guidance_scale=1.0 + i % 3, height=32, width=32)


def diffusion_request(i: int) -> DiffusionRequest:
    """Guidance of 1 is off: a forward has one row for some and two for others."""
    return request(i, guidance_scale=1.0 + 2 * (i % 3), height=16, width=16)


def guided_request(i: int) -> DiffusionRequest:
    return request(i, guidance_scale=2.0 + i, height=16, width=16)


def qwen_request(i: int) -> DiffusionRequest:
    params: dict[str, Any] = {"true_cfg_scale": 1.0 + i % 2, "negative_prompt": " "}
    return request(i, height=64, width=64, **params)


def native(dtype: str) -> TinyFlow:
    return TinyFlow.load(LoadContext("", "cpu", dtype))


def adapted(model: Path, dtype: str, **settings: Any) -> Any:
    """A diffusers pipeline as a worker loads, certifies and wraps it."""
    given = EngineArgs(model=str(model), step_execution=True, **settings).model_dump(mode="json")
    spec = WorkerSpec("worker", "", {**given, "dtype": dtype}, str(model), "cpu")
    pipeline, _ = build_pipeline(load_pipeline(spec), spec, AbortFlags())
    return pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_stable_diffusion(tmp_path_factory.mktemp("models") / "tiny-sd")


@pytest.fixture(scope="module")
def stable_diffusion(folder: Path) -> Any:
    pipeline = adapted(folder, "float64")
    assert pipeline.capabilities.supports_request_batch, "or nothing is asked of sharing"
    return pipeline


@pytest.fixture(scope="module")
def deterministic(folder: Path) -> Any:
    pipeline = adapted(folder, "float32", deterministic=True, max_num_seqs=3)
    assert pipeline.capabilities.supports_request_batch
    return pipeline


every_check = pytest.mark.parametrize("check", CHECKS)


@every_check
def test_a_native_pipeline_conforms(check: str) -> None:
    check_conformance(native("float64"), flow_request, tolerance=EXACT, checks=[check])


@every_check
def test_an_adapted_pipeline_conforms(check: str, stable_diffusion: Any) -> None:
    check_conformance(stable_diffusion, diffusion_request, tolerance=EXACT, checks=[check])


@every_check
def test_deterministic_mode_conforms_to_the_bit(check: str, deterministic: Any) -> None:
    check_conformance(deterministic, guided_request, tolerance=0, checks=[check])


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_pipeline_that_shares_nothing_conforms(folder: Path, exclusive: bool) -> None:
    fused = adapted(folder, "float64")
    fused.stepper.close()
    capabilities = dataclasses.replace(
        fused.capabilities, supports_request_batch=False, exclusive=exclusive
    )
    stepper = make_stepper(fused.pipe, FusionReport(False, ""))
    alone = DiffusersPipeline(fused.pipe, stepper, capabilities, AbortFlags())
    check_conformance(alone, diffusion_request, tolerance=EXACT)


@pytest.mark.slow
def test_the_bundled_model_conforms() -> None:
    check_conformance(adapted(MODEL_DIR, "float64"), qwen_request, tolerance=EXACT)


def test_pictures_conform_as_latents_do(folder: Path) -> None:
    def pictures(i: int) -> DiffusionRequest:
        return request(i, guidance_scale=50.0 + i, height=16, width=16, output_type="np")

    check_conformance(adapted(folder, "float32"), pictures)
    check_conformance(native("float32"), lambda i: request(i, output_type="np"))


class Fragile(StableDiffusionPipeline):
    """Raises where its prompt says, from inside of the pipeline's own call."""

    def encode_prompt(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        self.fragile = prompt
        if prompt == "raise in encode":
            raise ValueError(prompt)
        if prompt == "raise in step":
            self.scheduler.step = self.raise_in_step  # of this request's scheduler
        return super().encode_prompt(prompt, *args, **kwargs)

    def raise_in_step(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(self.fragile)

    def run_safety_checker(self, *args: Any) -> Any:
        if self.fragile == "raise in decode":
            raise ValueError(self.fragile)
        return super().run_safety_checker(*args)


def test_an_adapted_pipelines_own_errors_end_one_request(folder: Path) -> None:
    pipeline = adapted(folder, "float64", pipeline="test_conformance:Fragile")
    sizes = {"height": 16, "width": 16, "output_type": "np", "guidance_scale": 3.0}
    good = [
        dataclasses.replace(
            request(i, num_outputs_per_prompt=1 + i % 2, **sizes), request_id=f"{i}"
        )
        for i in range(3)
    ]
    prompts = ["raise in encode", "raise in step", "raise in decode"]
    bad = [dataclasses.replace(request(i, **sizes), prompt=text, request_id=text)
           for i, text in enumerate(prompts)]  # fmt: skip
    expected = Trial(pipeline).run(good)
    trial = Trial(pipeline)
    trial.join([*bad, *good])
    trial.tick()
    assert list(trial.outputs) == ["raise in encode", "raise in step"]
    outputs = trial.run()
    for text in prompts:
        assert f"ValueError: {text}" in str(outputs[text].error)
    for one in good:
        made = outputs[one.request_id].raise_for_error().images or []
        wanted = expected[one.request_id].images or []
        assert [picture.tobytes() for picture in made] == [p.tobytes() for p in wanted]
    assert not trial.alive()


# -- what the suite is for


class OnSelf(TinyFlow):
    """Keeps the prompt on the pipeline: the latest newcomer's wins."""

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        self.prompt = state.extra["prompt"]

    def denoise_step(self, batch: StepBatch, states: Any) -> Any:
        for state in states:
            state.extra["prompt"] = self.prompt
        return super().denoise_step(batch, states)


class OneGuidance(TinyFlow):
    """Takes the first state's guidance for all."""

    def denoise_step(self, batch: StepBatch, states: Any) -> Any:
        for state in states:
            state.extra["guidance"] = states[0].extra["guidance"]
        return super().denoise_step(batch, states)


class Unseeded(TinyFlow):
    """Draws its noise from the global generator."""

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        state.latents = torch.randn_like(state.latents)


class Reseeding(TinyFlow):
    """Seeds the global generator instead of one of its own."""

    def prepare_encode(self, state: StepRequestState) -> None:
        torch.manual_seed(state.seed)
        super().prepare_encode(state)


class SameSeed(TinyFlow):
    """Ignores which picture of its request a state is."""

    def prepare_encode(self, state: StepRequestState) -> None:
        row, state.row = state.row, 0
        super().prepare_encode(state)
        state.row = row


class NoPrompt(TinyFlow):
    """Ignores the prompt."""

    def encode(self, prompt: str) -> torch.Tensor:
        return super().encode("always the same")


class Hoarding(TinyFlow):
    """Keeps every state."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[StepRequestState] = []

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        self.states.append(state)


class Circular(TinyFlow):
    """Builds a cycle, which only the garbage collector ends."""

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        state.extra["state"] = state


class OneStepTooMany(TinyFlow):
    """Ends beyond its last step."""

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        super().step_scheduler(state, noise_pred)
        state.step_index += state.step_index == state.num_steps


class ReusedBuffer(TinyFlow):
    """Decodes every picture into the same array."""

    def post_decode(self, state: StepRequestState) -> Any:
        made = super().post_decode(state)
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty_like(made)
        return self.buffer.copy_(made)


class Raising(TinyFlow):
    """Fails for more than one state, so that nothing is shared."""

    def denoise_step(self, batch: StepBatch, states: Any) -> Any:
        (_,) = states
        return super().denoise_step(batch, states)


class SlowToLeave(TinyFlow):
    """Puts off the decode of what had company."""

    def denoise_step(self, batch: StepBatch, states: Any) -> Any:
        for state in states:
            state.extra["put_off"] = len({other.request_id for other in states}) > 1
        return super().denoise_step(batch, states)

    def post_decode(self, state: StepRequestState) -> Any:
        put_off, state.extra["put_off"] = state.extra["put_off"], False
        return None if put_off else super().post_decode(state)


class OtherForward(TinyFlow):
    """Its request batches and its steps don't agree."""

    supports_request_batch = True

    def forward(self, batch: Any) -> Any:
        from omni_engine.worker.wave import run_wave

        outputs = run_wave(self, batch, lambda _: False)
        for output in outputs:
            output.latents = output.latents + 1
        return outputs


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (OnSelf, "company_changes_nothing", "request 0 with company differs by"),
        (OnSelf, "groups_take_turns", "with company differs by"),
        (OneGuidance, "company_changes_nothing", "with company differs by"),
        (Unseeded, "same_request_same_bytes", "not seeded"),
        (Reseeding, "global_random_state_is_left_alone", "use a generator per state"),
        (SameSeed, "picture_i_uses_seed_plus_i", "picture 1 of 2 differs"),
        (ReusedBuffer, "picture_i_uses_seed_plus_i", "picture 0 of 2 differs"),
        (NoPrompt, "prompt_and_seed_matter", "another prompt gives the same picture"),
        (Hoarding, "nothing_is_left", "still referred to after their end: a state of request 0"),
        (Circular, "nothing_is_left", "no reference cycles"),
        (Circular, "abort_touches_nobody", "one tick later still holds the state of picture 0"),
        (OneStepTooMany, "progress_ends_complete", "it must end at num_steps"),
        (Raising, "late_joiners_share_forwards", "shared no forward"),
        (SlowToLeave, "finishers_leave_at_once", "took 3 ticks, 2 alone"),
        (OtherForward, "request_mode_equals_step_mode", "in a request batch differs by"),
    ],
)
def test_broken_pipelines_fail_the_check_that_names_the_fault(
    cls: type[TinyFlow], check: str, message: str
) -> None:
    pipeline = cls.load(LoadContext("", "cpu", "float64"))
    with pytest.raises(ConformanceError) as caught:
        check_conformance(pipeline, flow_request, tolerance=EXACT, checks=[check])
    assert list(caught.value.failures) == [check]
    assert message in str(caught.value)


def test_an_adapter_that_keeps_aborted_calls_is_found(folder: Path) -> None:
    pipeline = adapted(folder, "float64")
    pipeline.release = lambda state: None
    with pytest.raises(ConformanceError, match=r"one tick later still holds the pipeline call"):
        check_conformance(pipeline, diffusion_request, checks=["abort_touches_nobody"])


def test_every_failed_check_is_named_and_the_others_run() -> None:
    with pytest.raises(AssertionError) as caught:
        check_conformance(Hoarding.load(LoadContext("", "cpu", "float64")), flow_request)
    failures = caught.value.failures  # type: ignore[attr-defined]
    assert {"nothing_is_left", "abort_touches_nobody"} <= set(failures)
    assert "company_changes_nothing" not in failures


def test_requests_that_are_all_alike_prove_nothing() -> None:
    with pytest.raises(ConformanceError, match="have the same prompts"):
        check_conformance(native("float64"), lambda i: flow_request(0), checks=["requests_differ"])


def test_the_callers_random_state_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_conformance(native("float64"), flow_request, checks=["same_request_same_bytes"])
    assert torch.equal(torch.rand(1), expected)
