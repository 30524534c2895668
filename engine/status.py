"""What status shows of a stage."""

from __future__ import annotations

from typing import Any

from omni_engine.engine.figures import OUTCOMES
from omni_engine.engine.health import stage_health
from omni_engine.engine.stage_runtime import StageRuntime


def describe_stage(stage: StageRuntime, now: float) -> dict[str, Any]:
    """Return a stage's state for status."""
    arguments, capabilities = stage.stage.engine_args, stage.capabilities
    workers = stage.describe_workers(now)
    return {
        "stage_id": stage.stage.stage_id,
        "name": stage.name,
        "model": arguments.model,
        "state": stage.state,
        "error": None if stage.error is None else stage.error.to_wire(),
        "health": stage_health(stage.name, stage.state, workers, arguments),
        "pipeline": None if capabilities is None else capabilities.pipeline,
        "batching": None if capabilities is None else capabilities.batching_note,
        "max_num_seqs": arguments.max_num_seqs,
        "effective_max_num_seqs": None if capabilities is None else stage.effective_max_num_seqs,
        "step_execution": arguments.step_execution,
        "deterministic": arguments.deterministic,
        "scheduling_policy": arguments.scheduling_policy,
        "request_batch_max_wait_ms": arguments.request_batch_max_wait_ms,
        "default_sampling_params": stage.default_sampling_params,
        "waiting": stage.num_waiting,
        "running": stage.num_running,
        "held": stage.held(),
        "requests": {name: stage.figures.counters[name] for name in OUTCOMES},
        "batch_sizes": {str(size): n for size, n in sorted(stage.figures.batch_sizes.items())},
        "adapters": [info.to_wire() for info in stage.adapters.describe(now)],
        "max_loras": arguments.max_loras,
        "max_cpu_loras": arguments.max_cpu_loras,
        "lora_merge": arguments.lora_merge,
        "mixed_lora": arguments.mixed_lora,
        "effective_mixed_adapters": None if capabilities is None else stage.adapters.room.mixed,
        "adapters_note": None if capabilities is None else capabilities.adapters_note,
        "capabilities": None if capabilities is None else capabilities.to_wire(),
        "workers": workers,
    }
