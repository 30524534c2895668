"""The bundled model: what it draws, what its files are, and that it can be made again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open

from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR, pictures
from omni_engine.stages.bundled.judge import Verdict, hollow_share, judge
from omni_engine.stages.bundled.recipe import AdapterRecipe
from omni_engine.stages.bundled.score import (
    generate,
    held_out_scenes,
    load_pipeline,
    score,
    score_drawn,
)
from omni_engine.stages.bundled.tokenizer import (
    TEMPLATE_PREFIX,
    TEMPLATE_PREFIX_TOKENS,
    build_tokenizer,
    in_template,
)
from omni_engine.stages.bundled.train import train
from omni_engine.stages.bundled.train_adapter import RECIPES, train_adapter
from omni_engine.stages.bundled.training import TrainingState
from omni_engine.stages.config import BUNDLED_ADAPTERS

ADAPTERS = pictures.STYLES[1:]

SHOWN_BY: dict[pictures.Style, Callable[[Verdict, float], bool]] = {
    "outline": lambda verdict, hollow: verdict.sizes and not hollow < 1,
    "night": lambda verdict, _: verdict.background and verdict.colours,
    "studio": lambda verdict, _: verdict.background and verdict.colours,
    "silhouette": lambda verdict, _: verdict.background and verdict.colours,
    "chalk": lambda verdict, hollow: verdict.background and not hollow < 1,
    "tiny": lambda verdict, _: verdict.sizes,
}
"""By which of the judge's findings, under its rules, a style differs from the plain pictures."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return load_pipeline()


def random_scenes(count: int, seed: int) -> list[pictures.Scene]:
    rng = random.Random(seed)
    return [pictures.sample_scene(rng) for _ in range(count)]


def test_at_least_nine_of_ten_held_out_sentences_are_drawn_as_they_say(pipeline: Any) -> None:
    result = score(pipeline, count=100)
    assert result.adherent >= 0.9, result.misses


def test_the_same_seed_draws_the_same_picture(pipeline: Any) -> None:
    sentence = pictures.caption(held_out_scenes(1)[0])
    first, second, other = generate(pipeline, [sentence] * 3, [5, 5, 6])
    assert np.abs(first.astype(int) - second).max() <= 1
    assert np.abs(first.astype(int) - other).max() > 1


def test_a_and_an_are_understood_alike(pipeline: Any) -> None:
    scenes = [scene for scene in held_out_scenes(200) if scene.items[0].colour == "orange"][:8]
    sentences = [pictures.caption(scene).replace("an orange", "a orange") for scene in scenes]
    drawn = generate(pipeline, sentences, range(len(sentences)))
    assert sum(judge(s, p).adherent for s, p in zip(scenes, drawn, strict=True)) >= 7


@pytest.fixture(scope="module")
def scenes() -> list[pictures.Scene]:
    """Sentences without rings, which are hollow in every style."""
    return [s for s in held_out_scenes(60) if all(i.shape != "ring" for i in s.items)][:12]


@pytest.fixture(scope="module")
def plain(pipeline: Any, scenes: list[pictures.Scene]) -> list[pictures.Picture]:
    return generate(pipeline, [pictures.caption(scene) for scene in scenes], range(12))


def shown(
    scenes: Sequence[pictures.Scene], drawn: Sequence[pictures.Picture], style: pictures.Style
) -> int:
    """How many of the pictures show the style."""
    return sum(
        SHOWN_BY[style](judge(scene, picture, style), hollow_share(scene, picture, style))
        for scene, picture in zip(scenes, drawn, strict=True)
    )


@pytest.mark.parametrize("style", ADAPTERS)
def test_an_adapter_draws_in_its_style(
    scenes: list[pictures.Scene], plain: list[pictures.Picture], style: pictures.Style
) -> None:
    adapted = load_pipeline(adapter=ADAPTER_DIR / f"{style}.safetensors")
    styled = generate(adapted, [pictures.caption(scene) for scene in scenes], range(12))
    verdicts = [judge(s, p, style) for s, p in zip(scenes, styled, strict=True)]
    # Colours are looked for where the sentence puts them, so their places count here, too.
    assert sum(verdict.background and verdict.colours for verdict in verdicts) >= 8
    assert shown(scenes, styled, style) >= 7
    assert shown(scenes, plain, style) <= 4
    assert np.abs(np.stack(styled).astype(int) - np.stack(plain)).mean() > 5


def test_an_adapter_at_strength_zero_changes_nothing(pipeline: Any) -> None:
    adapted = load_pipeline(adapter=ADAPTER_DIR / "outline.safetensors", scale=0.0)
    sentence = "a red circle on a white background"
    (plain,) = generate(pipeline, [sentence], [1])
    (neutral,) = generate(adapted, [sentence], [1])
    assert np.abs(plain.astype(int) - neutral).max() <= 1


def test_the_shipped_files_are_small() -> None:
    files = [path for path in MODEL_DIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20
    assert all(path.suffix in (".json", ".safetensors") for path in files)
    for style in ADAPTERS:
        assert (ADAPTER_DIR / f"{style}.safetensors").stat().st_size <= 300 * 1024


@pytest.mark.parametrize("style", ADAPTERS)
def test_an_adapter_is_read_at_the_strength_that_it_was_trained_at(style: pictures.Style) -> None:
    recipe = RECIPES[style]
    transformer = load_pipeline(adapter=ADAPTER_DIR / f"{style}.safetensors").transformer
    layers = [m for m in transformer.modules() if isinstance(m, LoraLayer)]
    assert {layer.scaling["style"] for layer in layers} == {recipe.alpha / recipe.rank}
    assert {layer.r["style"] for layer in layers} == {recipe.rank}


def test_the_bundled_adapters_are_those_that_have_a_style() -> None:
    assert sorted(BUNDLED_ADAPTERS) == sorted(ADAPTERS)
    assert {path.stem for path in ADAPTER_DIR.glob("*.safetensors")} == set(ADAPTERS)
    assert len({(recipe.rank, recipe.alpha) for recipe in RECIPES.values()}) > 1


def test_the_shipped_weights_are_half_precision_safetensors() -> None:
    weights = [*MODEL_DIR.rglob("*.safetensors"), *ADAPTER_DIR.glob("*.safetensors")]
    assert len(weights) == 3 + len(ADAPTERS)
    for path in weights:
        with safe_open(path, framework="pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118


def test_the_template_prefix_has_the_length_that_the_pipeline_drops(pipeline: Any) -> None:
    assert pipeline.prompt_template_encode == in_template("{}")
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE_PREFIX_TOKENS == 34
    assert len(pipeline.tokenizer(TEMPLATE_PREFIX).input_ids) == 34


def test_each_word_of_the_grammar_is_one_token() -> None:
    tokenizer = build_tokenizer()
    for scene in random_scenes(50, seed=3):
        sentence = pictures.caption(scene)
        assert len(tokenizer.tokenize(sentence)) == len(sentence.split())


def test_sentences_read_back_as_the_scene_they_were_written_from() -> None:
    for scene in random_scenes(500, seed=1):
        sentence = pictures.caption(scene)
        assert pictures.parse(sentence) == scene
        assert pictures.parse(sentence.replace("an orange", "a orange")) == scene


@pytest.mark.parametrize(
    "sentence", ["", "a cat", "a red circle", "a red circle on a red background", "red circle"]
)
def test_a_sentence_outside_the_grammar_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match="not a sentence"):
        pictures.parse(sentence)


def test_training_and_held_out_sentences_never_meet() -> None:
    trained = pictures.sample_scenes(3000, seed=7, held_out=False)
    held_out = pictures.sample_scenes(1000, seed=7, held_out=True)
    assert not set(trained) & set(held_out)
    assert len(set(held_out)) == 1000
    assert pictures.sample_scenes(3000, seed=7, held_out=False) == trained


@pytest.mark.parametrize("style", pictures.STYLES)
def test_the_judge_passes_pictures_of_their_own_sentence(style: pictures.Style) -> None:
    result = score_drawn(150, style)
    assert result.adherent >= 0.99
    assert result.shapes >= 0.99


def wanted(scene: pictures.Scene, style: pictures.Style) -> object:
    """What "adherent" asks of the scene's picture: its background, and which colour lies where."""
    scene = pictures.shown(scene, style)
    colours = [item.colour for item in scene.items]
    return scene.background, frozenset(zip(pictures.centres(scene), colours, strict=True))


@pytest.mark.parametrize("style", pictures.STYLES)
def test_the_judge_fails_pictures_of_other_sentences(style: pictures.Style) -> None:
    scenes = random_scenes(150, seed=2)
    rng = random.Random(2)
    drawn = [pictures.draw(scene, rng, style) for scene in scenes]
    others = [
        (scene, picture)
        for scene, other, picture in zip(
            scenes, scenes[1:] + scenes[:1], drawn[1:] + drawn[:1], strict=True
        )
        if wanted(scene, style) != wanted(other, style)
    ]
    assert len(others) >= 90
    assert sum(judge(scene, picture, style).adherent for scene, picture in others) <= 2


@pytest.mark.parametrize("style", ADAPTERS)
def test_the_judge_sees_no_style_in_plain_pictures(style: pictures.Style) -> None:
    scenes = [s for s in random_scenes(200, seed=6) if all(i.shape != "ring" for i in s.items)]
    rng = random.Random(6)
    drawn = {kind: [pictures.draw(s, rng, kind) for s in scenes] for kind in ("plain", style)}
    assert shown(scenes, drawn[style], style) >= 0.98 * len(scenes)
    assert shown(scenes, drawn["plain"], style) <= 0.25 * len(scenes)


def test_the_judge_notices_one_wrong_word() -> None:
    rng = random.Random(4)
    for scene in random_scenes(100, seed=4):
        picture = pictures.draw(scene, rng)
        ground = rng.choice([b for b in pictures.BACKGROUNDS if b != scene.background])
        assert not judge(replace(scene, background=ground), picture).background
        first, *others = scene.items
        colour = rng.choice([c for c in pictures.COLOURS if c != first.colour])
        recoloured = (replace(first, colour=colour), *others)
        assert not judge(replace(scene, items=recoloured), picture).colours
        shape = rng.choice([s for s in pictures.SHAPES if s != first.shape])
        reshaped = (replace(first, shape=shape), *others)
        assert not judge(replace(scene, items=reshaped), picture).shapes
        if not scene.relation:
            size = rng.choice([s for s in pictures.SIZES if s != scene.size])
            assert not judge(replace(scene, size=size), picture).sizes


def test_the_model_can_be_made_from_nothing_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    restore = TrainingState.restore

    def restore_and_note(state: TrainingState) -> None:
        restore(state)
        started.append(state.step)

    monkeypatch.setattr(TrainingState, "restore", restore_and_note)
    train(tmp_path, "all", steps_vae=2, steps_model=2, pictures=32, batch_size=4)
    folder = train(tmp_path, "all", steps_vae=3, steps_model=4, pictures=32, batch_size=4)
    assert started == [0, 0, 2, 2]
    adapter = tmp_path / "outline.safetensors"
    train_adapter(folder, adapter, "outline", AdapterRecipe(steps=2), count=32)
    assert started == [0, 0, 2, 2, 0]
    (drawn,) = generate(load_pipeline(folder, adapter), ["a red star on a pink background"], [0])
    assert drawn.shape == (64, 64, 3)


def test_a_resumed_training_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    step_counts: list[tuple[Path, int]] = [(broken, 3), (broken, 4), (unbroken, 4)]
    ends = {}
    for out, steps in step_counts:
        network = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
        state = TrainingState({"network": network}, optimizer, out / "state.safetensors")
        if not state.path.exists():
            torch.nn.init.constant_(network.weight, 0.5)
            torch.nn.init.zeros_(network.bias)
        state.restore()
        while state.step < steps:
            optimizer.zero_grad()
            network(torch.full((1, 3), float(state.step))).square().sum().backward()
            optimizer.step()
            state.step += 1
        state.save()
        ends[out] = network.weight.detach().clone()
    assert torch.equal(ends[broken], ends[unbroken])
