"""Adapters under traffic: the right one on every picture, in every mode, and nobody else's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from adapters import ATTENTION, random_adapter
from diffusers import QwenImagePipeline
from tiny_models import save_tiny_stable_diffusion

from omni_engine import DiffusionOutput, LoRARequest, Omni, OmniDiffusionSamplingParams
from omni_engine.stages.bundled import MODEL_DIR

Latents = npt.NDArray[np.float32]
Named = tuple[tuple[str, float], ...]
"""Adapters by name with their scales; none: the bare model."""

SCENES = (
    ("a large red square on a white background", 3),
    ("a small blue circle on a pink background", 4),
    ("a green star on a black background", 5),
)
SIZE = 32
STEPS = 2
TOLERANCE = 1e-4
"""Of full scale, in float32."""

MODES: dict[str, dict[str, Any]] = {
    "request": {},
    "step": {"step_execution": True},
    "request, mixed": {"mixed_lora": True},
    "step, mixed": {"step_execution": True, "mixed_lora": True},
}
in_every_mode = pytest.mark.parametrize("mode", list(MODES))


@pytest.fixture(scope="module")
def plain() -> PlainDiffusers:
    return PlainDiffusers()


@pytest.fixture(scope="module")
def modules(plain: PlainDiffusers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sixteen adapters of several ranks; one file has a second name."""
    folder = tmp_path_factory.mktemp("adapters")
    made = {
        f"style{n}": random_adapter(
            plain.pipe, folder / f"style{n}.safetensors", rank=(4, 8, 3)[n % 3], seed=n
        )
        for n in range(16)
    }
    return {**made, "another name": made["style0"]}


class PlainDiffusers:
    """What plain diffusers makes of a request on its own, adapters loaded by its own loader."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self._loaded: dict[Path, str] = {}
        self._made: dict[Any, Latents] = {}

    def make(self, scene: int, asked: Named, files: dict[str, Path]) -> Latents:
        """Return the latents of a scene under adapters."""
        key = (scene, asked)
        if key not in self._made:
            self._activate({files[name]: scale for name, scale in asked})
            prompt, seed = SCENES[scene]
            made = self.pipe(
                prompt, negative_prompt=" ", true_cfg_scale=3.0, height=SIZE, width=SIZE,
                num_inference_steps=STEPS, generator=torch.Generator().manual_seed(seed),
                output_type="latent",
            )  # fmt: skip
            self._made[key] = made.images[0].numpy()
        return self._made[key]

    def _activate(self, scales: dict[Path, float]) -> None:
        for path in scales:
            if path not in self._loaded:
                self._loaded[path] = f"adapter{len(self._loaded)}"
                self.pipe.load_lora_weights(
                    path.parent, weight_name=path.name, adapter_name=self._loaded[path]
                )
        if not scales:
            self.pipe.disable_lora()
            return
        self.pipe.enable_lora()
        names = [self._loaded[path] for path in scales]
        self.pipe.set_adapters(names, list(scales.values()))


def params(scene: int, asked: Named = (), **fields: Any) -> OmniDiffusionSamplingParams:
    given: dict[str, Any] = {"height": SIZE, "width": SIZE, "num_inference_steps": STEPS}
    return OmniDiffusionSamplingParams(
        **given | {"seed": SCENES[scene][1], "output_type": "latent"} | fields,
        lora_request=[LoRARequest(*one) for one in asked],
    )


def generate(omni: Omni, wanted: list[tuple[int, Named]], **fields: Any) -> list[DiffusionOutput]:
    prompts = [SCENES[scene][0] for scene, _ in wanted]
    outputs = omni.generate(prompts, [params(*one, **fields) for one in wanted])
    return [output.raise_for_error() for output in outputs]


def latents(output: DiffusionOutput) -> Latents:
    assert output.latents is not None
    return np.asarray(output.latents[0], np.float32)


def apart(one: Latents, other: Latents) -> float:
    return float(np.abs(one - other).max())


def start(start_engine: Callable[..., Omni], mode: str, modules: Any, **options: Any) -> Omni:
    listed = [{"name": name, "path": str(path)} for name, path in modules.items()]
    given = {"max_num_seqs": 4, "threads": 1, "max_loras": 8, "lora_modules": listed}
    return start_engine(**given | MODES[mode] | options)


@pytest.mark.slow
@in_every_mode
def test_every_picture_of_mixed_traffic_is_its_own_adapters(
    start_own_engine: Callable[..., Omni],
    plain: PlainDiffusers,
    modules: dict[str, Path],
    mode: str,
) -> None:
    """Hundreds of requests, 16 adapters by Zipf's law, random scales, two workers."""
    count = 100 if "mixed" in mode else 400
    omni = start(start_own_engine, mode, modules, replicas=2)
    rng = random.Random(1)
    names = [f"style{n}" for n in range(16)]
    weights = [1 / (rank + 1) for rank in range(16)]
    scales = [round(rng.uniform(0.4, 1.6), 4) for _ in range(12)]
    wanted = [
        (rng.randrange(len(SCENES)), ((*rng.choices(names, weights), rng.choice(scales)),))
        for _ in range(count)
    ]
    outputs = generate(omni, wanted)
    assert {output.metrics.worker for output in outputs} == {"stage0-worker0", "stage0-worker1"}
    for (scene, asked), output in zip(wanted, outputs, strict=True):
        expected, bare = plain.make(scene, asked, modules), plain.make(scene, (), modules)
        assert apart(latents(output), expected) <= TOLERANCE * np.abs(expected).max()
        assert apart(latents(output), bare) > 0.01, "an adapter shows"
        assert [(lora.name, lora.scale) for lora in output.applied_loras] == list(asked)


@in_every_mode
def test_requests_share_batches_as_their_adapters_allow(
    start_own_engine: Callable[..., Omni],
    plain: PlainDiffusers,
    modules: dict[str, Path],
    mode: str,
) -> None:
    omni = start(start_own_engine, mode, modules)
    (stage,) = omni.status()["stages"]
    assert stage["capabilities"]["mixes_adapters"] == ("mixed" in mode)
    asked: list[Named] = [
        (("style1", 1.0),),
        (("style2", 0.5),),
        (),
        (("style1", 0.5), ("style3", -0.5)),
    ]
    outputs = generate(omni, [(0, one) for one in asked])
    for one, output in zip(asked, outputs, strict=True):
        expected = plain.make(0, one, modules)
        assert apart(latents(output), expected) <= TOLERANCE * np.abs(expected).max()
        assert {(lora.name, lora.scale) for lora in output.applied_loras} == set(one)
    largest = max(output.metrics.max_batch_size for output in outputs)
    assert largest == (4 if "mixed" in mode else 1)


@in_every_mode
def test_one_content_under_two_names_and_sums_of_scales(
    start_own_engine: Callable[..., Omni],
    plain: PlainDiffusers,
    modules: dict[str, Path],
    mode: str,
) -> None:
    omni = start(start_own_engine, mode, modules)
    twice = (("style0", 0.25), ("another name", 0.5))
    nothing = (("style0", 0.25), ("another name", -0.25))
    both, one, none, bare = generate(
        omni, [(0, twice), (0, (("another name", 0.75),)), (0, nothing), (0, ())]
    )
    expected = plain.make(0, (("style0", 0.75),), modules)
    for output in (both, one):
        assert apart(latents(output), expected) <= TOLERANCE * np.abs(expected).max()
    assert [(lora.name, lora.scale) for lora in both.applied_loras] == [("style0", 0.75)]
    assert [(lora.name, lora.scale) for lora in one.applied_loras] == [("another name", 0.75)]
    assert none.applied_loras == bare.applied_loras == []
    (worker,) = omni.status()["stages"][0]["workers"]
    assert worker["adapters"]["device"] == 1, "one content is in memory once"


@pytest.mark.slow
@in_every_mode
def test_the_bare_model_is_bit_identical_among_adapters(
    start_own_engine: Callable[..., Omni], modules: dict[str, Path], mode: str
) -> None:
    """Deterministic mode: against an engine that has never seen an adapter."""
    bare = [(n % len(SCENES), ()) for n in range(6)]
    step = {name: MODES[mode].get(name, False) for name in ("step_execution",)}
    untouched = start_own_engine(
        max_num_seqs=4, threads=1, deterministic=True, lora_modules=[], **step
    )
    expected = [latents(output) for output in generate(untouched, bare)]
    omni = start(start_own_engine, mode, modules, deterministic=True)
    adapted = [(n % len(SCENES), ((f"style{n}", 1.0 + n / 4),)) for n in range(6)]
    interleaved = list(itertools.chain(*zip(bare, adapted, strict=True)))
    for wanted in (interleaved, list(reversed(interleaved))):
        outputs = generate(omni, wanted)
        found = [latents(o) for o, (_, asked) in zip(outputs, wanted, strict=True) if not asked]
        by_scene = {scene: latent for (scene, _), latent in zip(bare, expected, strict=True)}
        scenes = [scene for scene, asked in wanted if not asked]
        for scene, latent in zip(scenes, found, strict=True):
            np.testing.assert_array_equal(latent, by_scene[scene])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["request", "step, mixed"])
def test_a_storm_of_adapters_stays_within_its_limits(
    start_own_engine: Callable[..., Omni], tmp_path: Path, mode: str
) -> None:
    """500 adapters, 4 on the device, 32 in memory."""
    pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)

    def few(path: str, _: Any) -> bool:
        return path.startswith("transformer_blocks.0.") and bool(ATTENTION.search(path))

    files = {
        f"a{n}": random_adapter(pipe, tmp_path / f"a{n}.safetensors", seed=n, layers=few)
        for n in range(500)
    }
    omni = start(start_own_engine, mode, files, max_loras=4, max_cpu_loras=32)
    rng = random.Random(2)
    names = rng.sample(list(files), len(files))
    memory: list[int] = []
    for begin in range(0, len(names), 100):
        asked = [(n % len(SCENES), ((name, 1.0),)) for n, name in enumerate(names[begin:][:100])]
        outputs = generate(omni, asked, num_inference_steps=1)
        assert [o.applied_loras[0].name for o in outputs] == names[begin:][:100]
        (worker,) = omni.status()["stages"][0]["workers"]
        held = worker["adapters"]
        assert held["device"] <= 4
        assert held["host"] <= 32
        memory.append(psutil.Process(worker["pid"]).memory_info().rss)
    assert held["loads"] >= 468, "each was read, but for those that may still have been there"
    assert memory[-1] - memory[1] < 40 << 20, "memory is flat"
    popular = [(0, ((name, 1.0),)) for name in names[:3] * 20]
    before = held
    generate(omni, popular, num_inference_steps=1)
    (worker,) = omni.status()["stages"][0]["workers"]
    held = worker["adapters"]
    assert held["loads"] - before["loads"] <= 3, "the popular ones stay"
    assert held["device_hits"] > before["device_hits"]


@pytest.mark.parametrize("mode", ["request", "step"])
def test_an_adapters_text_encoder_part_is_active_for_its_own_requests_only(
    start_own_engine: Callable[..., Omni], tmp_path: Path, mode: str
) -> None:
    model = save_tiny_stable_diffusion(tmp_path / "model")
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(model, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    both = ("unet", "text_encoder")
    path = random_adapter(pipe, tmp_path / "words.safetensors", components=both, seed=5)

    def alone(scale: float) -> Latents:
        if scale:
            pipe.set_adapters(["words"], [scale])
        made = pipe(
            "a cat", height=32, width=32, num_inference_steps=2, output_type="latent",
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        return np.asarray(made.images[0])

    bare = alone(0)
    pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name="words")
    expected = {0.0: bare, 1.0: alone(1.0), 0.5: alone(0.5)}
    omni = start_own_engine(
        str(model),
        max_num_seqs=4,
        threads=1,
        lora_modules=[{"name": "words", "path": str(path)}],
        default_sampling_params={},
        **MODES[mode],
    )
    scales = [1.0, 0.0, 0.5, 0.0, 1.0]
    asked = [
        OmniDiffusionSamplingParams(
            height=32, width=32, num_inference_steps=2, output_type="latent", seed=1,
            lora_request=[LoRARequest("words", scale)],
        )
        for scale in scales
    ]  # fmt: skip
    for _ in range(2):  # the second time prompts are remembered
        outputs = omni.generate(["a cat"] * len(scales), asked)
        for scale, output in zip(scales, outputs, strict=True):
            found = latents(output.raise_for_error())
            assert apart(found, expected[scale]) <= TOLERANCE * np.abs(expected[scale]).max()
    assert apart(expected[1.0], bare) > 0.01
