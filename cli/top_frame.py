"""What ``omni-engine top`` shows of a moment: the engine, its stages, its workers, its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omni_engine.cli.display import clean
from omni_engine.cli.recent import ErrorSeen, Recent
from omni_engine.cli.strip import IDLE, Strip, colour_of, draw
from omni_engine.cli.tables import duration

_MIN_STRIP, _MAX_STRIP = 12, 120
_NAME_CHARS = 20
_LABELS_SHOWN = 8
_ERRORS_SHOWN = 5
_STATE_STYLES = {
    "busy": "green", "ready": "green", "degraded": "yellow", "loading": "yellow",
    "restarting": "yellow", "dead": "red", "down": "red",
}  # fmt: skip


def frame(recent: Recent, span_s: float, width: int, now: float) -> RenderableType:
    """Return everything that is shown.

    Args:
        recent: what the engine told.
        span_s: how many seconds the workers' strips show.
        width: of the terminal, in characters.
        now: seconds, monotonic.
    """
    stages = recent.metrics["stages"]
    parts: list[RenderableType] = [_engine_line(recent), Text(), _stages(stages), Text()]
    workers, labels = _workers(recent, span_s, width)
    parts.append(workers)
    if labels:
        parts += [Text(), _legend(labels)]
    if errors := recent.errors:
        parts += [Text(), _errors(errors, now)]
    return Group(*parts)


def _engine_line(recent: Recent) -> Text:
    metrics = recent.metrics
    requests, outputs = recent.rates
    waiting = sum(stage["waiting"] for stage in metrics["stages"])
    parts = (
        f"up {duration(metrics['uptime_s'])}",
        _counted(metrics["clients"], "client"),
        f"{requests:.1f} requests/s",
        f"{outputs:.1f} images/s",
        f"{waiting} waiting",
    )
    return Text.assemble(("omni-engine", "bold"), "  ", ", ".join(parts))


def _stages(stages: Sequence[Mapping[str, Any]]) -> Table:
    shown = _table("model", "state", "batch", "waiting", "oldest", "running",
                   "done", "failed", "aborted")  # fmt: skip
    for column in shown.columns[2:]:
        column.justify = "right"
    for stage in stages:
        counts, most = stage["requests"], stage["max_num_seqs"]
        shown.add_row(
            _name(stage["name"]),
            _state(stage["state"]),
            "-" if most is None else f"≤{most}",
            str(stage["waiting"]),
            duration(stage["oldest_waiting_s"]) if stage["waiting"] else "-",
            str(stage["running"]),
            *(str(counts[kind]) for kind in ("completed", "failed", "aborted")),
        )
    return shown


def _workers(recent: Recent, span_s: float, width: int) -> tuple[Table, list[str]]:
    """Return the workers' table, and what the colours in it stand for."""
    rows = [(stage, worker) for stage in recent.metrics["stages"] for worker in stage["workers"]]
    names = [clean(worker["worker_id"]) for _, worker in rows]
    taken = min(_NAME_CHARS, max(map(len, [*names, "worker"]))) + 10 + 5 + 6 + 9 + 5 * 2
    strip_width = min(_MAX_STRIP, max(_MIN_STRIP, width - taken - 1))
    shown = _table("worker", "state", "busy", "batch", "adapters", f"last {span_s:g} s")
    for column in shown.columns[2:4]:
        column.justify = "right"
    labels: dict[str, None] = {}
    for stage, worker in rows:
        boxes = list(recent.boxes_of(worker["worker_id"]))
        most = stage["max_num_seqs"] or max((box["requests"] for box in boxes), default=1)
        strip = draw(boxes, recent.now_s, span_s, strip_width, most)
        labels |= dict.fromkeys(cell.label for cell in strip.cells if cell.label is not None)
        shown.add_row(
            _name(worker["worker_id"]),
            _state(worker["state"]),
            f"{strip.busy:.0%}",
            "-" if strip.mean_requests is None else f"{strip.mean_requests:.1f}",
            _held(worker["adapters"]),
            _coloured(strip),
        )
    return shown, list(labels)


def _coloured(strip: Strip) -> Text:
    text = Text(no_wrap=True)
    for cell in strip.cells:
        text.append(cell.character, "dim" if cell.label is None else colour_of(cell.label))
    return text


def _held(adapters: Mapping[str, Any] | None) -> str:
    """Return how many adapters are on the device, of those in memory."""
    if adapters is None:
        return "-"
    return f"{adapters['on_device']} of {adapters['in_memory']}"


def _legend(labels: Sequence[str]) -> Text:
    text = Text("adapters: ")
    for place, label in enumerate(labels[:_LABELS_SHOWN]):
        text.append("  " if place else "")
        text.append("█ ", colour_of(label)).append(clean(label))
    if len(labels) > _LABELS_SHOWN:
        text.append(f"  and {len(labels) - _LABELS_SHOWN} more")
    return text.append(f"   height: requests in a batch   {IDLE} idle", "dim")


def _errors(errors: Sequence[ErrorSeen], now: float) -> Table:
    shown = _table("error", "count", "of", "last")
    shown.columns[1].justify = "right"
    for seen in errors[:_ERRORS_SHOWN]:
        last = "earlier" if seen.at_s is None else f"{duration(max(0.0, now - seen.at_s))} ago"
        where = Text("refused", "dim") if seen.where is None else _name(seen.where)
        shown.add_row(Text(clean(seen.code), "red"), str(seen.count), where, last)
    return shown


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        made.add_column(column, no_wrap=True, overflow="ellipsis")
    return made


def _name(name: str) -> Text:
    text = Text(clean(name), no_wrap=True, overflow="ellipsis")
    text.truncate(_NAME_CHARS, overflow="ellipsis")
    return text


def _state(state: str) -> Text:
    return Text(state, _STATE_STYLES.get(state, ""))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
