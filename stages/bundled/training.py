"""What every training loop here shares: the rate's schedule, checkpoints and progress lines."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECKPOINT_SECONDS = 180.0
PROGRESS_SECONDS = 20.0


def learning_rate(step: int, steps: int, peak: float, warm_up: int, floor: float) -> float:
    """Gives the rate at a step: linear warm-up to the peak, then a cosine to floor·peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def step_generator(seed: int, step: int) -> torch.Generator:
    """Gives a step's own random source, so that a resumed run draws what an unbroken one would."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


@dataclass
class TrainingState:
    """A training's networks and optimizer, saved to and restored from one safetensors file.

    Attributes:
        networks: What is trained or averaged, by name.
        optimizer: The optimizer of the trained ones.
        path: The file.
        step: How many steps have been made.
        about: Saved with it, for whoever checks that a checkpoint is the right one.
    """

    networks: Mapping[str, nn.Module]
    optimizer: torch.optim.Optimizer
    path: Path
    step: int = 0
    about: Mapping[str, str] = field(default_factory=dict)
    _saved_at: float = field(default_factory=time.monotonic)

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def restore(self) -> None:
        """Loads the checkpoint, if there is one."""
        if not self.path.exists():
            return
        tensors, metadata = load_tensors(self.path)
        for name, network in self.networks.items():
            network.load_state_dict(_below(f"network.{name}.", tensors))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in _below("optimizer.", tensors).items():
            index, moment = key.split(".", 1)
            moments.setdefault(int(index), {})[moment] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.step = int(metadata["step"])

    def save(self) -> None:
        """Writes the checkpoint in one atomic replacement."""
        tensors = {
            f"network.{name}.{key}": tensor
            for name, network in self.networks.items()
            for key, tensor in network.state_dict().items()
        }
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{key}": value for key, value in moments.items()}
        save_tensors(self.path, tensors, {**self.about, "step": str(self.step)})
        self._saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """Writes the checkpoint when the last one is some minutes old."""
        if time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS:
            self.save()


class Progress:
    """Prints a line with the running loss and the time left: at first, every so often, at last."""

    def __init__(
        self, name: str, start: int, steps: int, every_seconds: float = PROGRESS_SECONDS
    ) -> None:
        self._name, self._start, self._steps = name, start, steps
        self._every_seconds = every_seconds
        self._begun, self._printed = time.monotonic(), -math.inf
        self._running: dict[str, float] = {}

    def update(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes the figures of step number `step` (from 1) into the running means."""
        for key, value in figures.items():
            self._running[key] = 0.98 * self._running.get(key, value) + 0.02 * value
        now = time.monotonic()
        if now - self._printed < self._every_seconds and step < self._steps:
            return
        self._printed = now
        seconds = (now - self._begun) / (step - self._start)
        shown = " ".join(f"{key} {value:.4f}" for key, value in self._running.items())
        left = seconds * (self._steps - step) / 60
        print(
            f"{self._name} step {step}/{self._steps} {shown} "
            f"{seconds:.2f} s/step {left:.1f} min left",
            flush=True,
        )


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes tensors and metadata to a safetensors file, never leaving half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file({key: value.contiguous() for key, value in tensors.items()}, partial, metadata)
        partial.chmod(0o644)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads a safetensors file and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def load_metadata(path: Path) -> dict[str, str]:
    """Reads a safetensors file's metadata alone."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file, never leaving half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
