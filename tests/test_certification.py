"""Certification: what it covers, which rules it certifies, and how its findings are kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from families import FAMILIES
from tiny_models import tiny_stable_diffusion

from omni_engine.protocol.plans import WorkerSpec
from omni_engine.stages.config import EngineArgs
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.building import build_pipeline
from omni_engine.worker.call_rules import Kind
from omni_engine.worker.certificates import (
    Certificate,
    CertificateStore,
    ListCallChoice,
    cache_folder,
)
from omni_engine.worker.certification import certify
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.model_identity import certificate_key
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.synthetic import RequestMaker, list_call_requests


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder as far as certificates see it, and a cache of its own."""
    monkeypatch.setenv("OMNI_ENGINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model" / "unet").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    (tmp_path / "model" / "unet" / "weights.safetensors").write_bytes(b"1234")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def sd() -> Any:
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def spec_for(folder: Path | str, **arguments: Any) -> WorkerSpec:
    args = EngineArgs(model=str(folder), **arguments).model_dump(mode="json")
    return WorkerSpec("w", "ipc://nowhere", args, str(folder), "cpu")


def certified(pipe: Any) -> FusionReport:
    return certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))


def build(pipe: Any, spec: WorkerSpec, module: torch.nn.Module) -> tuple[Any, int]:
    """What serves, and how many forwards the module made until it was ready."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        pipeline, _ = build_pipeline(pipe, spec, AbortFlags())
        pipeline.stepper.close()
    finally:
        hook.remove()
    return pipeline, len(calls)


# -- kept by model revision


def test_a_model_is_certified_once(sd: Any, folder: Path) -> None:
    first, forwards = build(sd, spec_for(folder), sd.unet)
    again, none = build(sd, spec_for(folder), sd.unet)
    assert (forwards > 0, none) == (True, 0)
    assert first.stepper.fused
    assert again.stepper.fused
    note, cached = first.capabilities.batching_note, again.capabilities.batching_note
    finding = note.removesuffix(" (certified at load)")
    assert finding != note
    assert cached.startswith(f"{finding} (certified 20")
    assert cached.endswith(" UTC; cached)")


def test_a_changed_file_is_certified_anew(sd: Any, folder: Path) -> None:
    build(sd, spec_for(folder), sd.unet)
    os.utime(folder / "unet" / "weights.safetensors", ns=(1, 1))
    pipeline, forwards = build(sd, spec_for(folder), sd.unet)
    assert forwards
    assert "certified at load" in pipeline.capabilities.batching_note


def key_of(pipe: Any, spec: WorkerSpec) -> dict[str, Any]:
    key = certificate_key(pipe, spec, 1)
    assert key is not None
    return key


CHANGES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "size": (lambda f: (f / "unet" / "weights.safetensors").write_bytes(b"12345"), True),
    "time": (lambda f: os.utime(f / "model_index.json", ns=(1, 1)), True),
    "another file": (lambda f: (f / "unet" / "config.json").write_text("{}"), True),
    "a file is gone": (lambda f: (f / "model_index.json").unlink(), True),
    "a picture": (lambda f: (f / "sample.png").write_bytes(b""), False),
    "a hidden file": (lambda f: (f / ".state.json").write_text("{}"), False),
    "nothing": (lambda f: None, False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_follows_the_models_files(sd: Any, folder: Path, change: str) -> None:
    act, differs = CHANGES[change]
    before = key_of(sd, spec_for(folder))
    act(folder)
    assert (key_of(sd, spec_for(folder)) != before) == differs


def test_the_key_follows_everything_else(sd: Any, folder: Path) -> None:
    class Other(type(sd)):  # type: ignore[misc]
        pass

    other = object.__new__(Other)
    other.__dict__ = vars(sd)
    keys = [
        key_of(sd, spec_for(folder)),
        key_of(sd, spec_for(folder, dtype="bfloat16")),
        key_of(sd, spec_for(folder, variant="fp16")),
        key_of(other, spec_for(folder)),
        {**key_of(sd, spec_for(folder)), "certification": 2},
    ]
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
    assert key_of(sd, spec_for(folder, max_num_seqs=3)) == keys[0]
    assert {"torch", "diffusers", "transformers", "omni-engine"} == set(keys[0]["versions"])


def test_a_hub_models_key_is_its_commit(
    sd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root, commit = tmp_path / "models--nobody--tiny", "0123456789" * 4
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    (root / "snapshots" / commit).mkdir(parents=True)
    (root / "snapshots" / commit / "model_index.json").write_text("{}")
    assert key_of(sd, spec_for("nobody/tiny"))["files"] == f"commit {commit}"
    assert certificate_key(sd, spec_for("nobody/other"), 1) is None


def test_where_certificates_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    own, xdg = {"OMNI_ENGINE_CACHE": "/own"}, {"XDG_CACHE_HOME": "/xdg"}
    assert cache_folder({**own, **xdg}) == Path("/own")
    assert cache_folder({"OMNI_ENGINE_CACHE": "", **xdg}) == Path("/xdg/omni-engine")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("/home/me/.cache/omni-engine")
    assert cache_folder({}) == Path("/home/me/.cache/omni-engine")


# -- files that are not what they should be

REPORT = FusionReport(
    True,
    "requests share",
    encoders=False,
    sources={"unet": "observed"},
    observed={"unet": {"sample": Kind.ROWS, "table": Kind.SAME}},
    certified_at="2026-11-29 12:00 UTC",
    tolerance=1e-3,
)
CERTIFICATE = Certificate(REPORT, ListCallChoice(True, 1.5, 2.5))


def store_in(folder: Path, key: Any = None) -> CertificateStore:
    return CertificateStore(key or {"model": "m"}, frozenset({"unet"}), folder)


def file_of(folder: Path) -> Path:
    (path,) = (folder / "certificates").iterdir()
    return path


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    store_in(tmp_path).save(CERTIFICATE)
    cached = dataclasses.replace(REPORT, cached=True)
    assert store_in(tmp_path).load() == Certificate(cached, CERTIFICATE.list_call)
    assert store_in(tmp_path, {"model": "n"}).load() is None
    assert file_of(tmp_path).stat().st_mode & 0o077 == 0


def test_what_was_not_certified_is_not_kept(tmp_path: Path) -> None:
    store_in(tmp_path).save(Certificate(dataclasses.replace(REPORT, certified_at=None)))
    assert not (tmp_path / "certificates").exists()


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "unknown field": lambda d: {**d, "also": 1},
    "missing field": lambda d: {n: v for n, v in d.items() if n != "fused"},
    "wrong type": lambda d: {**d, "fused": "yes"},
    "unknown kind": lambda d: {**d, "observed": {"unet": {"sample": "columns"}}},
    "unknown source": lambda d: {**d, "sources": {"unet": "guessed"}},
    "not a time": lambda d: {**d, "certified_at": "yesterday"},
    "unknown component": lambda d: {**d, "observed": {"vae": {"sample": "rows"}}},
    "another model": lambda d: {**d, "key": {"model": "n"}},
    "negative time": lambda d: {**d, "list_call": {**d["list_call"], "list_ms": -1}},
    "not a number": lambda d: {**d, "list_call": {**d["list_call"], "list_ms": float("nan")}},
    "negative tolerance": lambda d: {**d, "tolerance": -1.0},
    "escapes": lambda d: {**d, "finding": "\x1b[31mred"},
    "long text": lambda d: {**d, "finding": "x" * 5000},
    "a list": lambda d: [d],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_edited_files_are_not_used(tmp_path: Path, damage: str) -> None:
    store_in(tmp_path).save(CERTIFICATE)
    path = file_of(tmp_path)
    path.write_text(json.dumps(DAMAGES[damage](json.loads(path.read_text()))))
    assert store_in(tmp_path).load() is None
    store_in(tmp_path).save(CERTIFICATE)
    assert store_in(tmp_path).load() is not None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b" " * (1 << 21)]
)
def test_files_that_are_no_certificates_are_not_used(tmp_path: Path, data: bytes) -> None:
    store_in(tmp_path).save(CERTIFICATE)
    file_of(tmp_path).write_bytes(data)
    assert store_in(tmp_path).load() is None


def test_a_cache_that_can_not_be_used_is_done_without_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = store_in(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        assert store.load() is None
        store.save(CERTIFICATE)
        store.save(CERTIFICATE)
    assert len(caplog.records) == 1


def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_in(tmp_path).save(CERTIFICATE)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        store_in(tmp_path).save(Certificate(REPORT))
    found = store_in(tmp_path).load()
    assert found is not None
    assert found.list_call == CERTIFICATE.list_call
    assert file_of(tmp_path).suffix == ".json"


# -- rules


class Brain(ModelMixin, ConfigMixin):
    """Words have their rows in dimension 1, which no inference would guess."""

    @register_to_config
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(width, width, dtype=torch.float64)

    def forward(self, noisy: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(self.mix(noisy + words.mean(0)[:, None])),)


class BrainPipeline(DiffusionPipeline):
    def __init__(self, brain: ModelMixin) -> None:
        super().__init__()
        self.register_modules(brain=brain)

    @torch.no_grad()
    def __call__(
        self, prompt: Any, num_inference_steps: int = 3, height: int = 8, width: int = 8,
        generator: Any = None, output_type: str = "np",
    ) -> ImagePipelineOutput:  # fmt: skip
        prompts = prompt if isinstance(prompt, list) else [prompt]
        generators = generator if isinstance(generator, list) else [generator]
        x = torch.stack([torch.randn(4, 6, generator=g, dtype=torch.float64) for g in generators])
        for _ in range(num_inference_steps):
            (x,) = self.brain(x, **self.arguments(prompts, isinstance(prompt, list)))
        return ImagePipelineOutput(images=x[:, None].numpy().clip(0, 1))

    def arguments(self, prompts: list[str], is_list: bool) -> dict[str, torch.Tensor]:
        words = [[[len(p) / 9.0] * 6 for p in prompts]] * 5
        return {"words": torch.tensor(words, dtype=torch.float64)}


class Tabled(Brain):
    def forward(self, noisy: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(self.mix(noisy + table.sum(0))),)


class TwoFacedPipeline(BrainPipeline):
    """Gives lists of prompts a table with rows, and single prompts one without."""

    def arguments(self, prompts: list[str], is_list: bool) -> dict[str, torch.Tensor]:
        rows = len(prompts) if is_list else 3
        return {"table": torch.arange(6.0 * rows, dtype=torch.float64).reshape(rows, 6) / 9}


class OnePrompt(BrainPipeline):
    def arguments(self, prompts: list[str], is_list: bool) -> dict[str, torch.Tensor]:
        if is_list:
            raise TypeError("one prompt at a time")
        return super().arguments(prompts, is_list)


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_observed_rules_are_certified_and_kept(folder: Path) -> None:
    torch.manual_seed(0)
    pipe = quiet(BrainPipeline(Brain()))
    found = certified(pipe)
    assert found.fused
    assert found.sources == {"brain": "observed"}
    assert found.observed["brain"] == {"noisy": Kind.ROWS, "words": Kind.ROWS_1}

    build(pipe, spec_for(folder), pipe.brain)
    pipeline, forwards = build(pipe, spec_for(folder), pipe.brain)
    assert forwards == 0, "no probe, no comparison"
    assert pipeline.stepper.fused


def test_a_cached_start_shares_by_the_observed_rules(folder: Path) -> None:
    torch.manual_seed(0)
    pipe = quiet(BrainPipeline(Brain()))
    build(pipe, spec_for(folder), pipe.brain)
    pipeline, _ = build_pipeline(pipe, spec_for(folder), AbortFlags())
    stepper = pipeline.stepper
    calls = [
        stepper.start({"prompt": prompt, "generator": torch.Generator().manual_seed(i)}, i, prompt)
        for i, prompt in enumerate(("a", "bcd"))
    ]
    stepper.run()
    stepper.close()
    assert (stepper.forwards, stepper.rows) == (3, 6)
    for i, call in enumerate(calls):
        alone = pipe(call.owner, generator=torch.Generator().manual_seed(i)).images
        np.testing.assert_allclose(call.result.images, alone, atol=1e-12)


def test_inference_is_tried_where_observed_rules_do_not_pass() -> None:
    torch.manual_seed(0)
    found = certified(quiet(TwoFacedPipeline(Tabled())))
    assert found.fused
    assert found.sources == {"brain": "inferred"}
    assert found.observed == {}


def test_inference_is_tried_where_nothing_can_be_observed() -> None:
    torch.manual_seed(0)
    found = certified(quiet(OnePrompt(Brain())))
    assert found.sources == {"brain": "inferred"}
    assert not found.fused, "words look as if dimension 0 had the rows"
    assert "sharing forwards changes pictures" in found.note


# -- half precision


class LastBit(Brain):
    """Its outputs differ by the last bit of bfloat16 in company, as those of real kernels do."""

    mixes = False

    def forward(self, noisy: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor]:
        (out,) = super().forward(noisy, words)
        if self.mixes:
            out = out + 0.5 * (out - out[:1])
        return (out * (1 + 2**-7) if len(noisy) > 1 else out,)


class HalfPipeline(BrainPipeline):
    """Magnifies what its denoiser says, as guidance does."""

    def arguments(self, prompts: list[str], is_list: bool) -> dict[str, torch.Tensor]:
        words = super().arguments(prompts, is_list)["words"]
        return {"words": words.to(next(self.brain.parameters()).dtype)}

    @torch.no_grad()
    def __call__(
        self, prompt: Any, num_inference_steps: int = 3, height: int = 8, width: int = 8,
        generator: Any = None, output_type: str = "np",
    ) -> ImagePipelineOutput:  # fmt: skip
        prompts = prompt if isinstance(prompt, list) else [prompt]
        generators = generator if isinstance(generator, list) else [generator]
        x = torch.stack([torch.randn(4, 6, generator=g) for g in generators])
        for _ in range(num_inference_steps):
            half = x.to(next(self.brain.parameters()).dtype)
            (x,) = self.brain(half, **self.arguments(prompts, isinstance(prompt, list)))
        return ImagePipelineOutput(images=20 * x[:, None].float().numpy())


@pytest.mark.parametrize("mixes", [False, True])
def test_rounding_in_half_precision_is_measured_not_guessed(mixes: bool) -> None:
    torch.manual_seed(0)
    brain = LastBit()
    brain.mixes = mixes
    found = certified(quiet(HalfPipeline(brain.to(torch.bfloat16))))
    assert found.fused == (not mixes), found.note
    assert found.tolerance is not None
    assert found.tolerance > 0.05
    exact = certified(quiet(HalfPipeline(brain.to(torch.float32))))
    assert not exact.fused, "in single precision it is too much for rounding"
    assert exact.tolerance == 1e-3


# -- what is covered


@pytest.mark.parametrize("name", ["qwen_image_layered", "stable_audio", "flux_kontext"])
def test_alpha_sound_and_resized_pictures_are_certified(name: str) -> None:
    family = FAMILIES[name]
    with family.context():
        found = certified(family.pipeline().to(dtype=torch.float32))
    assert found.fused, found.note
    assert "certified at load" in found.note


def test_a_list_call_is_chosen_once_with_ragged_prompts_and_two_pictures(folder: Path) -> None:
    family = dataclasses.replace(FAMILIES["qwen_image"], float64=False)
    pipe = family.pipeline()
    capabilities = diffusers_capabilities(pipe, FusionReport(True, ""))
    requests = list_call_requests(RequestMaker(pipe, capabilities, frozenset()))
    assert {request.num_outputs for request in requests} == {1, 2}
    assert len({len(request.prompt.split()) for request in requests}) > 1

    first, forwards = build(pipe, spec_for(folder), pipe.transformer)
    again, none = build(pipe, spec_for(folder), pipe.transformer)
    assert (forwards > 0, none) == (True, 0)
    assert again.list_call == first.list_call
    timed = first.capabilities.batching_note.partition("(at warm-up")[2].partition(";")[0]
    assert timed
    assert timed in again.capabilities.batching_note
    assert "; cached)" in again.capabilities.batching_note


def test_a_step_workers_certificate_gains_a_choice_later(folder: Path) -> None:
    pipe = dataclasses.replace(FAMILIES["qwen_image"], float64=False).pipeline()
    build(pipe, spec_for(folder, step_execution=True), pipe.transformer)
    later, forwards = build(pipe, spec_for(folder), pipe.transformer)
    _, none = build(pipe, spec_for(folder), pipe.transformer)
    assert (forwards > 0, none) == (True, 0)
    assert "at warm-up" in later.capabilities.batching_note


class PAGPipeline(BrainPipeline):
    """Named like the perturbed-attention pipelines."""


def test_pipelines_that_rewire_their_model_are_exclusive_and_not_certified(folder: Path) -> None:
    pipe = quiet(PAGPipeline(Brain()))
    pipeline, forwards = build(pipe, spec_for(folder, step_execution=True), pipe.brain)
    assert pipeline.capabilities.exclusive
    assert not pipeline.stepper.fused
    assert forwards == 0
    assert not (cache_folder() or Path()).exists()
