"""A process in a worker's place: it speaks the protocol, but a prompt can make it break the rules.

``"mad DEED"`` names what it does before it answers the plan; see ``_deed``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import zmq
from fuzzing import ByteFuzzer, worker_messages
from support_pipelines import pattern

from omni_engine.protocol import adapters, codec, pipes, plans
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import BatchPlan, StepReport, StepState, WorkerSpec

BURST = 400
CAPABILITIES = plans.PipelineCapabilities(
    pipeline="Mad",
    supports_request_batch=True,
    per_request=frozenset({"negative_prompt"}),
    defaults={"height": 16, "width": 16, "num_inference_steps": 1},
)
READY = {
    "type": plans.READY,
    "load_ms": 0.0,
    "capabilities": CAPABILITIES.to_wire(),
    "parameter_bytes": 0,
}
_STDIN = 0


def main() -> int:
    """Serve until the engine says so or goes away."""
    spec = WorkerSpec.from_wire(pipes.read_message(_STDIN))
    with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.setsockopt(zmq.IDENTITY, spec.identity.encode())
        engine.setsockopt(zmq.LINGER, 0)
        engine.connect(spec.endpoint)
        _send(engine, READY)
        _serve(engine)
    return 0


def _serve(engine: zmq.Socket[bytes]) -> None:
    poller = zmq.Poller()
    poller.register(engine, zmq.POLLIN)
    poller.register(_STDIN, zmq.POLLIN)
    next_beat = 0.0
    while True:
        if time.monotonic() >= next_beat:
            _send(engine, plans.Heartbeat(0.0).to_wire())
            next_beat = time.monotonic() + plans.HEARTBEAT_INTERVAL_S
        ready = dict(poller.poll(200))
        if _STDIN in ready and not os.read(_STDIN, 4096):
            return
        if engine not in ready:
            continue
        message = codec.decode(engine.recv_multipart(), trusted=True)
        if message["type"] == plans.STOP:
            return
        if message["type"] == plans.BATCH_PLAN:
            _run(engine, BatchPlan.from_wire(message))


def _run(engine: zmq.Socket[bytes], plan: BatchPlan) -> None:
    outputs = [
        DiffusionOutput(r.request_id, images=[pattern(r.prompt, r.seed, 16, 16)], seed=r.seed)
        for r in plan.requests
    ]
    for request in plan.requests:
        mark, _, deed = request.prompt.partition(" ")
        if mark == "mad":
            for frames in _deed(deed, plan, outputs):
                engine.send_multipart(frames)
    _send(engine, plans.outputs_message(plan.plan_id, outputs))


def _deed(deed: str, plan: BatchPlan, outputs: list[DiffusionOutput]) -> Iterator[list[Any]]:
    """Yield what it says before the right answer; the right answer may be wrong then."""
    ghost = DiffusionOutput("ghost", seed=1)
    plan_id, name = plan.plan_id, plan.requests[0].request_id
    if deed.startswith("fuzz-"):
        fuzzer = ByteFuzzer(worker_messages(), int(deed.removeprefix("fuzz-")))
        yield from (fuzzer.frames() for _ in range(BURST))
        return
    messages: dict[str, list[dict[str, Any]]] = {
        "answer-for-nobody": [plans.outputs_message(plan_id, [*outputs, ghost])],
        "answer-too-few": [plans.outputs_message(plan_id, outputs[:-1])],
        "answer-twice": [plans.outputs_message(plan_id, outputs)],
        "answer-nothing": [plans.outputs_message(plan_id, [])],
        "answer-unasked": [plans.outputs_message(plan_id, outputs * 2)],
        "other-plan": [plans.outputs_message(plan_id + 1, outputs)],
        "ready-again": [READY],
        "step-report": [StepReport(plan_id, [StepState(name, -5, 2**62)]).to_wire()],
        "step-output": [StepReport(plan_id, outputs=outputs, plan_done=True).to_wire()],
        "check-nobody-asked-for": [
            {"type": adapters.ADAPTER_CHECKED, "check_id": 9, "report": None, "error": None}
        ],
        "no-type": [{"kind": "outputs"}],
    }
    yield from (codec.encode(message) for message in messages[deed])


def _send(engine: zmq.Socket[bytes], message: dict[str, Any]) -> None:
    with contextlib.suppress(zmq.Again):
        engine.send_multipart(codec.encode(message))
