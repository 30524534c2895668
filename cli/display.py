"""What the commands print: consoles, plain lines, errors as short blocks. Cheap to import."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from omni_engine.protocol.errors import OmniError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNWRAPPED_WIDTH = 1000
"""Columns where no terminal sets a width: lines are for tools then and must not be wrapped."""


def console(*, stderr: bool = False) -> Console:
    """Return a rich console that wraps for a terminal only and sends controls nowhere else."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNWRAPPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def table(title: str, *columns: str) -> Table:
    """Return an empty table in the style of all commands."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def clean(text: object) -> str:
    """Return text in which control characters are written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def print_line(text: str) -> None:
    """Print one line of a result on standard output, now."""
    typer.echo(clean(text))


def print_json(value: Any) -> None:
    """Print a machine-readable result on standard output."""
    typer.echo(json.dumps(value, indent=2))


def print_error(error: OmniError, *, about: str | None = None) -> None:
    """Print an error on standard error as a short block.

    Args:
        error: what went wrong.
        about: the item it concerns, such as a prompt.
    """
    head, *details = error_lines(error)
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(clean(head if about is None else f"{about}: {head}"), err=True)
    for line in details:
        typer.echo(clean(line), err=True)


def error_lines(error: OmniError) -> list[str]:
    """Return an error's message and code, and indented lines with its further fields."""
    problems = getattr(error, "problems", ())
    if problems:
        return [f"{_counted(problems)} [{error.code}]", *problem_lines(problems)]
    fields = ((name, getattr(error, name)) for name in ("field", "value", "expected", "hint"))
    shown = [f"  {name + ':':<10}{value}" for name, value in fields if value is not None]
    return [f"{error.message} [{error.code}]", *shown]


def problem_lines(problems: Iterable[Any]) -> list[str]:
    """Return ``file:line:column: path: message`` of every configuration problem, and hints."""
    lines = []
    for problem in problems:
        place = ":".join(str(part) for part in (problem.file, problem.line, problem.column) if part)
        lines.append("  " + ": ".join(p for p in (place, problem.path, problem.message) if p))
        if problem.hint:
            lines.append(f"      hint: {problem.hint}")
    return lines


def _counted(problems: tuple[Any, ...]) -> str:
    number = len(problems)
    return f"the configuration has {number} problem{'s' if number > 1 else ''}"
