"""Starts and stops all worker processes of an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from omni_engine.engine.devices import available_devices, worker_device
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.worker_handle import WorkerHandle, WorkerState
from omni_engine.protocol import plans
from omni_engine.protocol.plans import WorkerSpec

STOP_TIMEOUT_S = 5.0
"""How long a worker may take to leave before it is killed."""


def start_workers(
    stages: Iterable[StageRuntime], endpoint: str, socket: Path | None
) -> dict[str, StageRuntime]:
    """Start every stage's workers.

    Args:
        stages: each gets its workers.
        endpoint: where the engine listens for them.
        socket: its socket file for clients, if it has one.

    Returns:
        The stage of each worker, by worker id.
    """
    devices = available_devices()
    planned = [(stage, name) for stage in stages for name in stage.stage.worker_devices(devices)]
    on_cpu = sum(name == "cpu" for _, name in planned)
    stage_of_worker: dict[str, StageRuntime] = {}
    for stage, name in planned:
        worker = _start_worker(stage, name, endpoint, socket, on_cpu)
        stage.workers[worker.worker_id] = worker
        stage_of_worker[worker.worker_id] = stage
    return stage_of_worker


def _start_worker(
    stage: StageRuntime, name: str, endpoint: str, socket: Path | None, on_cpu: int
) -> WorkerHandle:
    arguments, runtime = stage.stage.engine_args, stage.stage.runtime
    device = worker_device(name)
    threads = runtime.threads
    if name == "cpu":
        threads = runtime.worker_threads(on_cpu, os.cpu_count() or 1)
    spec = WorkerSpec(
        worker_id=f"stage{stage.stage.stage_id}-worker{len(stage.workers)}",
        endpoint=endpoint,
        engine_args=arguments.model_dump(mode="json"),
        model=arguments.resolved_model(),
        device=device.torch_name,
        threads=threads,
        socket=None if socket is None else str(socket),
    )
    return WorkerHandle(spec, device, arguments, time.monotonic())


def stop_workers(
    workers: Iterable[WorkerHandle], send: Callable[[str, dict[str, Any]], None]
) -> None:
    """End all workers and wait until they are gone: idle ones by message, others by signal."""
    alive = [worker for worker in workers if worker.has_process and worker.exit_code is None]
    for worker in alive:
        if worker.state is WorkerState.IDLE:
            send(worker.worker_id, {"type": plans.STOP})
        else:
            worker.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for worker in alive:
        if not worker.wait(max(0.1, deadline - time.monotonic())):
            worker.kill()
            worker.wait(STOP_TIMEOUT_S)
        worker.close()
