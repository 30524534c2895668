"""Cooperative stepping: unmodified pipeline calls share forwards, and nobody's result changes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin, QwenImagePipeline
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from tiny_models import tiny_stable_diffusion

from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.worker.certification import certify
from omni_engine.worker.cooperative import CooperativeCall, CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.process_state import TorchModes
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.views import denoisers, make_view

PROMPTS = [
    "a cat",
    "a small red circle",
    "a blue square on a cat beside a red circle",
    "a",
    "red a",
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def sd() -> Any:
    return quiet(tiny_stable_diffusion()).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def qwen() -> Any:
    return quiet(QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float64))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sd_request(seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[seed % len(PROMPTS)],
        "height": 16,
        "width": 16,
        "num_inference_steps": 2 + seed % 3,
        "guidance_scale": 2.0 + seed,
        "output_type": "latent",
        **changes,
    }


def alone(pipe: Any, requests: list[dict[str, Any]]) -> list[torch.Tensor]:
    made = []
    for seed, request in enumerate(requests):
        torch.manual_seed(seed)
        made.append(make_view(pipe)(**request, generator=generator(seed)).images)
    return made


def start_all(stepper: CooperativeStepper, requests: list[dict[str, Any]]) -> list[CooperativeCall]:
    return [
        stepper.start({**request, "generator": generator(seed)}, seed, f"request {seed}")
        for seed, request in enumerate(requests)
    ]


def together(pipe: Any, requests: list[dict[str, Any]]) -> tuple[list[Any], CooperativeStepper]:
    stepper = CooperativeStepper(pipe, denoisers(pipe))
    calls = start_all(stepper, requests)
    stepper.run()
    stepper.close()
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.result.images for call in calls], stepper


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        full_scale = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * full_scale)
    assert len({tensor.sum().item() for tensor in one}) == len(one), "requests must differ"


SCHEDULERS = ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler",
              "DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "LCMScheduler",
              "HeunDiscreteScheduler", "DDPMScheduler"]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULERS)
def test_mixed_steps_and_guidance_equal_alone_with_every_scheduler(sd: Any, name: str) -> None:
    """Stochastic samplers draw from their own request's generator."""
    sd.scheduler = getattr(diffusers, name).from_config(sd.scheduler.config)
    requests = [sd_request(seed) for seed in range(5)]
    fused, stepper = together(sd, requests)
    assert_equal(fused, alone(sd, requests))
    assert stepper.fallbacks == 0
    assert stepper.forwards <= 8
    assert stepper.rows > 2 * stepper.forwards


def test_different_schedulers_share_forwards(sd: Any) -> None:
    requests = [sd_request(seed, num_inference_steps=3) for seed in range(4)]
    names = ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "DDIMScheduler", "LCMScheduler"]
    stepper = CooperativeStepper(sd, denoisers(sd))
    expected, calls = [], []
    for seed, (request, name) in enumerate(zip(requests, names, strict=True)):
        sd.scheduler = getattr(diffusers, name).from_config(sd.scheduler.config)
        expected.append(make_view(sd)(**request, generator=generator(seed)).images)
        calls.append(stepper.start({**request, "generator": generator(seed)}, seed, str(seed)))
    stepper.run()
    stepper.close()
    assert_equal([call.result.images for call in calls], expected)
    assert max(call.counts.largest for call in calls) >= 2


QWEN_PROMPTS = [
    "a red star on a white background",
    "a small blue circle left of a yellow square on a black background",
]


def qwen_request(seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": QWEN_PROMPTS[seed % 2],
        "negative_prompt": " ",
        "height": 64,
        "width": 64,
        "num_inference_steps": 2 + seed % 3,
        "true_cfg_scale": 1.5 + seed,
        "output_type": "latent",
        **changes,
    }


def test_ragged_prompts_share_forwards_by_padding(qwen: Any) -> None:
    requests = [qwen_request(seed) for seed in range(4)]
    fused, stepper = together(qwen, requests)
    assert_equal(fused, alone(qwen, requests))
    assert stepper.forwards == 8, "the longest request's 4 steps, each with and without the prompt"


def test_two_shapes_of_equal_token_count_never_share(qwen: Any) -> None:
    shapes = [(32, 128), (128, 32), (64, 64), (32, 128)]
    requests = [qwen_request(seed, height=h, width=w, num_inference_steps=2)
                for seed, (h, w) in enumerate(shapes)]  # fmt: skip
    fused, stepper = together(qwen, requests)
    assert_equal(fused, alone(qwen, requests))
    assert stepper.forwards == 3 * 4


def test_requests_join_late_and_leave_early(sd: Any) -> None:
    requests = [sd_request(0, num_inference_steps=6), sd_request(1, num_inference_steps=2)]
    expected = alone(sd, requests)
    stepper = CooperativeStepper(sd, denoisers(sd))
    first = stepper.start({**requests[0], "generator": generator(0)}, 0, "first")
    for _ in range(3):
        stepper.tick()
    second = stepper.start({**requests[1], "generator": generator(1)}, 1, "second")
    stepper.tick()
    assert second.counts.largest == 2, "its first forward is shared"
    stepper.tick()
    assert second.done
    assert stepper.live == [first]
    stepper.run()
    stepper.close()
    assert_equal([first.result.images, second.result.images], expected)


def test_a_newcomer_gets_into_step_with_the_others(qwen: Any) -> None:
    """With padding to one shape, the forwards with and without the prompt can't be shared."""
    requests = [qwen_request(0, num_inference_steps=6), qwen_request(1, num_inference_steps=3)]
    requests = [{**request, "prompt": QWEN_PROMPTS[0]} for request in requests]
    expected = alone(qwen, requests)
    stepper = CooperativeStepper(qwen, denoisers(qwen), pad_calls_to=2)
    first, second = (
        {**request, "generator": generator(seed)} for seed, request in enumerate(requests)
    )
    long = stepper.start(first, 0, "long")
    stepper.tick()
    late = stepper.start(second, 1, "late")
    stepper.tick()
    assert (late.counts.forwards, long.counts.forwards) == (0, 2), "held for one tick"
    stepper.run()
    assert late.counts.shared_with == 2 * late.counts.forwards
    assert late.counts.forwards == 6
    assert stepper.forwards == 12, "as many as the long one takes alone"
    stepper.close()
    assert_equal([long.result.images, late.result.images], expected)


def test_an_abort_frees_tensors_at_once_and_touches_nobody(sd: Any) -> None:
    requests = [sd_request(seed, num_inference_steps=3) for seed in range(4)]
    expected = alone(sd, requests)
    stepper = CooperativeStepper(sd, denoisers(sd))
    calls = start_all(stepper, requests)
    stepper.tick()
    pending = calls[1].pending
    assert pending is not None
    latents = weakref.ref(pending.call.arguments["sample"])
    del pending
    stepper.abort(calls[1])
    assert latents() is None
    assert calls[1].aborted
    assert len(stepper.live) == 3
    stepper.run()
    stepper.close()
    rest = [0, 2, 3]
    assert_equal([calls[i].result.images for i in rest], [expected[i] for i in rest])


def failing_callback(pipe: Any, step: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
    if step == 1:
        raise RuntimeError("in the callback")
    return state


def test_a_request_that_raises_fails_alone(sd: Any) -> None:
    requests = [sd_request(seed, num_inference_steps=3) for seed in range(4)]
    expected = alone(sd, requests)
    stepper = CooperativeStepper(sd, denoisers(sd))
    requests[1] |= {"callback_on_step_end": failing_callback}
    requests[2] |= {"height": -7}
    calls = start_all(stepper, requests)
    stepper.run()
    stepper.close()
    assert str(calls[1].error) == "in the callback"
    assert isinstance(calls[2].error, ValueError)
    assert all(call.error is None or call.error.__traceback__ is None for call in calls)
    assert_equal([calls[i].result.images for i in (0, 3)], [expected[i] for i in (0, 3)])


def test_a_fused_forward_that_fails_runs_its_members_alone(sd: Any) -> None:
    requests = [sd_request(seed, num_inference_steps=2) for seed in range(3)]
    expected = alone(sd, requests)
    original = sd.unet.forward

    @functools.wraps(original)
    def poisoned(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sample.shape[0] > 2:
            raise RuntimeError("too many rows")
        return original(sample, *args, **kwargs)

    sd.unet.forward = poisoned
    fused, stepper = together(sd, requests)
    assert stepper.fallbacks == 2, "once for each step"
    assert_equal(fused, expected)


def test_forwards_never_exceed_the_row_limit(sd: Any) -> None:
    requests = [sd_request(seed, num_inference_steps=2) for seed in range(4)]
    expected = alone(sd, requests)
    stepper = CooperativeStepper(sd, denoisers(sd), max_rows=4)
    calls = start_all(stepper, requests)
    stepper.run()
    stepper.close()
    assert stepper.forwards == 4, "two requests of two rows each in every forward"
    assert_equal([call.result.images for call in calls], expected)


def test_process_state_belongs_to_the_request(sd: Any) -> None:
    before, random = TorchModes.current(), torch.get_rng_state()
    together(sd, [sd_request(seed) for seed in range(3)])
    assert TorchModes.current() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert "forward" not in vars(sd.unet)


# -- a pipeline class that this project has never seen


class OddDenoiser(ModelMixin, ConfigMixin):
    """Renames and reorders its arguments; mixes rows, a shared table, a scalar and a flag."""

    @register_to_config
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(width, width, dtype=torch.float64)

    def forward(
        self, when: torch.Tensor, *, words: torch.Tensor, table: torch.Tensor,
        noisy: torch.Tensor, loud: bool,
    ) -> tuple[torch.Tensor]:  # fmt: skip
        out = torch.tanh(self.mix(noisy + table + words[:, None] + when.reshape(-1, 1, 1)))
        return (out * (2.0 if loud else 1.0),)


class ListDenoiser(OddDenoiser):
    """Takes one tensor of tokens per row, in a list: nothing tells that from other lists."""

    def forward(self, when: torch.Tensor, *, words: Any, **rest: Any) -> tuple[torch.Tensor]:
        return super().forward(when, words=torch.stack([w.mean(0) for w in words]), **rest)


class OddPipeline(DiffusionPipeline):
    def __init__(self, brain: OddDenoiser) -> None:
        super().__init__()
        self.register_modules(brain=brain)

    @torch.no_grad()
    def __call__(
        self, prompt: str, num_inference_steps: int = 3, height: int = 8, width: int = 8,
        loud: bool = False, generator: Any = None, output_type: str = "np",
    ) -> ImagePipelineOutput:  # fmt: skip
        tokens = torch.tensor([[ord(c) / 99.0] * 6 for c in prompt], dtype=torch.float64)
        table = torch.linspace(0, height / width, 4 * 6, dtype=torch.float64).reshape(4, 6)
        x = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
        for i in range(num_inference_steps):
            when = torch.tensor(i / num_inference_steps, dtype=torch.float64)
            words = [tokens] if isinstance(self.brain, ListDenoiser) else tokens.mean(0)[None]
            (x,) = self.brain(when, table=table, noisy=x, words=words, loud=loud)
            x = x + 0.1 * torch.randn(1, 4, 6, dtype=torch.float64)  # unseeded: global generator
        return ImagePipelineOutput(images=x[:, None].numpy().clip(0, 1))


@pytest.fixture
def odd() -> Any:
    torch.manual_seed(0)
    return quiet(OddPipeline(OddDenoiser()))


def odd_requests() -> list[dict[str, Any]]:
    shapes = [(8, 8), (16, 8), (8, 8), (8, 8)]
    return [
        {"prompt": "word" * seed + "s", "num_inference_steps": 2 + seed, "height": h, "width": w,
         "loud": seed == 3}
        for seed, (h, w) in enumerate(shapes)
    ]  # fmt: skip


@pytest.mark.parametrize(("denoiser", "forwards"), [(OddDenoiser, 12), (ListDenoiser, 14)])
def test_an_unseen_pipeline_is_served_exactly(denoiser: Any, forwards: int) -> None:
    """Shared where it is clear how; another table, another flag and a list never share."""
    torch.manual_seed(0)
    pipe, requests = quiet(OddPipeline(denoiser())), odd_requests()
    expected = [torch.from_numpy(picture) for picture in alone(pipe, requests)]
    fused, stepper = together(pipe, requests)
    assert_equal([torch.from_numpy(picture) for picture in fused], expected)
    assert stepper.fallbacks == 0
    assert stepper.rows == 2 + 3 + 4 + 5
    assert stepper.forwards == forwards


def report(pipe: Any) -> FusionReport:
    return certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))


def test_certification_passes_what_is_exact(sd: Any, odd: Any) -> None:
    for pipe in (sd, odd):
        found = report(pipe)
        assert found.fused
        assert "certified at load" in found.note


class FirstRowReader(OddDenoiser):
    """Looks as if every argument had rows, but uses the first row of one for all."""

    def forward(
        self, when: torch.Tensor, *, noisy: torch.Tensor, **rest: Any
    ) -> tuple[torch.Tensor]:
        return super().forward(when, noisy=noisy + 0.5 * noisy[:1], **rest)


def test_certification_refuses_what_mixes_rows() -> None:
    torch.manual_seed(0)
    found = report(quiet(OddPipeline(FirstRowReader())))
    assert not found.fused
    assert "sharing forwards changes pictures" in found.note


class RaisingPipeline(OddPipeline):
    def __call__(self, prompt: str, height: int = 8, width: int = 8, generator: Any = None) -> Any:
        raise ValueError("not this size")


def test_certification_says_when_nothing_is_shared() -> None:
    torch.manual_seed(0)
    found = report(quiet(OddPipeline(ListDenoiser())))
    assert not found.fused
    assert "not clear how its calls combine" in found.note


def test_certification_says_why_it_could_not_run(odd: Any) -> None:
    found = report(quiet(RaisingPipeline(odd.brain)))
    assert not found.fused
    assert "not this size" in found.note


class PAGPipeline(OddPipeline):
    """Named like the perturbed-attention pipelines."""


def test_pipelines_that_rewire_their_model_run_alone(odd: Any) -> None:
    assert "rewires" in report(quiet(PAGPipeline(odd.brain))).note
    assert not CooperativeStepper(PAGPipeline(odd.brain), []).fused


def test_memory_is_flat_over_a_thousand_aborts(odd: Any) -> None:
    stepper = CooperativeStepper(odd, denoisers(odd))
    alive: list[Callable[[], Any]] = []
    for seed in range(1000):
        call = stepper.start({"prompt": "x", "generator": generator(seed)}, seed, str(seed))
        assert call.pending is not None
        alive.append(weakref.ref(call.pending.call.arguments["noisy"]))
        stepper.abort(call)
        del call
    stepper.close()
    assert not [tensor for tensor in alive if tensor() is not None]
