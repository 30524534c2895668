"""Messages between the engine and its workers: batch plans, results, capabilities, liveness."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.adapters import (
    AdapterActivation,
    activations_from_wire,
    activations_to_wire,
)
from omni_engine.protocol.errors import PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import SAMPLING_FIELDS

BATCH_PLAN, STEP_PLAN, ABORT, STOP = "batch_plan", "step_plan", "abort", "stop"
"""Engine to worker."""

READY, OUTPUTS, STEP_STATES, HEARTBEAT, FAULT = (
    "ready",
    "outputs",
    "step_states",
    "heartbeat",
    "fault",
)
"""Worker to engine."""


HEARTBEAT_INTERVAL_S = 1.0

PRIVATE_DIRECTORY_PREFIX = "omni-engine-"
"""Start of the name of the 0700 directory that holds an engine's own sockets."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a worker process needs to start; sent over its standard input.

    Args:
        worker_id: unique within the engine.
        endpoint: where the engine listens for workers.
        engine_args: the stage's ``engine_args`` as plain values.
        model: resolved local folder or hub id.
        device: torch device string as this process sees it.
        threads: torch threads; None leaves torch's default.
        incarnation: how many processes the worker had before this one.
        socket: the engine's socket file for clients, to be taken away should the engine be killed.
    """

    worker_id: str
    endpoint: str
    engine_args: dict[str, Any]
    model: str
    device: str
    threads: int | None = None
    incarnation: int = 0
    socket: str | None = None

    @property
    def identity(self) -> str:
        """The process's name on the engine's socket; no later process of the worker has it."""
        return f"{self.worker_id}.{self.incarnation}"

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WorkerSpec:
        """Rebuild from ``to_wire``'s dict."""
        return cls(**wire)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker says of itself every ``HEARTBEAT_INTERVAL_S``.

    Args:
        working_ms: since the main thread last made progress; 0 while it waits for work.
        loading_ms: for how long the adapter loader has been at its present file; 0 while it waits.
        memory_caps: most rows of a forward by its kind, in words, as learnt when memory ran out.
        requests: how many the process has.
        forwards: denoiser forwards that it has run since its model was loaded.
    """

    working_ms: float
    loading_ms: float = 0.0
    memory_caps: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    forwards: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``."""
        return {"type": HEARTBEAT, **dataclasses.asdict(self)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Heartbeat:
        """Rebuild from a decoded message."""
        return cls(**{f.name: wire[f.name] for f in dataclasses.fields(cls)})


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch for one worker: the requests in full, and what each runs under.

    Args:
        plan_id: counts a scheduler's plans.
        requests: in full.
        activations: one per request; they are equal unless the stage mixes adapters.
    """

    plan_id: int
    requests: tuple[DiffusionRequest, ...]
    activations: tuple[AdapterActivation | None, ...]

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``."""
        return {
            "type": BATCH_PLAN,
            "plan_id": self.plan_id,
            "requests": [request.to_wire() for request in self.requests],
            "activations": activations_to_wire(self.activations),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> BatchPlan:
        """Rebuild from a decoded message."""
        return cls(
            wire["plan_id"],
            tuple(DiffusionRequest.from_wire(request) for request in wire["requests"]),
            activations_from_wire(wire["activations"]),
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Ticks for one group of resident requests on one worker, and the requests that join it.

    A worker runs its plans in order. The new requests of a plan join as soon as the group is
    running, even while an earlier plan for the same group still has ticks left: the engine may
    send newcomers at any time, with ``ticks=0`` if the group has ticks planned already.

    Args:
        plan_id: counts a scheduler's plans.
        group_id: the resident group; a worker keeps a group until its last request has ended.
        requests: those that join, in full.
        activations: what each of these requests runs under; a group has one, unless the stage
            mixes adapters.
        ticks: how many denoiser forwards per request to run at most; 0: only join.
    """

    plan_id: int
    group_id: int
    requests: tuple[DiffusionRequest, ...]
    activations: tuple[AdapterActivation | None, ...]
    ticks: int = 1

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``."""
        return {
            "type": STEP_PLAN,
            "plan_id": self.plan_id,
            "group_id": self.group_id,
            "requests": [request.to_wire() for request in self.requests],
            "activations": activations_to_wire(self.activations),
            "ticks": self.ticks,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> StepPlan:
        """Rebuild from a decoded message."""
        return cls(
            plan_id=wire["plan_id"],
            group_id=wire["group_id"],
            requests=tuple(DiffusionRequest.from_wire(request) for request in wire["requests"]),
            activations=activations_from_wire(wire["activations"]),
            ticks=wire["ticks"],
        )


@dataclass(frozen=True, slots=True)
class StepState:
    """How far a running request is.

    Args:
        request_id: the request.
        step_index: scheduler steps done, of its slowest picture.
        num_steps: scheduler steps in all; 0 while that is not known.
    """

    request_id: str
    step_index: int
    num_steps: int


@dataclass(slots=True)
class StepReport:
    """What one tick came to; in request mode, progress of a running batch.

    Args:
        plan_id: the plan that runs.
        states: of the requests whose state changed.
        outputs: of the requests that ended in this tick.
        previews: uint8 arrays of shape (height, width, 3) by request id.
        ticks: ticks run since the last report: 0 or 1.
        tick_ms: milliseconds they took.
        plan_done: whether the plan's ticks are over.
        forwards: denoiser forwards that the process has run since its model was loaded.
    """

    plan_id: int
    states: list[StepState] = field(default_factory=list)
    outputs: list[DiffusionOutput] = field(default_factory=list)
    previews: dict[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    ticks: int = 0
    tick_ms: float = 0.0
    plan_done: bool = False
    forwards: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``; an unusable output becomes its own error."""
        return {
            "type": STEP_STATES,
            "plan_id": self.plan_id,
            "states": [[s.request_id, s.step_index, s.num_steps] for s in self.states],
            "outputs": [_output_to_wire(output) for output in self.outputs],
            "previews": self.previews,
            "ticks": self.ticks,
            "tick_ms": self.tick_ms,
            "plan_done": self.plan_done,
            "forwards": self.forwards,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> StepReport:
        """Rebuild from a decoded message."""
        return cls(
            plan_id=wire["plan_id"],
            states=[StepState(*state) for state in wire["states"]],
            outputs=[DiffusionOutput.from_wire(output) for output in wire["outputs"]],
            previews=wire["previews"],
            ticks=wire["ticks"],
            tick_ms=wire["tick_ms"],
            plan_done=wire["plan_done"],
            forwards=wire["forwards"],
        )


@dataclass(frozen=True, slots=True)
class PipelineCapabilities:
    """What a loaded pipeline can do; all that admission and the compatibility key need to know.

    Attributes:
        pipeline: class name.
        supports_request_batch: whether several requests share one forward.
        supports_step_execution: whether the class can be stepped.
        batching_note: how requests are batched, or why they are not; shown in status.
        sampling_fields: sampling parameters the pipeline takes.
        extra_args: names allowed in ``extra_args``.
        per_request: sampling fields and extra_args that may differ within a batch.
        inputs: names allowed in ``multi_modal_data``.
        required_inputs: inputs without which the pipeline can't run.
        defaults: the pipeline's own values of sampling fields.
        size_multiple: height and width must be multiples of this many pixels.
        supports_lora: whether adapters can be loaded.
        mixes_adapters: whether requests with different adapters can share a forward.
        adapters_note: how adapters are applied; shown in status.
        makes_video: whether the result is frames instead of images.
        samplers: names that a request's ``sampler`` may have.
        samplers_with_sigmas: those of them that take a request's ``sigmas``.
        samplers_with_eta: those of them that take a request's ``eta``.
        makes_transparency: whether pictures have a fourth channel, alpha.
        makes_previews: whether it can make previews of unfinished pictures.
        exclusive: whether a request must have the pipeline for itself from start to end.
    """

    pipeline: str
    supports_request_batch: bool = False
    supports_step_execution: bool = False
    batching_note: str = ""
    sampling_fields: frozenset[str] = SAMPLING_FIELDS
    extra_args: frozenset[str] = frozenset()
    per_request: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    required_inputs: frozenset[str] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)
    size_multiple: int = 1
    supports_lora: bool = False
    mixes_adapters: bool = False
    adapters_note: str = ""
    makes_video: bool = False
    samplers: frozenset[str] = frozenset()
    samplers_with_sigmas: frozenset[str] = frozenset()
    samplers_with_eta: frozenset[str] = frozenset()
    makes_transparency: bool = False
    makes_previews: bool = False
    exclusive: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict."""
        wire = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in wire.items()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> PipelineCapabilities:
        """Rebuild from ``to_wire``'s dict."""
        sets = {f.name for f in dataclasses.fields(cls) if "frozenset" in str(f.type)}
        fields: dict[str, Any] = {k: frozenset(v) if k in sets else v for k, v in wire.items()}
        return cls(**fields)


def outputs_message(
    plan_id: int, outputs: list[DiffusionOutput], forwards: int = 0
) -> dict[str, Any]:
    """Build a worker's answer to a batch plan; an unusable output becomes its request's error.

    Args:
        plan_id: the plan.
        outputs: one per request.
        forwards: denoiser forwards that the process has run since its model was loaded.
    """
    wire = [_output_to_wire(output) for output in outputs]
    return {"type": OUTPUTS, "plan_id": plan_id, "outputs": wire, "forwards": forwards}


def _output_to_wire(output: DiffusionOutput) -> dict[str, Any]:
    try:
        return output.to_wire()
    except PipelineContractError as error:
        return DiffusionOutput.failed(output.request_id, error).to_wire()
