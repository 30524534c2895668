"""``omni-engine train-lora``: an adapter for the bundled model from a folder of pictures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.display import clean, print_line
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.bundled.recipe import TARGETS, AdapterRecipe

_DEFAULTS = AdapterRecipe()

_HELP = """
Train a LoRA adapter for the bundled model on a folder of pictures with captions.

FOLDER holds name.png (jpg, jpeg, webp) with its caption in name.txt, or a
metadata.jsonl with a line {"file_name": ..., "text": ...} for each picture.
Pictures are cropped and resized to 64x64.

Ctrl-C lets the running step end and keeps a checkpoint beside the result;
--resume goes on from it, to the same result. A second Ctrl-C ends at once.
Runs on the CPU.
"""

_EPILOG = """
[bold]Examples[/bold]
  omni-engine train-lora --data pictures --out my_style.safetensors
  omni-engine train-lora --data pictures --out my_style.safetensors --rank 4 --steps 400
  omni-engine train-lora --data pictures --out my_style.safetensors --resume
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train-lora", help=_HELP, epilog=_EPILOG)(train_lora)


def train_lora(
    data: Annotated[
        Path, typer.Option("--data", metavar="FOLDER", help="The pictures and captions.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE",
                     help="The safetensors file to write; an existing one is replaced at the end."),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help='"bundled", or a folder that its training made.'),
    ] = "bundled",
    rank: Annotated[int, typer.Option(metavar="N", min=1, max=192, help="Rank.")] = _DEFAULTS.rank,
    alpha: Annotated[
        int | None,
        typer.Option(metavar="N", min=1,
                     help="Strength: the adapter is scaled by alpha / rank. Default: 2 x rank."),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Length of the whole training.")
    ] = _DEFAULTS.steps,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, max=4096, help="Pictures a step.")
    ] = _DEFAULTS.batch_size,
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", min=1e-8, max=1.0, help="The highest learning rate.")
    ] = _DEFAULTS.learning_rate,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32, help="Same seed, same adapter.")
    ] = _DEFAULTS.seed,
    target_modules: Annotated[
        str,
        typer.Option(metavar="NAMES",
                     help="Layers of the transformer that adapt, separated by commas."),
    ] = ",".join(TARGETS),
    threads: Annotated[
        int, typer.Option(metavar="N", min=1, max=1024, help="Threads that compute.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Go on from the checkpoint, if any.")
    ] = False,
) -> None:  # fmt: skip
    """Train an adapter."""
    from omni_engine.stages.bundled.caption_folder import read_caption_folder

    recipe = AdapterRecipe(
        rank=rank,
        alpha=2 * rank if alpha is None else alpha,
        targets=tuple(name.strip() for name in target_modules.split(",")),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
    )
    folder = MODEL_DIR if model == "bundled" else Path(model).expanduser()
    pictures = read_caption_folder(data)
    interrupts.release()

    os.environ["HF_HUB_OFFLINE"] = "1"
    import diffusers
    import torch
    import transformers

    from omni_engine.stages.bundled.adapter_training import TrainingStopped
    from omni_engine.stages.bundled.train_lora import checkpoint_path, train_lora

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    print_line(
        f"{len(pictures.names)} pictures, {len(set(pictures.captions))} different captions; "
        f"rank {recipe.rank}, alpha {recipe.alpha}, {recipe.steps} steps"
    )
    with _stop_signals() as noted:
        try:
            trained = train_lora(
                pictures, out, folder, recipe, resume=resume, stop=lambda: bool(noted)
            )
        except TrainingStopped as stopped:
            kept = f"; go on with --resume ({checkpoint_path(out)})" if stopped.step else ""
            typer.echo(clean(f"{stopped}{kept}"), err=True)
            raise typer.Exit(128 + noted[0]) from None
    print_line(f"written: {trained.path}")


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the numbers of the signals to stop that came; the second one interrupts at once."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
