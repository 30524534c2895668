"""``omni-engine status`` and ``omni-engine models``: what a running engine does and serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_engine.cli import health
from omni_engine.cli.connecting import AUTO, KeyOptions, connected
from omni_engine.cli.display import console, print_json
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import AsJson, Connect
from omni_engine.cli.tables import (
    DIGEST_CHARS,
    ERROR,
    NOTHING,
    duration,
    megabytes,
    pairs,
    print_rows,
)

if TYPE_CHECKING:
    from rich.console import Console

_Rows = tuple[str, Sequence[str], Sequence[Sequence[object]]]
"""A table's title, columns and rows."""

_ADAPTERS_BRIEF = ("name", "state", "digest (SHA-256)", "default scale")
_ADAPTERS_SHOWN = 20
_STEP_COLUMNS = ("ticks", "mean tick", "requests a tick")

_STATUS_HELP = "Show a running engine: stages, queues, batch sizes, workers and adapters."
_STATUS_EPILOG = """
[bold]Examples[/bold]
  omni-engine status
  omni-engine status --connect tcp://127.0.0.1:5570
  omni-engine status --json
  omni-engine status --check

With --check nothing but the health is printed, after 3.5 seconds of waiting at
most; exit code 0 if the engine is healthy, 1 if it is not, is still starting,
is stopping, or does not answer.
"""

_MODELS_HELP = "List the models that a running engine serves, their state and their adapters."
_MODELS_EPILOG = """
[bold]Examples[/bold]
  omni-engine models
  omni-engine models --connect tcp://127.0.0.1:5570 --json
"""


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("status", help=_STATUS_HELP, epilog=_STATUS_EPILOG)(status)
    app.command("models", help=_MODELS_HELP, epilog=_MODELS_EPILOG)(models)


@expand_options
def status(
    connect: Connect = AUTO,
    as_json: AsJson = False,
    check: Annotated[
        bool,
        typer.Option("--check", metavar="", help="Tell by the exit code whether it is healthy."),
    ] = False,
    *,
    keys: KeyOptions,
) -> None:
    """Print a running engine's state."""
    if check:
        health.check(connect, keys, as_json=as_json)
    with connected(connect, keys) as client:
        found = client.status()
    if as_json:
        print_json(found)
        return
    print_status(found, console())


def print_status(found: Mapping[str, Any], output: Console) -> None:
    """Print what ``OmniClient.status`` returns; tables that are too wide become blocks of lines."""
    output.print(_engine(found))
    for stage in found["stages"]:
        output.print(_stage(stage))
        print_rows(output, *_workers(stage))
        for title, rows in health.tables(stage):
            output.print(pairs(title, rows))
        print_rows(output, *_groups(stage))
        print_rows(output, *_adapters(stage), brief=_ADAPTERS_BRIEF)
        print_rows(output, *_adapters_held(stage))


@expand_options
def models(connect: Connect = AUTO, as_json: AsJson = False, *, keys: KeyOptions) -> None:
    """Print the served models."""
    with connected(connect, keys) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    rows = [
        (model["name"], model["state"], _names(model["adapters"]), _message(model))
        for model in found
    ]
    print_rows(console(), "models", ("name", "state", "adapters", "error"), rows)


def _names(adapters: Sequence[str]) -> str:
    more = len(adapters) - _ADAPTERS_SHOWN
    shown = ", ".join(adapters[:_ADAPTERS_SHOWN]) or "-"
    return f"{shown} and {more} more" if more > 0 else shown


def _engine(found: Mapping[str, Any]) -> Any:
    rows = {
        "endpoint": found["endpoint"],
        "version": f"{found['version']} (protocol {found['protocol']})",
        "process": found["pid"],
        "up for": duration(found["uptime_s"]),
        "clients": found["clients"],
        "refused": f"{found['rejected']} messages and requests",
        "state": "stopping" if found["stopping"] else "running",
        **health.rows(found.get("health")),
    }
    return pairs("engine", rows)


def _stage(stage: Mapping[str, Any]) -> Any:
    counts = stage["requests"]
    rows = {
        "model": stage["model"],
        "state": stage["state"],
        "error": (stage["error"] or {}).get("message"),
        "pipeline": stage["pipeline"] or "not loaded yet",
        "batching": stage["batching"] or "not known yet",
        "mode": "step execution: requests join and leave between steps"
        if stage["step_execution"]
        else "whole batches",
        "deterministic": "yes: every forward is padded to one size"
        if stage["deterministic"]
        else "no",
        "samplers": _samplers(stage),
        "capacity": _capacity(stage),
        "adapters": _adapter_settings(stage),
        "requests": f"{stage['waiting']} waiting, {stage['running']} running, "
        + ", ".join(f"{counts[kind]} {kind}" for kind in ("completed", "failed", "aborted")),
        "ticks by size" if stage["step_execution"] else "batch sizes": batch_sizes(
            stage["batch_sizes"]
        )
        or "none yet",
    }
    return pairs(f"stage {stage['stage_id']}: {stage['name']}", rows)


def _capacity(stage: Mapping[str, Any]) -> str:
    most = stage["effective_max_num_seqs"] or stage["max_num_seqs"]
    policy = stage["scheduling_policy"]
    if stage["step_execution"]:
        return f"{most} requests a tick, policy {policy}"
    wait_ms = stage["request_batch_max_wait_ms"]
    return f"{most} requests a batch, policy {policy}, admission wait {wait_ms:g} ms"


def _adapter_settings(stage: Mapping[str, Any]) -> str | None:
    """Return how adapters are kept and applied; None where there are none."""
    capabilities = stage["capabilities"]
    if not stage["adapters"] or capabilities is None or not capabilities["supports_lora"]:
        return None
    parts = [f"up to {stage['max_loras']} on a device, {stage['max_cpu_loras']} in host memory"]
    if (mixed := stage["effective_mixed_adapters"]) is not None:
        parts.append(f"up to {mixed} different in a forward")
    elif stage["mixed_lora"]:
        parts.append("mixed_lora has no effect")
    if stage["lora_merge"] != "off":
        parts.append("merged where one has a worker for itself")
    return "; ".join([*parts, *filter(None, [stage["adapters_note"]])])


def _samplers(stage: Mapping[str, Any]) -> str | None:
    """Return the names that requests may use; None while the model is not loaded."""
    if stage["capabilities"] is None:
        return None
    names: list[str] = sorted(stage["capabilities"]["samplers"])
    return ", ".join(names) or "the model's own only"


def _workers(stage: Mapping[str, Any]) -> _Rows:
    stepped = stage["step_execution"]
    columns = ("worker", "device", "state", "process",
               *(_STEP_COLUMNS if stepped else ("batches",)),
               "requests", "busy", "restarts", "loaded in", "weights", "error")  # fmt: skip
    rows = []
    for worker in stage["workers"]:
        load_ms, weights = worker["load_ms"], worker["parameter_bytes"]
        row = (
            worker["worker_id"], worker["device"], health.state_of(worker),
            worker["pid"] or NOTHING,
            *(_steps(worker) if stepped else (worker["batches"],)),
            worker["requests"], duration(worker["busy_s"]), worker["restarts"],
            "-" if load_ms is None else duration(load_ms / 1000),
            "-" if weights is None else megabytes(weights),
            _message(worker),
        )  # fmt: skip
        rows.append(row)
    return f"workers of {stage['name']}", columns, rows


def _steps(worker: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what stands under ``_STEP_COLUMNS``."""
    if not worker["ticks"]:
        return "0", "-", "-"
    return (
        str(worker["ticks"]),
        f"{worker['mean_tick_ms']:.1f} ms",
        f"{worker['mean_requests_per_tick']:.1f}",
    )


def _groups(stage: Mapping[str, Any]) -> _Rows:
    columns = ("worker", "group", "size", "adapters", "requests", "steps done")
    rows = []
    for worker in stage["workers"] if stage["step_execution"] else ():
        for group in worker["groups"]:
            members = group["requests"]
            names = ", ".join(f"{a['name']}:{a['scale']:g}" for a in group["adapters"])
            steps = ", ".join(f"{m['step_index']}/{m['num_steps'] or '?'}" for m in members)
            row = (worker["worker_id"], group["group_id"], _size(group), names or "-", len(members),
                   steps or "-")  # fmt: skip
            rows.append(row)
    return f"resident groups of {stage['name']}", columns, rows


def _size(group: Mapping[str, Any]) -> str:
    """Return height x width of a group's pictures, and the frames of its videos."""
    height, width, frames = (group[name] for name in ("height", "width", "num_frames"))
    parts = [] if height is None or width is None else [f"{height} x {width}"]
    parts += [] if frames is None else [f"{frames} frames"]
    return ", ".join(parts) or "-"


def _adapters(stage: Mapping[str, Any]) -> _Rows:
    columns = (*_ADAPTERS_BRIEF, "file", ERROR)
    adapters = stage["adapters"]
    rows = [
        (adapter["name"], adapter["state"], (adapter["digest"] or "-")[:DIGEST_CHARS],
         f"{adapter['default_scale']:g}", adapter["path"], _message(adapter))
        for adapter in adapters[:_ADAPTERS_SHOWN]
    ]  # fmt: skip
    title = f"adapters of {stage['name']}"
    if len(adapters) > len(rows):
        title += f", {len(rows)} of {len(adapters)}: `omni-engine loras` lists all"
    return title, columns, rows


def _adapters_held(stage: Mapping[str, Any]) -> _Rows:
    columns = ("worker", "on the device", "in host memory", "hits", "loads", "evictions",
               "switches", "waits")  # fmt: skip
    held = [(worker["worker_id"], worker["adapters"]) for worker in stage["workers"]]
    rows = [
        (worker_id, _counted(a["device"], a["device_bytes"]), _counted(a["host"], a["host_bytes"]),
         f"{_percent(a['device_hit_rate'])} device, {_percent(a['memory_hit_rate'])} memory",
         f"{a['loads']} in {duration(a['load_ms'] / 1000)}", a["evictions"],
         f"{a['activations']} in {a['activation_ms']:.1f} ms", f"{a['wait_ms']:.0f} ms")
        for worker_id, a in held
        if a is not None
    ]  # fmt: skip
    return f"adapters in the workers of {stage['name']}", columns, rows


def _counted(number: int, num_bytes: int) -> str:
    return f"{number} ({megabytes(num_bytes)})"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


def _message(described: Mapping[str, Any]) -> str:
    error = described["error"]
    return NOTHING if error is None else str(error["message"])


def batch_sizes(counts: Mapping[str, int]) -> str:
    """Return how many batches of each size ran, in words."""
    return ", ".join(f"{counts[size]} of {size}" for size in sorted(counts, key=int))
