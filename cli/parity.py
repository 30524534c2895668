"""``omni-engine parity``: whether a model makes the same pictures in company as alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.display import clean, console, print_json, table
from omni_engine.cli.options import AsJson

if TYPE_CHECKING:
    from omni_engine.engine.devices import WorkerDevice
    from omni_engine.protocol.plans import WorkerSpec

DIFFERENT = 1
_PROCESS = "omni_engine.worker.parity_process"
_END_TIMEOUT_S = 10.0

_HELP = """
Compare what a model makes of requests in company with what it makes of them alone.

Loads the model in a process of its own, certifies it anew, and runs small
made-up requests: one by one by the pipeline itself, in one call with lists,
together in shared steps, and mixed: joining at different steps, with
different step counts, guidance and numbers of pictures.

Ends with exit code 0 if every way that an engine would run them makes the
same pictures, shared or not; with 1 if one doesn't or the model can't be
loaded.
"""

_EPILOG = """
[bold]Examples[/bold]
  omni-engine parity
  omni-engine parity models/my-sdxl --dtype float64
  omni-engine parity bundled --requests 6 --json
"""


@dataclass(frozen=True)
class _Loading:
    """How the model is loaded; named like the settings."""

    revision: str | None
    variant: str | None
    pipeline: str | None
    trust_remote_code: bool | None


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("parity", help=_HELP, epilog=_EPILOG)(parity)


def parity(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL",
                       help='"bundled", a hub id or a local folder. Default: "bundled".'),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="MODULE:CLASS",
                     help="A pipeline class of your own, or an entry point."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float64", "bfloat16", "float16"],
        typer.Option(metavar="DTYPE",
                     help="Of the weights: auto, float32, float64, bfloat16 or float16. In float64 "
                     "company changes nothing but the last digits."),
    ] = "auto",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help='Such as "cuda:0", "cpu" or "auto".')
    ] = "auto",
    requests: Annotated[
        int, typer.Option(metavar="N", min=2, max=64, help="Requests that run together.")
    ] = 4,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub model.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help='Variant of the weight files, as "fp16".')
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code/--no-trust-remote-code", metavar="",
                     help="Run code that comes with a hub model."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Print how a model's pictures in company differ from those alone."""
    loading = _Loading(revision, variant, pipeline, trust_remote_code)
    spec, place = _planned(model, dtype, device, loading)
    interrupts.release()
    with interrupts.unwound_by_sigterm(), _telling_phases() as tell:
        found = _measured(spec, place, requests, tell)
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(0 if found["passed"] else DIFFERENT)


@contextmanager
def _telling_phases() -> Iterator[Callable[[str], None]]:
    """Yield what tells the phase: in a line that changes, or one line each where no terminal is."""
    output = console(stderr=True)
    if not output.is_terminal:
        yield lambda phase: typer.echo(clean(phase), err=True)
        return
    with output.status("starting") as shown:
        yield lambda phase: shown.update(clean(phase))


def _planned(
    model: str | None, dtype: str, device: str, loading: _Loading
) -> tuple[WorkerSpec, WorkerDevice]:
    """Return what to load, and where.

    Raises:
        ConfigError: naming everything that is wrong.
    """
    from omni_engine.engine.devices import available_devices, worker_device
    from omni_engine.protocol.plans import WorkerSpec
    from omni_engine.stages.settings import load_settings

    overrides = {name: value for name, value in vars(loading).items() if value is not None}
    if dtype != "float64":  # nobody serves in float64
        overrides["dtype"] = dtype
    settings = load_settings(model=model, overrides={**overrides, "devices": device})
    (stage,) = settings.config.stage_args
    place = worker_device(stage.worker_devices(available_devices())[0])
    arguments = {**stage.engine_args.model_dump(mode="json"), "dtype": dtype}
    resolved = stage.engine_args.resolved_model()
    return WorkerSpec("parity", "", arguments, resolved, place.torch_name), place


def _measured(
    spec: WorkerSpec, place: WorkerDevice, requests: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run the measuring process and return what it found.

    Raises:
        OmniError: if the model can't be loaded or run.
    """
    from omni_engine.protocol import pipes
    from omni_engine.protocol.errors import ModelLoadError, error_from_wire

    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", _PROCESS, str(writing)],
        stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), pass_fds=(writing,),
        env={**os.environ, **place.environment}, bufsize=0,
    )  # fmt: skip
    os.close(writing)
    assert process.stdin is not None  # PIPE was asked for
    try:
        pipes.write_message(process.stdin.fileno(), {"spec": spec.to_wire(), "requests": requests})
        while "doing" in (message := pipes.read_message(reading)):
            tell(message["doing"])
    except (EOFError, BrokenPipeError):
        code = process.wait(_END_TIMEOUT_S)
        raise ModelLoadError(
            f"the process that ran the model ended with code {code}", field="model",
            value=spec.model, hint="Its messages are above; memory may have been short.",
        ) from None  # fmt: skip
    finally:
        os.close(reading)
        process.stdin.close()  # its end ends the process
        _end(process)
    if "error" in message:
        raise error_from_wire(message["error"])
    found: dict[str, Any] = message["result"]
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _print(found: Mapping[str, Any]) -> None:
    output = console()
    about = table(clean(f"parity of {found['model']}"), "", "")
    about.show_header = False
    rules = ", ".join(f"{name}: {source}" for name, source in found["rules"].items())
    rows = {
        "pipeline": found["pipeline"],
        "on": f"{found['device']}, {found['dtype']}",
        "batching": found["batching"],
        "rules": rules or "-",
        "tolerance": f"{found['tolerance']:.0e} of full scale",
    }
    for name, value in rows.items():
        about.add_row(name, clean(value))
    modes = table("modes", "mode", "max difference", "forwards for calls", "rows per forward",
                  "time / single", "verdict")  # fmt: skip
    for mode in found["modes"]:
        modes.add_row(*map(clean, _row(mode)))
    output.print(about)
    output.print(modes)
    output.print("passed" if found["passed"] else f"FAILED: {_failure(found['modes'])}")


def _failure(modes: Sequence[Mapping[str, Any]]) -> str:
    """Return which of the modes that count differ, and which can't be run at all."""
    said = {"differs": "pictures in company differ from alone", "fails": "requests can't be run"}
    named = {
        verdict: [mode["mode"] for mode in modes if mode["served"] and mode["verdict"] == verdict]
        for verdict in said
    }
    return "; ".join(f"{said[v]} ({', '.join(names)})" for v, names in named.items() if names)


def _row(mode: Mapping[str, Any]) -> tuple[str, ...]:
    forwards = mode["forwards"]
    reference = mode["verdict"] == "reference"
    note = f" ({mode['note']})" if mode["note"] else ""
    return (
        mode["mode"],
        "-" if reference else _text(mode["difference"], ".1e"),
        "-" if forwards is None else f"{forwards} for {mode['calls']}",
        _text(mode["rows"], ".1f"),
        _text(mode["time_ratio"], ".2f"),
        mode["verdict"] + note,
    )


def _text(value: float | None, style: str) -> str:
    return "-" if value is None else f"{value:{style}}"
