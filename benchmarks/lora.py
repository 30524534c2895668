"""Adapter traffic on the bundled model: grouped against fifo, and against mixed batches.

    python benchmarks/lora.py [--adapters 4 16] [--draw uniform cyclic] [--seconds 20] [--rounds 3]

Closed-loop clients, each of which sends its next request when it has its picture, ask an engine
under each policy for pictures under one of so many adapters. `uniform` draws the adapter at random;
`cyclic` gives every request another one than the request before. All engines run beside each other,
idle but for the one that is measured, and take turns over several rounds; medians are shown. Run it
on a machine that does nothing else. The adapters are made up: what they draw takes as long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors import safe_open
from safetensors.numpy import save_file

from omni_engine import AsyncOmniClient, LoRARequest, Omni, OmniDiffusionSamplingParams
from omni_engine.stages.bundled import ADAPTER_DIR

POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"scheduling_policy": "fifo"},
    "grouped": {},
    "mixed": {"mixed_lora": True},
}
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple")


@dataclass(slots=True)
class Measured:
    """What one round under one policy came to.

    Attributes:
        rate: requests per second.
        latencies: seconds, of each request.
        batch: requests per batch, or tick, on average.
        activations: switches per request.
        activation_share: of the worker's busy time.
        processor_ms: of the worker, per request; other load on the machine hardly counts in it.
    """

    rate: float
    latencies: list[float]
    batch: float
    activations: float
    activation_share: float
    processor_ms: float


@dataclass(slots=True)
class Load:
    """The closed-loop clients' orders."""

    names: list[str]
    draw: str
    steps: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def next(self) -> tuple[str, OmniDiffusionSamplingParams]:
        number = next(self.numbers)
        chosen = number % len(self.names) if self.draw == "cyclic" else None
        name = self.rng.choice(self.names) if chosen is None else self.names[chosen]
        params = OmniDiffusionSamplingParams(
            seed=number,
            num_inference_steps=self.steps,
            lora_request=LoRARequest(name, 1.0),
        )
        return f"a {COLOURS[number % len(COLOURS)]} circle on a white background", params


def make_adapters(folder: Path, count: int) -> list[dict[str, str]]:
    """Write made-up adapters with the shapes of a bundled one."""
    source = ADAPTER_DIR / "night.safetensors"
    with safe_open(source, framework="numpy") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    modules = []
    for number in range(count):
        rng = np.random.default_rng(number)
        weights = {
            key: (rng.standard_normal(shape) * 0.02).astype(np.float16)
            for key, shape in shapes.items()
        }
        path = folder / f"style{number}.safetensors"
        save_file(weights, path, metadata)
        modules.append({"name": path.stem, "path": str(path)})
    return modules


async def closed_loop(
    endpoint: str, load: Load, clients: int, seconds: float
) -> tuple[list[float], float]:
    """Let clients ask for pictures; returns the latencies and how long it took, in seconds."""
    latencies: list[float] = []
    async with AsyncOmniClient(endpoint) as client:
        started = time.monotonic()

        async def ask() -> None:
            while time.monotonic() - started < seconds:
                prompt, params = load.next()
                sent = time.monotonic()
                handle = await client.submit(prompt, params)
                (await handle.result()).raise_for_error()
                latencies.append(time.monotonic() - sent)

        await asyncio.gather(*(ask() for _ in range(clients)))
        return latencies, time.monotonic() - started


def counters(omni: Omni) -> dict[str, float]:
    """Return the stage's and its worker's counters, as numbers that grow."""
    (stage,) = omni.status()["stages"]
    (worker,) = stage["workers"]
    sizes, adapters = stage["batch_sizes"], worker["adapters"] or {}
    processor = psutil.Process(worker["pid"]).cpu_times()
    return {
        "batches": sum(sizes.values()),
        "members": sum(int(size) * count for size, count in sizes.items()),
        "busy_ms": worker["busy_s"] * 1000,
        "processor_ms": (processor.user + processor.system) * 1000,
        "activations": adapters.get("activations", 0),
        "activation_ms": adapters.get("activation_ms", 0.0),
    }


def measure(omni: Omni, load: Load, clients: int, seconds: float) -> Measured:
    """Run one round."""
    before = counters(omni)
    latencies, took = asyncio.run(closed_loop(omni.endpoint, load, clients, seconds))
    time.sleep(0.5)  # workers tell their counters now and then
    after = counters(omni)
    grown = {name: after[name] - before[name] for name in after}
    return Measured(
        rate=len(latencies) / took,
        latencies=latencies,
        batch=grown["members"] / max(1, grown["batches"]),
        activations=grown["activations"] / len(latencies),
        activation_share=grown["activation_ms"] / grown["busy_ms"],
        processor_ms=grown["processor_ms"] / len(latencies),
    )


def percentile(latencies: list[float], percent: float) -> float:
    """Return a percentile in milliseconds."""
    return float(np.percentile(latencies, percent)) * 1000


def compare(given: argparse.Namespace, count: int, folder: Path) -> None:
    """Measure every policy at one number of adapters and print a table for each draw."""
    modules = make_adapters(folder, count)
    with contextlib.ExitStack() as stack:
        engines = {
            policy: stack.enter_context(
                Omni(
                    max_num_seqs=given.max_num_seqs,
                    max_loras=max(8, count),
                    lora_modules=modules,
                    step_execution=given.step_execution,
                    devices="cpu",
                    threads=1,
                    **options,
                )
            )
            for policy, options in POLICIES.items()
            if policy in given.policies
        }
        for draw in given.draw:
            rounds: dict[str, list[Measured]] = {policy: [] for policy in engines}
            for number in range(given.rounds + 1):
                for policy, omni in engines.items():
                    load = Load([module["name"] for module in modules], draw, given.steps)
                    seconds = given.seconds if number else min(5.0, given.seconds)
                    measured = measure(omni, load, given.clients, seconds)
                    if number:  # the first warms up
                        rounds[policy].append(measured)
            show(count, draw, rounds)


def show(count: int, draw: str, rounds: dict[str, list[Measured]]) -> None:
    """Print medians over the rounds, and ratios between the policies."""
    print(f"\n{count} adapters, {draw}")
    print(
        "policy    req/s    p50 ms    p95 ms    p99 ms   batch  switches/req  switching  cpu ms/req"
    )
    rates, tails, processor = {}, {}, {}
    for policy, found in rounds.items():
        rates[policy] = statistics.median(one.rate for one in found)
        p50, p95, p99 = (
            statistics.median(percentile(one.latencies, percent) for one in found)
            for percent in (50, 95, 99)
        )
        tails[policy] = p99
        batch, switches, share, processor[policy] = (
            statistics.median(getattr(one, name) for one in found)
            for name in ("batch", "activations", "activation_share", "processor_ms")
        )
        print(
            f"{policy:8s} {rates[policy]:6.2f}  {p50:8.0f}  {p95:8.0f}  {p99:8.0f}  {batch:6.2f}"
            f"  {switches:12.3f}  {share:9.2%}  {processor[policy]:10.0f}"
        )
    for one, other in (("grouped", "fifo"), ("mixed", "grouped")):
        if one in rates and other in rates:
            print(
                f"{one} / {other}: {rates[one] / rates[other]:.2f} req/s, "
                f"{tails[one] / tails[other]:.2f} p99, "
                f"{processor[other] / processor[one]:.2f} per processor second"
            )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--draw", nargs="+", choices=("uniform", "cyclic"), default=["uniform"])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--step-execution", action="store_true")
    given = parser.parse_args()
    for count in given.adapters:
        with tempfile.TemporaryDirectory() as folder:
            compare(given, count, Path(folder))


if __name__ == "__main__":
    main()
