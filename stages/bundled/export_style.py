"""Writes a style's pictures with their captions as a folder, such as `train-lora` learns from.

`python -m omni_engine.stages.bundled.export_style --style tiny --out FOLDER --count 200`
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from PIL import Image

from . import pictures


def export_style(folder: Path, style: pictures.Style, count: int, seed: int = 1) -> None:
    """Writes `0000.png` with its caption in `0000.txt` and so on; no sentence is a held-out one.

    Args:
        folder: Is created; must be empty.
        style: How the pictures are drawn.
        count: How many.
        seed: Decides sentences and jitter.

    Raises:
        FileExistsError: The folder isn't empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty")
    rng = random.Random(seed + 1)
    for number, scene in enumerate(pictures.sample_scenes(count, seed, held_out=False)):
        path = folder / f"{number:04}.png"
        Image.fromarray(pictures.draw(scene, rng, style)).save(path)
        path.with_suffix(".txt").write_text(f"{pictures.caption(scene)}\n")


def main() -> None:
    """Reads the command line and writes the folder."""
    parser = argparse.ArgumentParser(description="Writes a style's pictures with captions.")
    parser.add_argument("--style", choices=pictures.STYLES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder; must be empty or new")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        export_style(options.out, options.style, options.count, options.seed)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"written: {options.count} pictures with captions to {options.out}")


if __name__ == "__main__":
    main()
