"""``omni-engine trace``: what a running engine's workers ran, as a file for trace viewers."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_engine.cli.connecting import AUTO, KeyOptions, connected, lost_engine
from omni_engine.cli.display import console, print_line
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import Connect
from omni_engine.protocol.errors import ConfigError

if TYPE_CHECKING:
    from omni_engine.cli.trace_events import TraceEvents
    from omni_engine.engine.client import OmniClient

_HELP = """
Write the batches and ticks of a running engine into a file in the trace-event
format, which ui.perfetto.dev and chrome://tracing show.

It holds what the engine still has, its latest 16384 boxes at most; with
--seconds also what happens from now on. Ctrl-C writes what there is.
"""
_EPILOG = """
[bold]Examples[/bold]
  omni-engine trace -o trace.json
  omni-engine trace -o trace.json --seconds 30
"""
_SILENCE_S = 10.0
"""An engine that does not answer for so long is given up."""

_LOOK_S = 0.1
"""Time between two looks, and so between two samples of the counters."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("trace", help=_HELP, epilog=_EPILOG)(trace)


@expand_options
def trace(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The file; it is replaced.")
    ],
    connect: Connect = AUTO,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Also what happens in so many seconds."),
    ] = None,
    *,
    keys: KeyOptions,
) -> None:
    """Write a running engine's timeline."""
    from omni_engine.cli.trace_events import TraceEvents

    _check_place(out)
    events = TraceEvents()
    with connected(connect, keys, reconnect_timeout_s=_SILENCE_S) as client, lost_engine():
        try:
            _gather(client, events)
            if seconds is not None:
                _follow(client, events, seconds)
        except KeyboardInterrupt:
            console(stderr=True).print("interrupted: what there is is written")
            _gather(client, events)
        finally:  # when the engine goes away, too
            if events.answers:
                write_atomically(out, json.dumps(events.finished()))
    missed = f"; {events.missed} older ones are not kept any more" if events.missed else ""
    print_line(f"{out}: {events.boxes} batches and ticks{missed}")


def _gather(client: OmniClient, events: TraceEvents) -> None:
    """Take in all boxes that there are by now."""
    seen = -1
    while events.boxes > seen:
        seen = events.boxes
        events.add(client.timeline(events.next))


def _follow(client: OmniClient, events: TraceEvents, seconds: float) -> None:
    """Take in what happens from now on."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    output = console(stderr=True)
    output.print(f"tracing for {seconds:g} s; Ctrl-C writes what there is")
    columns = (TextColumn("tracing"), BarColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    started = time.monotonic()
    with Progress(*columns, console=output, disable=not output.is_terminal,
                  transient=True) as progress:  # fmt: skip
        task = progress.add_task("", total=seconds)
        while (left_s := started + seconds - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left_s))
            _gather(client, events)
            progress.update(
                task, completed=time.monotonic() - started, description=f"{events.boxes} boxes"
            )


def write_atomically(path: Path, text: str) -> None:
    """Write a file: under its name there is all of it, or what was there before.

    Raises:
        ConfigError: if it can't be written.
    """
    descriptor, name = -1, ""
    try:
        path = path.resolve()  # a link stays one
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(name)
        raise _unwritable(path, error.strerror or str(error)) from None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _check_place(path: Path) -> None:
    """Refuse a place for the file that can't be one, before anything is gathered."""
    shown, path = path, path.resolve()
    if path.is_dir():
        raise _unwritable(shown, "it is a folder")
    if path.exists() and not path.is_file():
        raise _unwritable(shown, "it is no regular file")
    if not path.parent.is_dir():
        raise _unwritable(shown, "there is no such folder")
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(shown, "the folder may not be written to")


def _unwritable(path: Path, why: str) -> ConfigError:
    details: dict[str, Any] = {"field": "--out", "value": str(path)}
    return ConfigError(f"the trace can't be written: {why}", **details,
                       expected="a file in a folder that exists and may be written to")  # fmt: skip
