"""``omni-engine keys``: pairs of keys for engines and clients whose connections are encrypted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omni_engine.cli.display import print_line

_HELP = "Make keys, for engines and clients whose connections are encrypted."

_NEW_HELP = """
Make a pair of keys: NAME.key, which is public, and NAME.key_secret, for you only.

An engine needs a pair and so does every client; each gets the public half of
the other's. Files that exist are never overwritten.
"""
_NEW_EPILOG = """
[bold]Examples[/bold]
  omni-engine keys new engine -o keys
  omni-engine keys new alice -o keys
"""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    keys = typer.Typer(no_args_is_help=True, help=_HELP)
    keys.callback()(_keys)
    keys.command("new", help=_NEW_HELP, epilog=_NEW_EPILOG)(new)
    app.add_typer(keys, name="keys")


def _keys() -> None:
    pass  # with a callback a single command keeps its name


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose they are.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files; is created.")
    ] = Path(),
) -> None:
    """Make a pair of keys."""
    from omni_engine.engine.curve import new_pair

    public, secret = new_pair(out, name)
    print_line(f"{secret}  secret: give it to nobody, nobody else may read it")
    print_line(f"{public}  public: copy it to the other side")
    print_line("")
    print_line("If it is an engine's:")
    print_line(f"  omni-engine serve --curve-secret-key {secret} --curve-clients DIR ...")
    print_line(f"  every client gets {public.name}, for its --server-key")
    print_line("If it is a client's:")
    print_line(f"  {public.name} goes to the engine's machine, into the folder of --curve-clients")
    print_line(f"  omni-engine status --connect ADDRESS --key {secret} --server-key ENGINE.key")
