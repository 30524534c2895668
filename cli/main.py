"""The ``omni-engine`` command: its subcommands, and how errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from omni_engine.cli import (
    configuration,
    generate,
    inspection,
    interrupts,
    keys,
    loras,
    parity,
    serve,
    top,
    trace,
    train_lora,
)
from omni_engine.cli.display import print_error
from omni_engine.protocol.errors import ConfigError, InvalidRequestError, OmniError

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130

_HELP = """
Serve diffusion models: every request that can share a forward pass does.

Without a model or a deploy file all commands use the small model inside the package.
"""

_EPILOG = """
[bold]Examples[/bold]
  omni-engine generate "a red circle on a white background" -o pictures
  omni-engine serve --config stages.yaml
  omni-engine generate "a red star on a white background" -o pictures --connect auto

[bold]Exit codes[/bold]
  0  everything went well
  1  a request failed, or the engine or a model could not do its work
  2  the command line or the configuration is wrong
  130  interrupted (Ctrl-C)
"""

app = typer.Typer(
    name="omni-engine",
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
serve.register(app)
generate.register(app)
inspection.register(app)
top.register(app)
trace.register(app)
loras.register(app)
keys.register(app)
configuration.register(app)
parity.register(app)
train_lora.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from omni_engine import __version__

        typer.echo(f"omni-engine {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_print_version, is_eager=True,
                     help="Print the version and exit."),
    ] = False,
) -> None:  # fmt: skip
    pass


def main() -> None:
    """Run the command line; ends the process with one of the documented exit codes."""
    run(app)


def run(application: typer.Typer) -> None:
    """Run an application: its OmniErrors become short messages and exit codes, never tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that can't show a character of a prompt is no reason to fail.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    interrupts.hold()
    try:
        application()
    except (ConfigError, InvalidRequestError) as error:
        print_error(error)
        sys.exit(USAGE_ERROR)
    except OmniError as error:
        print_error(error)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
