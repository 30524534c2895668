"""``omni-engine status`` and ``omni-engine models``: what a running engine does and serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from omni_engine.cli.connecting import AUTO, connected
from omni_engine.cli.display import clean, console, print_json, table
from omni_engine.cli.options import AsJson, Connect

_DIGEST_CHARS = 16
_STEP_COLUMNS = ("ticks", "mean tick", "requests a tick")

_STATUS_HELP = "Show a running engine: stages, queues, batch sizes, workers and adapters."
_STATUS_EPILOG = """
[bold]Examples[/bold]
  omni-engine status
  omni-engine status --connect tcp://127.0.0.1:5570
  omni-engine status --json
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


def status(connect: Connect = AUTO, as_json: AsJson = False) -> None:
    """Print a running engine's state."""
    with connected(connect) as client:
        found = client.status()
    if as_json:
        print_json(found)
        return
    output = console()
    for shown in (_engine(found), *_stages(found["stages"])):
        output.print(shown)


def models(connect: Connect = AUTO, as_json: AsJson = False) -> None:
    """Print the served models."""
    with connected(connect) as client:
        found = client.models()
    if as_json:
        print_json(found)
        return
    shown = table("models", "name", "state", "adapters", "error")
    for model in found:
        error = (model["error"] or {}).get("message", "-")
        adapters = ", ".join(model["adapters"]) or "-"
        shown.add_row(*map(clean, (model["name"], model["state"], adapters, error)))
    console().print(shown)


def _engine(found: Mapping[str, Any]) -> Any:
    rows = {
        "endpoint": found["endpoint"],
        "version": f"{found['version']} (protocol {found['protocol']})",
        "process": found["pid"],
        "up for": duration(found["uptime_s"]),
        "clients": found["clients"],
        "refused": f"{found['rejected']} messages and requests",
        "state": "stopping" if found["stopping"] else "running",
    }
    return _pairs("engine", rows)


def _stages(stages: Sequence[Mapping[str, Any]]) -> list[Any]:
    shown = []
    for stage in stages:
        shown += [_stage(stage), _workers(stage)]
        if stage["step_execution"]:
            shown.append(_groups(stage))
        if stage["adapters"]:
            shown.append(_adapters(stage))
    return shown


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
        "capacity": _capacity(stage),
        "requests": f"{stage['waiting']} waiting, {stage['running']} running, "
        + ", ".join(f"{counts[kind]} {kind}" for kind in ("completed", "failed", "aborted")),
        "ticks by size" if stage["step_execution"] else "batch sizes": batch_sizes(
            stage["batch_sizes"]
        )
        or "none yet",
    }
    return _pairs(f"stage {stage['stage_id']}: {stage['name']}", rows)


def _capacity(stage: Mapping[str, Any]) -> str:
    most = stage["effective_max_num_seqs"] or stage["max_num_seqs"]
    policy = stage["scheduling_policy"]
    if stage["step_execution"]:
        return f"{most} requests a tick, policy {policy}"
    wait_ms = stage["request_batch_max_wait_ms"]
    return f"{most} requests a batch, policy {policy}, admission wait {wait_ms:g} ms"


def _workers(stage: Mapping[str, Any]) -> Any:
    stepped = stage["step_execution"]
    columns = ("worker", "device", "state", "process",
               *(_STEP_COLUMNS if stepped else ("batches",)),
               "requests", "busy", "loaded in", "weights", "error")  # fmt: skip
    shown = table(f"workers of {clean(stage['name'])}", *columns)
    for worker in stage["workers"]:
        load_ms, weights = worker["load_ms"], worker["parameter_bytes"]
        row = (
            worker["worker_id"], worker["device"], worker["state"], worker["pid"],
            *(_steps(worker) if stepped else (worker["batches"],)),
            worker["requests"], duration(worker["busy_s"]),
            "-" if load_ms is None else duration(load_ms / 1000),
            "-" if weights is None else f"{weights / 1e6:.1f} MB",
            (worker["error"] or {}).get("message", "-"),
        )  # fmt: skip
        shown.add_row(*map(clean, row))
    return shown


def _steps(worker: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what stands under ``_STEP_COLUMNS``."""
    if not worker["ticks"]:
        return "0", "-", "-"
    return (
        str(worker["ticks"]),
        f"{worker['mean_tick_ms']:.1f} ms",
        f"{worker['mean_requests_per_tick']:.1f}",
    )


def _groups(stage: Mapping[str, Any]) -> Any:
    shown = table(f"resident groups of {clean(stage['name'])}",
                  "worker", "group", "adapter", "requests", "steps done")  # fmt: skip
    for worker in stage["workers"]:
        for group in worker["groups"]:
            adapter, members = group["adapter"], group["requests"]
            name = "-" if adapter is None else f"{adapter['name']}:{adapter['scale']:g}"
            steps = ", ".join(f"{m['step_index']}/{m['num_steps'] or '?'}" for m in members)
            row = (worker["worker_id"], group["group_id"], name, len(members), steps or "-")
            shown.add_row(*map(clean, row))
    return shown


def _adapters(stage: Mapping[str, Any]) -> Any:
    shown = table(f"adapters of {clean(stage['name'])}",
                  "name", "digest (SHA-256)", "default scale", "file", "error")  # fmt: skip
    for adapter in stage["adapters"]:
        row = (adapter["name"], adapter["digest"][:_DIGEST_CHARS], f"{adapter['default_scale']:g}",
               adapter["path"], adapter["error"] or "-")  # fmt: skip
        shown.add_row(*map(clean, row))
    return shown


def _pairs(title: str, rows: Mapping[str, object]) -> Any:
    shown = table(clean(title), "", "")
    shown.show_header = False
    for name, value in rows.items():
        if value is not None:
            shown.add_row(name, clean(value))
    return shown


def batch_sizes(counts: Mapping[str, int]) -> str:
    """Return how many batches of each size ran, in words."""
    return ", ".join(f"{counts[size]} of {size}" for size in sorted(counts, key=int))


def duration(seconds: float) -> str:
    """Return a duration for people: ``0.53 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
