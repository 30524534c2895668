"""What ``generate`` tells at its end: every file, every error, in the order of the prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from omni_engine.cli.display import print_error, print_json, print_line
from omni_engine.cli.generation import Item
from omni_engine.protocol.outputs import OutputMetrics


def print_report(items: Sequence[Item], wall_s: float, *, as_json: bool) -> None:
    """Print the result; errors go to standard error, in JSON to the result, too.

    Args:
        items: what became of every prompt.
        wall_s: seconds from submitting to the last answer.
        as_json: print JSON instead of lines.
    """
    if as_json:
        print_json({"wall_s": wall_s, "results": [_as_json(item) for item in items]})
    for item in items:
        if not as_json:
            _print_files(item)
        if item.error is not None:
            print_error(item.error, about=f'prompt {item.number} "{item.prompt}"')
    pictures = sum(len(item.files) for item in items)
    if pictures and not as_json:
        print_line(f"{pictures} picture{'s' if pictures > 1 else ''} in {wall_s:.2f} s, "
                   f"{wall_s / pictures:.2f} s per picture")  # fmt: skip


def seconds_per_picture(metrics: OutputMetrics, pictures: int) -> float:
    """Return a request's share of its batch's time, per picture."""
    return metrics.run_ms / 1000 / max(1, metrics.max_batch_size) / max(1, pictures)


def _print_files(item: Item) -> None:
    if item.output is None or item.output.seed is None:
        return
    metrics = item.output.metrics
    each_s = seconds_per_picture(metrics, len(item.files))
    loras = "".join(f"  lora {lora.name}:{lora.scale:g}" for lora in item.output.applied_loras)
    for index, path in enumerate(item.files):
        print_line(f"{path}  seed {item.output.seed + index}  batch of {metrics.max_batch_size}"
                   f"  {each_s:.3f} s per picture{loras}")  # fmt: skip


def _as_json(item: Item) -> dict[str, Any]:
    output, seed = item.output, None if item.output is None else item.output.seed
    files = enumerate(item.files)
    return {
        "prompt": item.prompt,
        "status": _status(item),
        "seed": seed,
        "files": [{"path": str(path), "seed": (seed or 0) + index} for index, path in files],
        "error": None if item.error is None else item.error.to_wire(),
        "applied_loras": [dataclasses.asdict(lora) for lora in output.applied_loras]
        if output else [],
        "metrics": None if output is None else dataclasses.asdict(output.metrics),
    }  # fmt: skip


def _status(item: Item) -> str:
    if item.output is not None and item.output.aborted:
        return "aborted"
    return "completed" if item.error is None else "failed"
