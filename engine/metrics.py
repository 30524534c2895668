"""What the engine's figures and timeline look like to clients."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from omni_engine.engine.health import stage_health
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.timeline import BoxRing
from omni_engine.engine.worker_handle import WorkerHandle


def describe_stage_figures(stage: StageRuntime, now: float) -> dict[str, Any]:
    """Return what a stage has done, for metrics."""
    workers, arguments, state = stage.workers.values(), stage.stage.engine_args, stage.state
    health = stage_health(stage.name, state, [w.describe(now) for w in workers], arguments)
    return {
        "name": stage.name,
        "state": state,
        "healthy": health["state"] == "healthy",
        "step_execution": arguments.step_execution,
        "waiting": stage.num_waiting,
        "running": stage.num_running,
        "max_num_seqs": None if stage.capabilities is None else stage.effective_max_num_seqs,
        **stage.figures.describe(now),
        "forwards": sum(worker.figures.forwards for worker in workers),
        "workers": [_describe_worker(worker, now) for worker in workers],
    }


def describe_timeline(
    stages: Iterable[StageRuntime], boxes: BoxRing, since: int | None, now: float
) -> dict[str, Any]:
    """Return what workers ran, from a box's number on, and what they run now.

    Args:
        stages: of the engine.
        boxes: of all of them.
        since: as of ``BoxRing.read``.
        now: seconds, monotonic.
    """
    known = list(stages)
    reading = boxes.read(since)
    return {
        "now_s": now,
        "wall_s": time.time(),
        "next": reading.next,
        "missed": reading.missed,
        "boxes": [box.describe(seq) for seq, box in reading.boxes],
        "running": [box.describe(None) for stage in known for box in stage.timeline.running],
        "stages": [
            {
                "name": stage.name,
                "waiting": stage.num_waiting,
                "running": stage.num_running,
                "workers": [
                    {"worker_id": worker.worker_id, "state": worker.state.value}
                    for worker in stage.workers.values()
                ],
            }
            for stage in known
        ],
    }


def _describe_worker(worker: WorkerHandle, now: float) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "device": worker.device.name,
        "state": worker.state.value,
        "busy_s": worker.busy_s(now),
        "batches": worker.batches,
        "ticks": worker.figures.ticks,
        "requests": worker.requests,
        "completed": worker.completed,
        "restarts": worker.restarts,
        "forwards": worker.figures.forwards,
        "adapters": worker.figures.describe_adapters(worker.held),
    }
