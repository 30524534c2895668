"""Scores a model on held-out sentences: `python -m omni_engine.stages.bundled.score`."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import QwenImagePipeline

from . import MODEL_DIR, pictures
from .judge import hollow_share, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = 16
GUIDANCE = 3.0
BATCH = 20
HELD_OUT_SEED = 31

_PARTS = ("adherent", "background", "colours", "places", "shapes", "sizes")


@dataclass(frozen=True)
class Score:
    """Shares (0 to 1) of the pictures that the judge passes.

    Attributes:
        count: How many pictures.
        adherent: Share with background, colours and places right.
        background: Share with the right background.
        colours: Share with every object in its colour.
        places: Share with every object in its place.
        shapes: Share with every object of its shape.
        sizes: Share with every object of its size.
        hollow: Share of the objects (but rings) whose middle has the background's colour.
        brightness: Mean pixel value over the pictures, 0 to 1.
        by_kind: Share of adherent pictures by "one object" and by relation.
        misses: The sentences of the pictures that are not adherent.
    """

    count: int
    adherent: float
    background: float
    colours: float
    places: float
    shapes: float
    sizes: float
    hollow: float
    brightness: float
    by_kind: dict[str, float]
    misses: list[str]


def load_pipeline(model: Path = MODEL_DIR, adapter: Path | None = None, scale: float = 1.0) -> Any:
    """Loads a model in float32, with an adapter at some strength if one is given."""
    pipeline = QwenImagePipeline.from_pretrained(model, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name, adapter_name="style")
        pipeline.set_adapters(["style"], [scale])
    return pipeline


def generate(
    pipeline: Any, sentences: Sequence[str], seeds: Sequence[int], batch_size: int = BATCH
) -> list[pictures.Picture]:
    """Draws a 64x64 picture for each sentence, in batches with one generator a row.

    Args:
        pipeline: A loaded QwenImagePipeline.
        sentences: The prompts.
        seeds: One seed a prompt.
        batch_size: Rows a call.

    Returns:
        One uint8 array of shape (64, 64, 3) a sentence.
    """
    drawn: list[pictures.Picture] = []
    for start in range(0, len(sentences), batch_size):
        batch = list(sentences[start : start + batch_size])
        generators = [torch.Generator().manual_seed(s) for s in seeds[start : start + batch_size]]
        images = pipeline(
            prompt=batch,
            negative_prompt=[" "] * len(batch),
            true_cfg_scale=GUIDANCE,
            num_inference_steps=STEPS,
            height=pictures.IMAGE_SIZE,
            width=pictures.IMAGE_SIZE,
            generator=generators,
        ).images
        drawn += [np.asarray(image) for image in images]
    return drawn


def score(pipeline: Any, count: int = 100, style: pictures.Style = "plain") -> Score:
    """Draws the first `count` held-out sentences and judges the pictures.

    Args:
        pipeline: A loaded QwenImagePipeline.
        count: How many sentences.
        style: The style the pictures are judged by.
    """
    scenes = held_out_scenes(count)
    drawn = generate(pipeline, [pictures.caption(scene) for scene in scenes], range(count))
    return summarize(scenes, drawn, style)


def score_drawn(count: int = 100, style: pictures.Style = "plain") -> Score:
    """Scores the drawing program itself on the same sentences: the judge's own error."""
    scenes = held_out_scenes(count)
    rng = random.Random(HELD_OUT_SEED)
    return summarize(scenes, [pictures.draw(scene, rng, style) for scene in scenes], style)


def held_out_scenes(count: int) -> list[pictures.Scene]:
    """Gives the first scenes of the fixed order in which models are scored."""
    return pictures.sample_scenes(count, HELD_OUT_SEED, held_out=True)


def summarize(
    scenes: Sequence[pictures.Scene], drawn: Sequence[pictures.Picture], style: pictures.Style
) -> Score:
    """Judges pictures (uint8, (64, 64, 3)) of scenes and counts the verdicts together."""
    verdicts = [judge(s, picture, style) for s, picture in zip(scenes, drawn, strict=True)]
    hollow = [hollow_share(s, picture, style) for s, picture in zip(scenes, drawn, strict=True)]
    count = len(scenes)
    shares = {part: sum(getattr(v, part) for v in verdicts) / count for part in _PARTS}
    kinds = [scene.relation or "one object" for scene in scenes]
    passed = Counter(k for k, v in zip(kinds, verdicts, strict=True) if v.adherent)
    return Score(
        count=count,
        hollow=float(np.nanmean(hollow)),
        brightness=float(np.mean(np.stack(drawn)) / 255),
        by_kind={kind: passed[kind] / total for kind, total in sorted(Counter(kinds).items())},
        misses=[
            pictures.caption(s) for s, v in zip(scenes, verdicts, strict=True) if not v.adherent
        ],
        **shares,
    )


def main() -> None:
    """Reads the command line, scores and prints."""
    parser = argparse.ArgumentParser(description="Scores a model on held-out sentences.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="a diffusers folder")
    parser.add_argument("--adapter", type=Path, help="a style adapter's safetensors file")
    parser.add_argument("--scale", type=float, default=1.0, help="the adapter's strength")
    parser.add_argument("--style", choices=pictures.STYLES, default="plain")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pipeline = load_pipeline(options.model, options.adapter, options.scale)
    result = asdict(score(pipeline, options.count, options.style))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for key, value in result.items():
        print(f"{key:12}{value}")


if __name__ == "__main__":
    main()
