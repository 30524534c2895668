"""``python -m omni_engine.cli.demo``: eight pictures by two workers, and one in eight styles.

Everything is real: an engine process, two worker processes, the model inside the package. Nothing
is downloaded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.contact_sheet import contact_sheet, first_picture
from omni_engine.cli.display import clean, console, print_line, table
from omni_engine.cli.main import run
from omni_engine.cli.pictures import make_folder, slug
from omni_engine.cli.report import seconds_per_picture
from omni_engine.engine.omni import Omni
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams

PROMPTS = (
    "a red circle on a white background",
    "a large blue star on a pink background",
    "a small yellow heart on a black background",
    "a purple ring on a cyan background",
    "a green cross left of a purple square on a gray background",
    "a white diamond above a red cross on a brown background",
    "a blue heart right of a yellow star on a black background",
    "an orange circle below a purple triangle on a white background",
)
FIRST_SEED = 7
STYLED = PROMPTS[7]
STYLES = (
    ("outline",),
    ("night",),
    ("studio",),
    ("silhouette",),
    ("chalk",),
    ("tiny",),
    ("silhouette", "studio"),
    ("silhouette", "tiny"),
)
"""Adapters of the bundled model, alone and in pairs."""
SHEET_NAME = "contact-sheet.png"

_HELP = """
Draw eight pictures with the model inside the package, on two workers, and a contact sheet of them
and of one of them in eight styles: LoRA adapters, alone and in pairs.

Files of an earlier demo in the same folder are replaced.
"""

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)


@app.command(help=_HELP)
def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for the files; is created.")
    ] = Path("demo-output"),
) -> None:
    """Run the demo."""
    make_folder(out)
    interrupts.release()
    with interrupts.unwound_by_sigterm():
        started = time.monotonic()
        print_line("starting an engine with two workers and the bundled model ...")
        with Omni("bundled", devices="cpu", replicas=2, max_num_seqs=4) as omni:
            ready = time.monotonic()
            print_line(f"ready after {ready - started:.1f} s; {len(PROMPTS)} requests at once ...")
            outputs = omni.generate(PROMPTS, _params())
            drawn = time.monotonic()
            styled = omni.generate([STYLED] * len(STYLES), _style_params())
            styles_s = time.monotonic() - drawn
    for output in (*outputs, *styled):
        output.raise_for_error()
    files, sheet = _write(out, outputs, styled)
    _report(files, sheet, outputs, drawn - ready)
    print_line(f"one of them in {len(STYLES)} styles (on the contact sheet) in {styles_s:.2f} s")


def _params() -> list[OmniDiffusionSamplingParams]:
    seeds = range(FIRST_SEED, FIRST_SEED + len(PROMPTS))
    return [OmniDiffusionSamplingParams(height=64, width=64, seed=seed) for seed in seeds]


def _style_params() -> list[OmniDiffusionSamplingParams]:
    """Return the styled prompt's own parameters, under each style's adapters."""
    plain = _params()[PROMPTS.index(STYLED)]
    return [
        replace(plain, lora_request=[LoRARequest(name) for name in adapters]) for adapters in STYLES
    ]


def _write(
    folder: Path, outputs: Sequence[DiffusionOutput], styled: Sequence[DiffusionOutput]
) -> tuple[list[Path], Path]:
    from PIL import Image

    files = []
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True), 1):
        files.append(folder / f"{number:02}-{slug(prompt)}-{output.seed}.png")
        Image.fromarray(first_picture(output)).save(files[-1])
    captioned = [
        (first_picture(o), p, f"seed {o.seed}") for p, o in zip(PROMPTS, outputs, strict=True)
    ]
    captioned += [
        (first_picture(o), " + ".join(adapters), f"seed {o.seed}")
        for adapters, o in zip(STYLES, styled, strict=True)
    ]
    sheet = folder / SHEET_NAME
    contact_sheet(captioned).save(sheet)
    return files, sheet


def _report(
    files: Sequence[Path], sheet: Path, outputs: Sequence[DiffusionOutput], wall_s: float
) -> None:
    shown = table("", "picture", "seed", "batch", "worker", "s per picture")
    for path, output in zip(files, outputs, strict=True):
        metrics = output.metrics
        row = (path.name, output.seed, metrics.max_batch_size, metrics.worker,
               f"{seconds_per_picture(metrics, 1):.2f}")  # fmt: skip
        shown.add_row(*map(clean, row))
    console().print(shown)
    print_line(f"batches that ran: {batches(outputs)}")
    print_line(f"{len(files)} pictures in {wall_s:.2f} s, {wall_s / len(files):.2f} s per picture")
    print_line(f"pictures:      {sheet.parent}/")
    print_line(f"contact sheet: {sheet}")


def batches(outputs: Sequence[DiffusionOutput]) -> str:
    """Return how many batches of which size each worker ran: ``1 of 4 on worker0, …``."""
    requests = Counter((o.metrics.worker, o.metrics.max_batch_size) for o in outputs)
    return ", ".join(
        f"{count // size} of {size} on {worker}"
        for (worker, size), count in sorted(requests.items())
    )


def main() -> None:
    """Run the demo; ends the process with one of the command line's exit codes."""
    run(app)


if __name__ == "__main__":
    main()
