"""``omni-engine config``: the effective settings with their origins, and deploy files checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_engine.cli.display import clean, console, print_json, print_line, problem_lines, table
from omni_engine.cli.http_options import HttpOptions
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import AsJson, Endpoint, EngineOptions, Model

if TYPE_CHECKING:
    from omni_engine.stages.settings import Settings

_INVALID = 2

_SHOW_HELP = """
Print every effective setting and where it came from.

The command line wins over the deploy file, the file over the defaults.
"""
_SHOW_EPILOG = """
[bold]Examples[/bold]
  omni-engine config show
  omni-engine config show --config stages.yaml --max-num-seqs 8
  omni-engine config show Qwen/Qwen-Image --json
"""

_CHECK_HELP = """
Check a deploy file; print every problem as FILE:LINE:COLUMN with what to write instead.

Exit code 0: the file is right. 2: it is not.
"""
_CHECK_EPILOG = """
[bold]Examples[/bold]
  omni-engine config check stages.yaml
  omni-engine config check stages.yaml --json
"""

config = typer.Typer(no_args_is_help=True, help="Look at the settings and check deploy files.")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    config.command("show", help=_SHOW_HELP, epilog=_SHOW_EPILOG)(show)
    config.command("check", help=_CHECK_HELP, epilog=_CHECK_EPILOG)(check)
    app.add_typer(config, name="config")


@expand_options
def show(
    model: Model = None,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
    *,
    engine: EngineOptions,
    http: HttpOptions,
) -> None:
    """Print the effective settings."""
    settings = engine.settings(model, endpoint=endpoint, **http.overrides())
    if as_json:
        rows = [{"path": p, "value": v, "origin": o} for p, v, o in settings.rows()]
        print_json(rows)
    else:
        _print_table(settings)


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The deploy file, YAML.")],
    as_json: AsJson = False,
) -> None:
    """Check a deploy file."""
    from omni_engine.stages.config import ConfigFileError, ConfigProblem
    from omni_engine.stages.settings import load_settings

    problems: tuple[ConfigProblem, ...] = ()
    try:
        load_settings(config_path=file)
    except ConfigFileError as error:
        problems = error.problems
    if as_json:
        found = [dataclasses.asdict(problem) for problem in problems]
        print_json({"file": str(file), "ok": not problems, "problems": found})
    elif problems:
        for line in problem_lines(problems):
            print_line(line.removeprefix("  "))
    else:
        print_line(f"{file}: ok")
    raise typer.Exit(_INVALID if problems else 0)


def _print_table(settings: Settings) -> None:
    shown = table("effective settings", "setting", "value", "from")
    for path, value, origin in settings.rows():
        style = "dim" if origin == "default" else None
        shown.add_row(clean(path), clean(json.dumps(value, ensure_ascii=False)), clean(origin),
                      style=style)  # fmt: skip
    console().print(shown)
