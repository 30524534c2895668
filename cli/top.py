"""``omni-engine top``: what a running engine does, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from omni_engine.cli.connecting import AUTO, KeyOptions, connected, lost_engine
from omni_engine.cli.display import console
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import Connect

if TYPE_CHECKING:
    from rich.console import RenderableType

    from omni_engine.cli.recent import Recent
    from omni_engine.engine.client import OmniClient

_HELP = """
Watch a running engine: queues, rates, and what every worker ran in the last
seconds, one character for each slice of time: its height is the number of
requests that shared the batch, its colour the adapter.

Ctrl-C ends it. Where standard output is no terminal, one frame is printed.
"""
_EPILOG = """
[bold]Examples[/bold]
  omni-engine top
  omni-engine top --connect tcp://127.0.0.1:5570 --interval 2 --span 120
  omni-engine top --once
"""
_SILENCE_S = 10.0
"""An engine that does not answer for so long is given up."""

_UNSEEN_WIDTH = 100
"""Columns that are filled where there is no terminal."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("top", help=_HELP, epilog=_EPILOG)(top)


@expand_options
def top(
    connect: Connect = AUTO,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.05, max=60, help="Time between two frames."),
    ] = 0.5,
    span: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, max=3600, help="Time that the workers' rows show."),
    ] = 30.0,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Print one frame and end.")
    ] = False,
    *,
    keys: KeyOptions,
) -> None:
    """Show what a running engine does until it is interrupted."""
    from omni_engine.cli.recent import Recent

    output, recent = console(), Recent(span)
    with connected(connect, keys, reconnect_timeout_s=_SILENCE_S) as client, lost_engine():
        _look(client, recent)
        if once or not output.is_terminal or output.is_dumb_terminal:
            time.sleep(min(interval, 1.0))  # rates need a second look
            _look(client, recent)
            width = output.width if output.is_terminal else _UNSEEN_WIDTH
            output.print(_frame(recent, span, width))
            return
        _watch(client, recent, interval, span)


def _watch(client: OmniClient, recent: Recent, interval_s: float, span_s: float) -> None:
    """Draw frames until Ctrl-C."""
    from rich.live import Live

    output = console()
    try:
        first = _frame(recent, span_s, output.width)
        with Live(first, console=output, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                _look(client, recent)
                live.update(_frame(recent, span_s, output.width), refresh=True)
    except KeyboardInterrupt:
        return


def _look(client: OmniClient, recent: Recent) -> None:
    """Ask the engine what has happened since the last look."""
    recent.note_timeline(client.timeline(recent.next))
    recent.note_metrics(client.metrics(), time.monotonic())


def _frame(recent: Recent, span_s: float, width: int) -> RenderableType:
    from omni_engine.cli.top_frame import frame

    return frame(recent, span_s, width, time.monotonic())
