"""Which devices this machine has, found without importing torch."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A worker's device.

    Attributes:
        name: as configured, such as "cuda:1".
        torch_name: as the worker sees it; with one device visible that is "cuda:0".
        environment: variables that make only this device visible.
    """

    name: str
    torch_name: str
    environment: dict[str, str] = field(default_factory=dict)


def available_devices(
    environment: Mapping[str, str] = os.environ, dev: Path = Path("/dev")
) -> list[str]:
    """Return this machine's accelerators; empty if there are none.

    Args:
        environment: ``CUDA_VISIBLE_DEVICES`` restricts what counts.
        dev: where device nodes are.
    """
    nodes = [p.name for p in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    count = len(nodes)
    if nodes and _VISIBLE in environment:
        count = len(_visible(environment))
    if count:
        return [f"cuda:{index}" for index in range(count)]
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    return ["mps"] if apple else []


def worker_device(name: str, environment: Mapping[str, str] = os.environ) -> WorkerDevice:
    """Return how a worker reaches a device: only its own CUDA device is visible to it."""
    if not name.startswith("cuda:"):
        hidden = {_VISIBLE: ""} if name == "cpu" else {}
        return WorkerDevice(name, name, hidden)
    index = int(name.removeprefix("cuda:"))
    visible = _visible(environment)
    chosen = visible[index] if index < len(visible) else str(index)
    return WorkerDevice(name, "cuda:0", {_VISIBLE: chosen})


def _visible(environment: Mapping[str, str]) -> list[str]:
    return [part.strip() for part in environment.get(_VISIBLE, "").split(",") if part.strip()]
