"""What `make demo` runs: real pictures of the bundled model, on two workers, in shared batches."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omni_engine.cli.demo import FIRST_SEED, PROMPTS, SHEET_NAME
from omni_engine.cli.pictures import slug
from omni_engine.stages.bundled.pictures import parse


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder and output."""
    folder = tmp_path_factory.mktemp("demo") / "pictures"
    done = subprocess.run([sys.executable, "-m", "omni_engine.cli.demo", "--out", str(folder)],
                          capture_output=True, text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_prompts_are_sentences_of_the_grammar() -> None:
    assert len({parse(prompt) for prompt in PROMPTS}) == 8


def test_eight_different_pictures(demo: tuple[Path, str]) -> None:
    folder, text = demo
    names = [f"{i + 1:02}-{slug(p)}-{FIRST_SEED + i}.png" for i, p in enumerate(PROMPTS)]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*names, SHEET_NAME])
    pictures = [np.asarray(Image.open(folder / name)) for name in names]
    assert {picture.shape for picture in pictures} == {(64, 64, 3)}
    assert len({picture.tobytes() for picture in pictures}) == 8
    assert all(name in text for name in names)


def test_contact_sheet_holds_every_picture(demo: tuple[Path, str]) -> None:
    folder, text = demo
    sheet = Image.open(folder / SHEET_NAME)
    assert sheet.width > 4 * 256
    assert sheet.height > 2 * 256
    assert str(folder / SHEET_NAME) in text


def test_prints_the_batches_that_ran(demo: tuple[Path, str]) -> None:
    _, text = demo
    (line,) = re.findall(r"batches that ran: (.+)", text)
    found = [(int(count), int(size)) for count, size in re.findall(r"(\d+) of (\d+) on", line)]
    assert sum(count * size for count, size in found) == 8
    assert {"stage0-worker0", "stage0-worker1"} == set(re.findall(r"on (\S+?)(?:,|$)", line))
    assert max(size for _, size in found) == 4
    assert re.search(r"8 pictures in [\d.]+ s", text)
    assert all(c.isprintable() or c == "\n" for c in text)
