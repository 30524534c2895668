"""Tables of what a running engine tells, and quantities for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omni_engine.cli.display import clean, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DIGEST_CHARS = 16
"""Characters of a digest that are shown: enough to tell contents apart."""

ERROR = "error"
"""The column of what is wrong with a row; the ``brief`` columns go without it."""

NOTHING = "-"
"""Stands where there is nothing to say."""

_MEASURING_WIDTH = 10_000
"""Columns in which every table finds room; rich measures no wider than it may print."""


def print_rows(
    output: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    brief: Sequence[str] = (),
) -> None:
    """Print a table, or one block of lines for each row where the table is too wide.

    Args:
        output: where to.
        title: stands above.
        columns: their names; what stands in the first one tells rows apart.
        rows: what stands in the columns.
        brief: columns that do where there is no room for all; errors follow the table then.
    """
    if not rows or _print_if_it_fits(output, title, columns, rows):
        return
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    shortened = [[row[name] for name in brief] for row in named]
    if brief and _print_if_it_fits(output, title, brief, shortened):
        errors = {clean(row[columns[0]]): row[ERROR] for row in named if row[ERROR] != NOTHING}
        if errors:
            output.print(pairs(f"errors of {title}", errors))
        return
    for row in named:
        output.print(pairs(title, row))


def _print_if_it_fits(
    output: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> bool:
    """Print a table unless it is too wide; return whether it was printed."""
    shown = table(clean(title), *columns)
    for row in rows:
        shown.add_row(*map(clean, row))
    unlimited = output.options.update(width=_MEASURING_WIDTH)
    if output.measure(shown, options=unlimited).maximum > output.width:
        return False
    output.print(shown)
    return True


def pairs(title: str, rows: Mapping[str, object]) -> Table:
    """Return a table of names and values; what is None is left out."""
    shown = table(clean(title), "", "")
    shown.show_header = False
    shown.columns[0].no_wrap = True
    for name, value in rows.items():
        if value is not None:
            shown.add_row(name, clean(value))
    return shown


def duration(seconds: float) -> str:
    """Return a duration for people: ``0.53 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def megabytes(num_bytes: int) -> str:
    """Return a size in memory for people: ``0.3 MB``."""
    return f"{num_bytes / 1e6:.1f} MB"
