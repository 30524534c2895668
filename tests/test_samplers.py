"""Samplers as a request parameter: exactly diffusers' own, checked against the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from families import FAMILIES
from families_unet import UNET_FAMILIES
from tiny_models import save_tiny_stable_diffusion, tiny_stable_diffusion

from omni_engine import Omni, OmniDiffusionSamplingParams
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.admission import Admission
from omni_engine.protocol.errors import ConfigError, InvalidRequestError
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import build_request
from omni_engine.stages.config import EngineArgs, Limits
from omni_engine.worker.cooperative import CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.sampler_table import SAMPLERS, TAKE_ETA, TAKE_SIGMAS, Space
from omni_engine.worker.samplers import FLOW_PIPELINES, samplers_for, with_sampler
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.views import denoisers, make_view

SEED = 5
LATENT_DIFFUSION = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "clip_sample": False, "steps_offset": 1,
}  # fmt: skip
KARRAS = {"use_karras_sigmas": True}
SDE = {"algorithm_type": "sde-dpmsolver++"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lms": ("LMSDiscreteScheduler", {}),
    "lms_karras": ("LMSDiscreteScheduler", KARRAS),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_karras": ("KDPM2DiscreteScheduler", KARRAS),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpm2_a_karras": ("KDPM2AncestralDiscreteScheduler", KARRAS),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "dpmpp_2m_karras": ("DPMSolverMultistepScheduler", KARRAS),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", SDE),
    "dpmpp_2m_sde_karras": ("DPMSolverMultistepScheduler", {**SDE, **KARRAS}),
    "dpmpp_sde": ("DPMSolverSDEScheduler", {"noise_sampler_seed": SEED}),
    "dpmpp_sde_karras": ("DPMSolverSDEScheduler", {"noise_sampler_seed": SEED, **KARRAS}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow_lcm": ("FlowMatchLCMScheduler", {}),
    "flow_dpmpp_2m": ("DPMSolverMultistepScheduler", FLOW),
    "flow_unipc": ("UniPCMultistepScheduler", FLOW),
    "edm_euler": ("EDMEulerScheduler", {}),
    "edm_dpmpp_2m": ("EDMDPMSolverMultistepScheduler", {}),
}
"""What a user of plain diffusers writes: ``Class.from_config(config, **these)``."""

NEED_PACKAGES = {name for name in SAMPLERS if name.startswith(("lms", "dpmpp_sde"))}
INSTALLED = {
    name for name in SAMPLERS
    if "dummy" not in getattr(diffusers, PLAIN[name][0]).__module__
}  # fmt: skip
NOISE = sorted(n for n in INSTALLED if SAMPLERS[n].space is Space.NOISE)
ONE_PER_CLASS = sorted({PLAIN[name][0]: name for name in reversed(NOISE)}.values())
FAST = [name for name in NOISE if not name.startswith("dpm2")]
BASIC = {"flow_euler", "flow_lcm", "flow_unipc"}
TO_FLOW = {
    "flux": {"flow_euler", "flow_lcm", "flow_unipc", "flow_dpmpp_2m"},
    "stable_diffusion_3": {"flow_euler", "flow_lcm", "flow_unipc", "flow_dpmpp_2m", "flow_heun"},
    "sana": {"flow_euler", "flow_lcm", "flow_unipc", "flow_dpmpp_2m", "flow_heun"},
    "wan": {"flow_euler", "flow_lcm", "flow_unipc", "flow_dpmpp_2m", "flow_heun"},
    "qwen_image": {"flow_euler", "flow_lcm", "flow_unipc"},
    "z_image": {"flow_euler", "flow_lcm"},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def stable_diffusion(**config: Any) -> Any:
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = diffusers.DDIMScheduler(**{**LATENT_DIFFUSION, **config})
    return pipe.to(dtype=torch.float64)


def stable_diffusion_xl(scheduler: Any) -> Any:
    pipe = UNET_FAMILIES["sdxl"].pipeline()
    pipe.scheduler = scheduler
    return pipe


def euler_xl() -> Any:
    config = {**LATENT_DIFFUSION, "timestep_spacing": "leading"}  # as published files have it
    return stable_diffusion_xl(diffusers.EulerDiscreteScheduler.from_config(config))


def edm_xl() -> Any:
    return stable_diffusion_xl(diffusers.EDMDPMSolverMultistepScheduler(sigma_max=40.0))


def image_request(seed: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "prompt": f"a {'red ' * seed}circle", "height": 16, "width": 16, "guidance_scale": 3.0,
        "num_inference_steps": 4, "output_type": "latent", **changes,
    }  # fmt: skip


def run(pipe: Any, request: dict[str, Any], seed: int = SEED) -> torch.Tensor:
    torch.manual_seed(seed)  # flow pipelines don't give their generator to the scheduler
    made = pipe(**request, generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(next(iter(made.values())))


def served(pipe: Any, request: dict[str, Any], sampler: str | None) -> torch.Tensor:
    return run(make_view(pipe, scheduler=with_sampler(pipe, sampler, SEED)), request)


def plain(pipe: Any, request: dict[str, Any], sampler: str, **more: Any) -> torch.Tensor:
    name, settings = PLAIN[sampler]
    view = make_view(pipe)
    view.scheduler = getattr(diffusers, name).from_config(
        pipe.scheduler.config, **{**settings, **more}
    )
    return run(view, request)


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > 1e-3 * other.abs().max())


# -- each sampler is the one of diffusers


@pytest.mark.parametrize(
    ("build", "same_as_own"), [(stable_diffusion, "ddim"), (euler_xl, "euler")]
)
def test_samplers_for_noise_are_exactly_those_of_diffusers(
    build: Callable[[], Any], same_as_own: str
) -> None:
    pipe, request = build(), image_request()
    assert samplers_for(pipe) == set(NOISE)
    own, made = served(pipe, request, None), {}
    names = NOISE if build is stable_diffusion else FAST  # some are slow to make
    for name in names:
        made[name] = served(pipe, request, name)
        assert torch.equal(made[name], plain(pipe, request, name)), name
    assert torch.equal(made[same_as_own], own)
    equivalent = {"ddim", "euler"}  # one formula, where their timesteps are spaced alike
    assert all(differ(made[name], own) for name in made if name not in equivalent)
    others = [made[name] for name in names if name not in equivalent]
    assert len({latents.sum().item() for latents in others}) == len(others)


@pytest.mark.parametrize("family", TO_FLOW)
def test_samplers_for_flow_are_exactly_those_of_diffusers(family: str) -> None:
    pipe = FAMILIES[family].pipeline()
    request = {**FAMILIES[family].request(0), "num_inference_steps": 4}
    own = served(pipe, request, None)
    config = pipe.scheduler.config
    shift = config.get("shift", config.get("flow_shift"))
    own_sampler = "flow_unipc" if "flow_shift" in config else "flow_euler"
    assert samplers_for(pipe) == TO_FLOW[family]
    for name in TO_FLOW[family]:
        made = served(pipe, request, name)
        accepts = "shift" if "FlowMatch" in PLAIN[name][0] else "flow_shift"
        assert torch.equal(made, plain(pipe, request, name, **{accepts: shift})), name
        assert torch.isfinite(made).all()
        assert differ(made, own) == (name != own_sampler), name


def test_samplers_for_edm_models() -> None:
    pipe, request = edm_xl(), image_request()
    assert samplers_for(pipe) == {"edm_euler", "edm_dpmpp_2m"}
    own = served(pipe, request, None)
    assert torch.equal(served(pipe, request, "edm_dpmpp_2m"), own)
    euler = served(pipe, request, "edm_euler")
    assert differ(euler, own)
    assert torch.equal(euler, plain(pipe, request, "edm_euler"))


def test_a_sampler_whose_package_is_missing_is_not_offered() -> None:
    assert NEED_PACKAGES - samplers_for(stable_diffusion()) == NEED_PACKAGES - INSTALLED


@pytest.mark.parametrize("sampler", sorted(NEED_PACKAGES & INSTALLED & {"dpmpp_sde"}))
def test_noise_from_a_tree_belongs_to_the_seed(sampler: str) -> None:
    pipe = stable_diffusion()
    first, again, other = (
        run(make_view(pipe, scheduler=with_sampler(pipe, sampler, seed)), image_request())
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert differ(first, other)


def test_a_schedulers_own_sampling_settings_do_not_leak_into_a_sampler() -> None:
    """A name means the same whatever the model's file says of its own sampler."""
    pipe, request = stable_diffusion(), image_request()
    expected = {name: served(pipe, request, name) for name in FAST}
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(
        **{k: v for k, v in LATENT_DIFFUSION.items() if k != "clip_sample"},
        algorithm_type="sde-dpmsolver++", solver_order=3, solver_type="heun",
        use_karras_sigmas=True,
    )  # fmt: skip
    assert samplers_for(pipe) == set(NOISE)
    for name in FAST:
        assert torch.equal(served(pipe, request, name), expected[name]), name


# -- what describes the model is carried over


MODELS = [
    {"num_train_timesteps": 500, "prediction_type": "v_prediction"},
    {"beta_start": 0.0002, "beta_end": 0.03, "beta_schedule": "linear"},
    {"trained_betas": [0.001] * 200 + [0.01] * 800},
    {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
    {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"},
]
"""The last one says what DDIM's defaults are, which are not those of all classes."""


@pytest.mark.parametrize("facts", MODELS, ids=lambda facts: next(iter(facts)))
def test_facts_of_the_model_are_carried_over(facts: dict[str, Any]) -> None:
    pipe = tiny_stable_diffusion()
    pipe.scheduler = diffusers.DDIMScheduler(clip_sample=False, **facts)
    offered = samplers_for(pipe)
    assert len(offered) > 5
    for name in offered & set(FAST) & set(ONE_PER_CLASS):
        made = with_sampler(pipe, name, SEED)
        assert made is not pipe.scheduler
        torch.testing.assert_close(
            made.alphas_cumprod.flatten()[:-1], pipe.scheduler.alphas_cumprod[:-1]
        )
        assert made.config.prediction_type == pipe.scheduler.config.prediction_type
        assert made.config.num_train_timesteps == pipe.scheduler.config.num_train_timesteps
        assert not made.config.get("clip_sample")


def test_zero_terminal_snr_needs_a_sampler_that_knows_it() -> None:
    offered = samplers_for(stable_diffusion(rescale_betas_zero_snr=True))
    assert {"ddim", "ddpm", "euler", "euler_a", "dpmpp_2m", "unipc", "lcm", "tcd"} <= offered
    assert not offered & {"heun", "pndm", "lms", "deis", "dpm2", "dpmpp_sde"}


@pytest.mark.parametrize("sampler", ONE_PER_CLASS)
def test_v_prediction_models_are_sampled(sampler: str) -> None:
    pipe = stable_diffusion(prediction_type="v_prediction")
    made, noise = served(pipe, image_request(), sampler), stable_diffusion()
    assert torch.equal(made, plain(pipe, image_request(), sampler))
    assert differ(made, served(noise, image_request(), sampler))


def test_the_noise_levels_of_a_flow_model_keep_its_shift() -> None:
    """The pipeline reads its shift from the configuration, which differs from all defaults."""
    pipe = FAMILIES["qwen_image"].pipeline()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.3, max_shift=2.5, base_image_seq_len=1,
        max_image_seq_len=9, shift_terminal=0.02,
    )  # fmt: skip
    request, levels = {**FAMILIES["qwen_image"].request(0), "num_inference_steps": 6}, {}
    for name in (None, *TO_FLOW["qwen_image"]):
        view = make_view(pipe, scheduler=with_sampler(pipe, name, SEED))
        run(view, request)
        levels[name] = view.scheduler.sigmas.double()
    assert levels[None][2] > 0.7, "the shift must matter"
    for name in TO_FLOW["qwen_image"]:
        torch.testing.assert_close(levels[name], levels[None], rtol=0, atol=2e-6)


# -- where nothing is offered


def two_schedulers() -> Any:
    pipe = stable_diffusion()
    pipe.register_modules(prior_scheduler=diffusers.DDPMScheduler())
    return pipe


@pytest.mark.parametrize(
    "build",
    [
        FAMILIES["cogvideox"].build,
        FAMILIES["stable_audio"].build,
        lambda: stable_diffusion(prediction_type="sample"),
        lambda: stable_diffusion_xl(diffusers.DDPMScheduler(variance_type="learned_range")),
        lambda: stable_diffusion_xl(diffusers.EulerDiscreteScheduler(sigma_max=700.0)),
        lambda: stable_diffusion_xl(diffusers.FlowMatchEulerDiscreteScheduler()),
    ],
    ids=["own scheduler", "other declaration", "sample", "variance", "levels", "flow"],
)
def test_unusual_pipelines_keep_to_their_own_scheduler(build: Callable[[], Any]) -> None:
    pipe = build()
    assert samplers_for(pipe) == frozenset()
    assert "sampler" not in capabilities(pipe).sampling_fields


def test_an_unknown_name_is_refused_by_the_worker_too() -> None:
    with pytest.raises(InvalidRequestError, match="no such sampler"):
        with_sampler(stable_diffusion(), "eulr", SEED)


# -- requests with different samplers together


def test_requests_with_different_samplers_share_forwards_and_keep_their_noise() -> None:
    pipe = stable_diffusion()
    names = [name for name in FAST if name not in NEED_PACKAGES]  # their timesteps are float64
    requests = [image_request(i % 3, num_inference_steps=3 + i % 2) for i in range(len(names))]
    expected = [
        run(make_view(pipe, scheduler=with_sampler(pipe, name, seed)), request, seed)
        for seed, (name, request) in enumerate(zip(names, requests, strict=True))
    ]
    stepper = CooperativeStepper(pipe, denoisers(pipe))
    calls = [
        stepper.start(
            {**request, "generator": torch.Generator().manual_seed(seed)}, seed, name,
            scheduler=with_sampler(pipe, name, seed),
        )
        for seed, (name, request) in enumerate(zip(names, requests, strict=True))
    ]  # fmt: skip
    stepper.run()
    stepper.close()
    for name, call, alone in zip(names, calls, expected, strict=True):
        assert call.error is None, name
        scale = alone.abs().max().item()
        torch.testing.assert_close(call.result.images, alone, rtol=0, atol=1e-12 * scale)
    assert stepper.fallbacks == 0
    longest = max(call.counts.forwards for call in calls)
    assert stepper.forwards == longest, "whole and fractional timesteps share, too"


# -- admission


def capabilities(pipe: Any) -> PipelineCapabilities:
    return diffusers_capabilities(pipe, FusionReport(True, ""))


def admission(pipe: Any, **defaults: Any) -> Admission:
    args = EngineArgs(model="some/model", default_sampling_params=defaults)
    return Admission(args, Limits(), AdapterRegistry(args), capabilities(pipe))


@pytest.fixture(scope="module")
def sd() -> Any:
    return stable_diffusion()


REFUSED = [
    ({"sampler": "eulr"}, "sampler", "one of ddim, ddpm, ", "Did you mean 'euler'?"),
    ({"sampler": "flow_euler"}, "sampler", "one of ddim, ddpm, ", None),
    ({"sampler": "dpmpp_2m", "sigmas": [1.0, 0.5]}, "sigmas", "one of euler", None),
    ({"sampler": "euler", "eta": 0.5}, "eta", "one of ddim, tcd", None),
]


@pytest.mark.parametrize(("fields", "field", "expected", "hint"), REFUSED)
def test_what_does_not_suit_is_refused(
    sd: Any, fields: dict[str, Any], field: str, expected: str, hint: str | None
) -> None:
    request = build_request("a", OmniDiffusionSamplingParams(**fields))
    with pytest.raises(InvalidRequestError) as caught:
        admission(sd).admit(request)
    assert caught.value.field == field
    assert expected in str(caught.value.expected)
    if hint is not None:
        assert caught.value.hint == hint
    with pytest.raises(ConfigError, match="StableDiffusionPipeline") as refused:
        admission(sd, **fields)
    assert refused.value.field == f"default_sampling_params.{field}"


@pytest.mark.parametrize(
    "fields",
    [
        {"sampler": "euler", "sigmas": [7.0, 1.0]},
        {"sampler": "ddim", "eta": 0.5},
        {"sampler": "dpmpp_2m", "eta": 0.0},
    ],
)
def test_what_suits_is_admitted(sd: Any, fields: dict[str, Any]) -> None:
    request = build_request("a", OmniDiffusionSamplingParams(**fields))
    assert admission(sd).admit(request).request.sampling_params.sampler == fields["sampler"]


def test_a_default_sampler_is_filled_in(sd: Any) -> None:
    where = admission(sd, sampler="unipc")
    chosen = [
        where.admit(build_request("a", OmniDiffusionSamplingParams(sampler=name)))
        for name in (None, "heun")
    ]
    assert [one.request.sampling_params.sampler for one in chosen] == ["unipc", "heun"]
    assert chosen[0].key == chosen[1].key, "they share forwards"


def test_a_pipeline_without_samplers_takes_none() -> None:
    where = admission(FAMILIES["cogvideox"].build())
    with pytest.raises(InvalidRequestError, match="takes no sampler"):
        where.admit(build_request("a", OmniDiffusionSamplingParams(sampler="ddim")))


def test_a_list_call_has_one_sampler() -> None:
    known = capabilities(FAMILIES["qwen_image"].build())
    assert "sampler" not in known.per_request
    assert "sampler" in known.sampling_fields
    assert known.samplers_with_sigmas == {"flow_euler", "flow_lcm"}


@pytest.mark.parametrize("name", ["", "x" * 1001, 3, "\ud800", ["euler"]])
def test_a_sampler_is_named_by_short_text(name: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        OmniDiffusionSamplingParams(sampler=name)
    assert caught.value.field == "sampler"


# -- served by an engine


@pytest.mark.parametrize("step_execution", [False, True], ids=["requests", "steps"])
def test_an_engine_serves_different_samplers_together(
    start_own_engine: Callable[..., Omni], tmp_path: Path, step_execution: bool
) -> None:
    folder = save_tiny_stable_diffusion(tmp_path / "tiny-sd")
    omni = start_own_engine(str(folder), max_num_seqs=4, threads=1, step_execution=step_execution)
    call = {"num_inference_steps": 3, "guidance_scale": 4.0, "height": 16, "width": 16}
    names = (None, "euler_a", "dpmpp_2m_sde", "lcm")
    outputs = omni.generate(
        ["a red circle"] * 4,
        [OmniDiffusionSamplingParams(**call, seed=SEED, sampler=name) for name in names],
    )
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    for name, output in zip(names, outputs, strict=True):
        assert output.raise_for_error().images is not None
        assert output.metrics.max_batch_size == 4
        view = make_view(pipe, scheduler=with_sampler(pipe, name, SEED))
        generator = torch.Generator().manual_seed(SEED)
        made = view("a red circle", generator=generator, output_type="np", **call).images[0]
        assert np.abs(output.images[0].astype(int) - np.round(made * 255)).max() <= 1, name
    assert len({output.images[0].tobytes() for output in outputs if output.images}) == 4
    (refused,) = omni.generate("a", OmniDiffusionSamplingParams(sampler="flow_heun"))
    assert isinstance(refused.error, InvalidRequestError)
    assert refused.error.field == "sampler"


# -- documents


def test_the_documents_table_is_the_codes() -> None:
    text = (Path(__file__).parent.parent / "docs" / "samplers.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| (.*)\|$", text, re.MULTILINE)
    assert [(name, cls, space) for name, cls, space, _ in rows] == [
        (name, sampler.scheduler, sampler.space.value) for name, sampler in SAMPLERS.items()
    ]
    notes = {name: note for name, _, _, note in rows}
    assert {name for name in notes if "`sigmas`" in notes[name]} == TAKE_SIGMAS
    assert {name for name in notes if "`eta`" in notes[name]} == TAKE_ETA
    assert {name for name in notes if "package" in notes[name]} == NEED_PACKAGES
    karras = {name for name, sampler in SAMPLERS.items()
              if sampler.settings.get("use_karras_sigmas")}  # fmt: skip
    assert {name for name in notes if "Karras" in notes[name]} == karras
    suits = text[text.index("## Which suit a model") : text.index("## What diffusers does")]
    assert set(re.findall(r"`(\w+Pipeline)`", suits)) == set(FLOW_PIPELINES)
    for family in TO_FLOW:
        pipe = FAMILIES[family].build()
        (row,) = [line for line in suits.splitlines() if f"`{type(pipe).__name__}`" in line]
        listed = set(re.findall(r"`(flow_\w+)`", row))
        assert listed == TO_FLOW[family] - (set() if "`flow_euler`" in row else BASIC), family
