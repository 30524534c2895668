"""Whether encoding pictures for HTTP delays denoising steps.

    python benchmarks/encoding.py [--pictures 16] [--rounds 7] [--format png]

One engine serves two models: the bundled one, which denoises without an end, and one that makes a
1024 x 1024 picture at once. The time from one tick of the first to the next is taken from the
engine's own timeline, while nothing else happens and while the gateway encodes pictures of the
second that clients fetch over HTTP. Medians of interleaved rounds; run it on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from omni_engine import OmniClient, OmniDiffusionSamplingParams

STAGES = """
stage_args:
  - stage_id: 0
    name: ticker
    engine_args: {model: bundled, step_execution: true}
    runtime: {devices: cpu, threads: 1}
  - stage_id: 1
    name: painter
    engine_args: {model: bundled, pipeline: "noise_pipeline:NoisePipeline"}
    runtime: {devices: cpu, threads: 1}
"""
IDLE_S = 3.0
NO_END = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=1000, seed=1)


def ticks_in(client: OmniClient, since: int | None) -> tuple[list[float], int]:
    """Return when the ticker's ticks ended, in seconds, and where to go on."""
    ends: list[float] = []
    while True:
        told = client.timeline(since)
        ends += [box["end_s"] for box in told["boxes"] if box["stage"] == "ticker"]
        if told["next"] == since or not told["boxes"]:
            return ends, told["next"]
        since = told["next"]


def intervals_ms(ends: list[float]) -> list[float]:
    return [(after - before) * 1000 for before, after in itertools.pairwise(ends)]


def fetch(url: str, output_format: str) -> int:
    body = json.dumps({"prompt": "noise", "model": "painter", "output_format": output_format})
    request = urllib.request.Request(
        f"{url}/v1/images/generations", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return len(response.read())


def measure(client: OmniClient, url: str, pictures: int, rounds: int, output_format: str) -> None:
    idle: list[float] = []
    busy: list[float] = []
    took: list[float] = []
    fetch(url, output_format)
    with concurrent.futures.ThreadPoolExecutor(pictures) as clients:
        for _ in range(rounds):
            ticker = client.submit("a red circle on a white background", NO_END, model="ticker")
            next(event for event in ticker.events() if event.step)
            _, since = ticks_in(client, None)
            time.sleep(IDLE_S)
            ends, since = ticks_in(client, since)
            idle.append(statistics.median(intervals_ms(ends)))
            began = time.monotonic()
            list(clients.map(fetch, [url] * pictures, [output_format] * pictures))
            took.append(time.monotonic() - began)
            ends, since = ticks_in(client, since)
            busy.append(statistics.median(intervals_ms(ends)))
            ticker.abort()
            ticker.result(60)
    ratios = [b / i for b, i in zip(busy, idle, strict=True)]
    print(f"{pictures} pictures of 1024 x 1024 as {output_format}, {rounds} rounds, medians:")
    print(f"  tick interval, nothing else  {statistics.median(idle):7.2f} ms")
    print(f"  tick interval, encoding      {statistics.median(busy):7.2f} ms")
    print(f"  encoding / nothing else      {statistics.median(ratios):7.3f}", end="")
    print(f"  (from {min(ratios):.3f} to {max(ratios):.3f})")
    print(f"  {pictures} pictures took        {statistics.median(took):7.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--format", default="png", choices=("png", "jpeg", "webp"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config, endpoint = Path(folder) / "stages.yaml", f"ipc://{folder}/engine"
        config.write_text(STAGES)
        command = [
            Path(sys.executable).with_name("omni-engine"), "serve", "--config", config,
            "--endpoint", endpoint, "--port", "0",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://[\w.:]+", line)))
            with OmniClient(endpoint) as client:
                client.wait_until_ready(300)
                measure(client, url, options.pictures, options.rounds, options.format)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)


if __name__ == "__main__":
    main()
