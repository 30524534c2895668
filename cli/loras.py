"""``omni-engine loras``: the adapters of a running engine, listed, loaded, unloaded and pinned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omni_engine.cli.connecting import AUTO, KeyOptions, connected, keys_on_command_line
from omni_engine.cli.display import console, print_json, print_line
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import AsJson, Connect
from omni_engine.cli.tables import (
    DIGEST_CHARS,
    ERROR,
    NOTHING,
    duration,
    megabytes,
    print_rows,
)
from omni_engine.protocol.errors import ConfigError

if TYPE_CHECKING:
    from omni_engine.protocol.adapters import AdapterReport
    from omni_engine.protocol.lora_info import LoRAInfo

_HELP = """
List a running engine's adapters, load and unload some, pin them to the devices.

Without a command it lists them; in a narrow terminal shortened, with --json
everything.
"""
_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras
  omni-engine loras list --json
  omni-engine loras load sketch sketch.safetensors --scale 0.8 --pin
  omni-engine loras unload sketch
"""
_LIST_HELP = "List the adapters: state, content, use, and which workers hold them."
_LIST_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras list
  omni-engine loras list --model bundled --json
"""
_LOAD_HELP = """
Register an adapter; returns when a worker has checked its file.

The file must lie in one of the engine's lora_dirs. PATH is looked for in
these folders; one that starts with "/", "./", "../" or "~" is where it says.
"""
_LOAD_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras load sketch sketch.safetensors
  omni-engine loras load sketch ./adapters/sketch-2.safetensors --replace --scale 0.8
  omni-engine loras load outline bundled:outline --preload --pin
"""
_UNLOAD_HELP = """
Unregister an adapter.

New requests that name it are refused from now on; those that wait and run end
as they were asked.
"""
_UNLOAD_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras unload sketch
"""
_PIN_HELP = "Never evict an adapter from a device again, whatever else is asked for."
_PIN_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras pin sketch
"""
_UNPIN_HELP = "Let an adapter leave the devices again when room is needed."
_UNPIN_EPILOG = """
[bold]Examples[/bold]
  omni-engine loras unpin sketch
"""

_COLUMNS = ("name", "state", "scale", "content", "memory", "requests", "in use", "last used",
            "held by", "pinned", "digest (SHA-256)", ERROR)  # fmt: skip
_BRIEF = ("name", "state", "scale", "requests", "last used", "pinned")

Name = Annotated[str, typer.Argument(metavar="NAME", help="What requests call the adapter.")]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="A served model's name. Default: the engine's first."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    loras = typer.Typer(invoke_without_command=True)
    loras.callback(help=_HELP, epilog=_EPILOG)(loras_or_list)
    loras.command("list", help=_LIST_HELP, epilog=_LIST_EPILOG)(list_loras)
    loras.command("load", help=_LOAD_HELP, epilog=_LOAD_EPILOG)(load)
    loras.command("unload", help=_UNLOAD_HELP, epilog=_UNLOAD_EPILOG)(unload)
    loras.command("pin", help=_PIN_HELP, epilog=_PIN_EPILOG)(pin)
    loras.command("unpin", help=_UNPIN_HELP, epilog=_UNPIN_EPILOG)(unpin)
    app.add_typer(loras, name="loras")


@expand_options
def loras_or_list(
    context: typer.Context,
    connect: Connect = AUTO,
    model: Model = None,
    as_json: AsJson = False,
    *,
    keys: KeyOptions,
) -> None:
    """List the adapters unless a command follows."""
    if context.invoked_subcommand is None:
        _print_list(connect, keys, model, as_json)
    elif connect != AUTO or model is not None or as_json or keys_on_command_line(context):
        raise ConfigError(
            f"options of `loras {context.invoked_subcommand}` stand after it",
            hint=f"Write `omni-engine loras {context.invoked_subcommand} ... --connect ADDRESS`.",
        )


@expand_options
def list_loras(
    connect: Connect = AUTO, model: Model = None, as_json: AsJson = False, *, keys: KeyOptions
) -> None:
    """Print the registered adapters."""
    _print_list(connect, keys, model, as_json)


def _print_list(connect: str, keys: KeyOptions, model: str | None, as_json: bool) -> None:
    with connected(connect, keys) as client:
        found = client.loras(model)
    if as_json:
        print_json([info.to_wire() for info in found])
    elif found:
        rows = [_row(info) for info in found]
        print_rows(console(), f"adapters of {found[0].model}", _COLUMNS, rows, _BRIEF)
    else:
        print_line("no adapters are registered")


@expand_options
def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A safetensors file, a folder with one, or "
                       "bundled:NAME."),
    ],
    scale: Annotated[
        float,
        typer.Option("--scale", metavar="SCALE", help="Strength of requests that give none."),
    ] = 1.0,
    preload: Annotated[
        bool, typer.Option("--preload", metavar="", help="Load it on every worker now.")
    ] = False,
    pinned: Annotated[
        bool, typer.Option("--pin", metavar="", help="Never evict it from a device.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="NAME may be in use; its requests so far "
                           "keep the old content.")
    ] = False,
    connect: Connect = AUTO,
    model: Model = None,
    as_json: AsJson = False,
    *,
    keys: KeyOptions,
) -> None:  # fmt: skip
    """Register an adapter."""
    with connected(connect, keys) as client:
        info = client.load_lora(
            name, _as_the_engine_finds_it(path), default_scale=scale, preload=preload, pin=pinned,
            replace=replace, model=model,
        )  # fmt: skip
    held = "" if info.report is None else f": {_content(info.report)}, {_memory(info.report)}"
    _print_result(info, f"{info.name} is {info.state}{held}", as_json)


@expand_options
def unload(
    name: Name,
    connect: Connect = AUTO,
    model: Model = None,
    as_json: AsJson = False,
    *,
    keys: KeyOptions,
) -> None:
    """Unregister an adapter."""
    with connected(connect, keys) as client:
        info = client.unload_lora(name, model=model)
    left = f"{info.requests.waiting} waiting and {info.requests.running} running requests use it"
    _print_result(info, f"{info.name} is unloaded; {left} to their end", as_json)


@expand_options
def pin(
    name: Name,
    connect: Connect = AUTO,
    model: Model = None,
    as_json: AsJson = False,
    *,
    keys: KeyOptions,
) -> None:
    """Never evict an adapter."""
    with connected(connect, keys) as client:
        info = client.pin_lora(name, model=model)
    _print_result(info, f"{info.name} is pinned", as_json)


@expand_options
def unpin(
    name: Name,
    connect: Connect = AUTO,
    model: Model = None,
    as_json: AsJson = False,
    *,
    keys: KeyOptions,
) -> None:
    """Let an adapter be evicted."""
    with connected(connect, keys) as client:
        info = client.pin_lora(name, False, model=model)
    _print_result(info, f"{info.name} is not pinned any more", as_json)


def _as_the_engine_finds_it(path: str) -> str:
    """Return a path of this working directory as an absolute one, others as they are."""
    if path in (".", "..", "~") or path.startswith(("./", "../", "~/")):
        return os.path.abspath(os.path.expanduser(path))
    return path


def _print_result(info: LoRAInfo, line: str, as_json: bool) -> None:
    if as_json:
        print_json(info.to_wire())
    else:
        print_line(line)


def _row(info: LoRAInfo) -> Sequence[Any]:
    requests = info.requests
    return (
        info.name,
        info.state,
        f"{info.default_scale:g}",
        NOTHING if info.report is None else _content(info.report),
        NOTHING if info.report is None else _memory(info.report),
        requests.total,
        f"{requests.waiting} waiting, {requests.running} running",
        "never" if info.last_used_s is None else f"{duration(info.last_used_s)} ago",
        _holders(info),
        "yes" if info.pin else "no",
        NOTHING if info.digest is None else info.digest[:DIGEST_CHARS],
        NOTHING if info.error is None else info.error.message,
    )


def _content(report: AdapterReport) -> str:
    """Return what an adapter changes: ``60 layers of transformer, rank 4 to 8, peft``."""
    counts = ", ".join(f"{count} layers of {name}" for name, count in sorted(report.layers.items()))
    low, high = min(report.ranks), max(report.ranks)
    ranks = f"rank {low}" if low == high else f"rank {low} to {high}"
    return f"{counts}, {ranks}, {report.format}"


def _memory(report: AdapterReport) -> str:
    return megabytes(report.num_bytes)


def _holders(info: LoRAInfo) -> str:
    """Return who has an adapter in memory: ``stage0-worker0 (device, host)``."""
    held = []
    for holder in info.held:
        tiers = [*["device"] * holder.device, *["host"] * holder.host]
        held.append(f"{holder.worker} ({', '.join(tiers)})")
    return ", ".join(held) or "nobody"
