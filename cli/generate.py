"""``omni-engine generate``: prompts in, PNG files out, on a running engine or one of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.connecting import AUTO, KeyOptions, keys_on_command_line, resolve_endpoint
from omni_engine.cli.display import console
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import AsJson, EngineOptions
from omni_engine.cli.parsing import parse_assignment, parse_lora
from omni_engine.protocol.errors import ConfigError
from omni_engine.protocol.logs import choose_logging

if TYPE_CHECKING:
    from omni_engine.engine.curve import ClientKeys
    from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams

_SAMPLING = "Picture"

_HELP = """
Make pictures from prompts; every prompt is a request of its own, and all run at once.

Without --connect an engine is started for this command alone, with the
options of `serve`.

Files are named NN-PROMPT-SEED.png, previews like their picture with
-step-STEP added (the seed is added when the picture is finished). An existing
file is never overwritten.
"""

_EPILOG = """
[bold]Examples[/bold]
  omni-engine generate "a red circle on a white background" -o pictures
  omni-engine generate "a red star on a white background" -o pictures --seed 7 --connect auto
  omni-engine generate "a fox" -o pictures --model Qwen/Qwen-Image --n 4
  omni-engine generate "a red star on a white background" -o pictures --lora night:0.8 --json
  omni-engine generate "a large red star" -o pictures --lora night --lora outline:0.5
  omni-engine generate "a red star on a white background" -o pictures --preview-every 4

Exit code 1 if any request failed; the pictures of the others are written all the same.
"""


def _flag(text: str, *flags: str, metavar: str | None = None, minimum: int | None = None) -> Any:
    return typer.Option(*flags, help=text, metavar=metavar, min=minimum,
                        rich_help_panel=_SAMPLING)  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the pictures; None takes the engine's default."""

    height: Annotated[int | None, _flag("Pixels.", "--height", metavar="PX", minimum=1)] = None
    width: Annotated[int | None, _flag("Pixels.", "--width", metavar="PX", minimum=1)] = None
    steps: Annotated[
        int | None, _flag("Denoising steps.", "--steps", metavar="N", minimum=1)
    ] = None  # fmt: skip
    sampler: Annotated[
        str | None,
        _flag("Sampling method, such as euler or flow_unipc; a wrong one lists the model's.",
              "--sampler", metavar="NAME"),
    ] = None  # fmt: skip
    guidance_scale: Annotated[
        float | None, _flag("The model's guidance_scale.", "--guidance-scale", metavar="X")
    ] = None
    true_cfg_scale: Annotated[
        float | None,
        _flag("Classifier-free guidance (Qwen-Image and others).", "--true-cfg-scale",
              metavar="X"),
    ] = None  # fmt: skip
    negative_prompt: Annotated[
        str | None, _flag("What to steer away from.", "--negative-prompt", metavar="TEXT")
    ] = None
    seed: Annotated[
        int | None,
        _flag("Seed of every prompt's first picture; picture i uses SEED + i. "
              "Default: drawn for each prompt.", "--seed", metavar="SEED", minimum=0),
    ] = None  # fmt: skip
    n: Annotated[
        int | None, _flag("Pictures per prompt.", "--n", "-n", metavar="N", minimum=1)
    ] = None  # fmt: skip
    num_frames: Annotated[
        int | None, _flag("Frames of a video.", "--num-frames", metavar="N", minimum=1)
    ] = None
    fps: Annotated[float | None, _flag("Frames per second.", "--fps", metavar="X")] = None
    lora: Annotated[
        list[str] | None,
        _flag("A registered adapter and its strength; repeatable, all of them apply.", "--lora",
              metavar="NAME[:SCALE]"),
    ] = None  # fmt: skip
    extra_arg: Annotated[
        list[str] | None,
        _flag("A further argument of the pipeline, VALUE in JSON or plain text; repeatable.",
              "--extra-arg", metavar="NAME=VALUE"),
    ] = None  # fmt: skip

    def params(self) -> OmniDiffusionSamplingParams:
        """Return the sampling parameters.

        Raises:
            OmniError: if a value is not acceptable.
        """
        from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

        extra = [parse_assignment("--extra-arg", a, "NAME=VALUE") for a in self.extra_arg or ()]
        return OmniDiffusionSamplingParams(
            height=self.height,
            width=self.width,
            num_frames=self.num_frames,
            fps=self.fps,
            num_inference_steps=self.steps,
            sampler=self.sampler,
            guidance_scale=self.guidance_scale,
            true_cfg_scale=self.true_cfg_scale,
            negative_prompt=self.negative_prompt,
            seed=self.seed,
            num_outputs_per_prompt=self.n,
            lora_request=self._lora(),
            extra_args={name: _json_or_text(value) for name, value in extra},
        )

    def _lora(self) -> LoRARequest | list[LoRARequest] | None:
        from omni_engine.protocol.sampling import LoRARequest

        asked = [LoRARequest(*parse_lora(text)) for text in self.lora or ()]
        return asked if len(asked) > 1 else next(iter(asked), None)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("generate", help=_HELP, epilog=_EPILOG)(generate)


@expand_options
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="What to paint; one or several.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files; is created.")
    ],
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS",
                     help=f'Use a running engine; "{AUTO}" is the default address.'),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL",
                     help="With --connect: a served model's name. Else what to load, as in serve."),
    ] = None,
    preview_every: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Save a small preview every K steps."),
    ] = None,
    preview_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR",
                     help='Folder for the previews; is created. Default: "previews" in --out.'),
    ] = None,
    as_json: AsJson = False,
    *,
    context: typer.Context,
    sampling: SamplingOptions,
    keys: KeyOptions,
    engine: EngineOptions,
) -> None:  # fmt: skip
    """Make pictures from prompts."""
    from omni_engine.cli.generation import Previews, generate_files
    from omni_engine.cli.pictures import PictureFolder
    from omni_engine.cli.report import print_report

    params = sampling.params()
    if preview_dir is not None and preview_every is None:
        raise ConfigError(
            "--preview-dir has no effect without --preview-every", field="--preview-dir",
            value=str(preview_dir), expected="--preview-every K to be given as well",
        )  # fmt: skip
    folder, previews = PictureFolder(out, fps=sampling.fps), None
    if preview_every is not None:
        preview_folder = PictureFolder(preview_dir or out / "previews", flag="--preview-dir")
        previews = Previews(preview_folder, preview_every)
    if connect is None and keys_on_command_line(context):
        raise ConfigError(
            "keys have no effect without --connect", field="--key, --server-key",
            expected="--connect ADDRESS to be given as well",
        )  # fmt: skip
    served = None if connect is None else model
    with interrupts.unwound_by_sigterm(), _engine_at(connect, keys, model, engine) as found:
        started = time.monotonic()
        items = generate_files(*found, prompts, params, served, folder, previews)
        wall_s = time.monotonic() - started
    print_report(items, wall_s, as_json=as_json)
    raise typer.Exit(0 if all(item.error is None for item in items) else 1)


@contextmanager
def _engine_at(
    connect: str | None, options: KeyOptions, model: str | None, engine: EngineOptions
) -> Iterator[tuple[str, ClientKeys | None]]:
    """Yield the address of the engine to use, and keys; one started here ends with the context."""
    if connect is None:
        with _own_engine(model, engine) as found:
            yield found
        return
    if given := engine.given():
        raise ConfigError(
            f"{given[0]} has no effect with --connect: that engine runs already",
            field=given[0], expected="options of the pictures only",
            hint="Leave it out, or leave --connect out to start an engine of your own.",
        )  # fmt: skip
    interrupts.release()
    keys = options.keys()
    yield resolve_endpoint(connect, keys), keys


@contextmanager
def _own_engine(
    model: str | None, engine: EngineOptions
) -> Iterator[tuple[str, ClientKeys | None]]:
    from omni_engine.engine.curve import owner_keys
    from omni_engine.engine.omni import Omni

    engine.settings(model)  # reports what is wrong by the names of the command line
    choose_logging(engine.log_level, engine.log_format)
    interrupts.release()
    with console(stderr=True).status("starting the engine and loading the model"):
        omni = Omni(model, config=engine.config, **engine.overrides())
    try:
        yield omni.endpoint, owner_keys(omni.settings.config.curve)
    finally:
        with interrupts.held():
            omni.close()


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
