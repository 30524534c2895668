"""What the fuzz tests send: right messages to start from, and such with bytes changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from raw_client import Array, encode

from omni_engine.protocol import adapters, plans
from omni_engine.protocol.errors import ModelError
from omni_engine.protocol.outputs import DiffusionOutput

Frames = list[bytes]
Message = dict[Any, Any]


SMALL = {
    "max_side": 64,
    "max_frames": 4,
    "max_steps": 8,
    "max_outputs_per_prompt": 4,
    "max_prompt_chars": 2000,
    "max_message_bytes": 1 << 20,
}
"""Limits that keep what gets through the fuzz cheap."""


# -- right messages, to start from


def client_messages() -> list[Message]:
    """One message of every type and of every shape that the engine acts on."""
    picture = Array("uint8", (4, 6, 3), bytes(72))
    mask = Array("uint8", (4, 6), bytes(24))
    weights = Array("bfloat16", (3,), bytes(6))
    flags = Array("bool", (2, 2), b"\1\0\0\1")
    params = {
        "height": 16, "width": 24, "num_inference_steps": 2, "seed": 7, "strength": 0.5,
        "num_outputs_per_prompt": 2, "guidance_scale": 1.5, "sigmas": [1.0, 0.5],
        "extra_args": {"note": {"deep": [1, [2, {"x": None}]]}, "weights": weights},
    }  # fmt: skip
    plain = {"request_id": "f1", "prompt": "a red circle", "sampling_params": {"seed": 1}}
    full = {
        "request_id": "f2", "model": None, "prompt": "ein rotes \u00e4\u4e2d", "detached": False,
        "multi_modal_data": {"image": [picture, picture], "mask_image": mask},
        "sampling_params": params, "timeout_s": 5.0,
    }  # fmt: skip
    flagged = {"prompt": "b", "sampling_params": {"extra_args": {"note": flags}}, "detached": True}
    lora = {"prompt": "c", "sampling_params": {"lora_request": [{"name": "n", "scale": 0.5}]}}
    bodies: list[tuple[str, Message]] = [
        ("hello", {"client": "fuzz"}),
        ("submit", {"requests": [plain]}),
        ("submit", {"requests": [full, plain]}),
        ("submit", {"requests": [flagged, lora, plain]}),
        ("submit", {"requests": [{"prompt": "d", "preview_every": 1}, plain]}),
        ("abort", {"request_ids": ["f1", "f2"]}),
        ("received", {"request_ids": ["f1", "f2", "f3"]}),
        ("status", {}),
        ("wait_ready", {}),
        ("ping", {}),
        ("bye", {}),
        ("loras", {"model": None}),
        ("load_lora", {"model": None, "name": "n", "path": "/tmp/n.safetensors", "pin": True,
                       "default_scale": 1.0, "preload": False, "replace": True}),
        ("unload_lora", {"model": None, "name": "n"}),
        ("pin_lora", {"model": None, "name": "n", "pin": True}),
    ]  # fmt: skip
    return [{"v": 1, "type": kind, "id": 5, **body} for kind, body in bodies]


def worker_messages() -> list[Message]:
    """One message of every type that a worker sends, about requests that don't exist."""
    output = DiffusionOutput("ghost", seed=1).to_wire()
    output["images"] = [Array("uint8", (4, 6, 3), bytes(72))]
    failed = DiffusionOutput.failed("ghost", ModelError("m", field="f")).to_wire()
    capabilities = plans.PipelineCapabilities("Ghost").to_wire()
    return [
        {"type": plans.READY, "load_ms": 1.0, "capabilities": capabilities, "parameter_bytes": 3},
        {"type": plans.OUTPUTS, "plan_id": 1, "outputs": [output, failed], "forwards": 8},
        plans.StepReport(2, [plans.StepState("ghost", 1, 4)], ticks=1, plan_done=True).to_wire()
        | {"outputs": [output]},
        plans.Heartbeat(3.0, 0.0, {"rows": 2}, 1, 8).to_wire(),
        {"type": plans.FAULT, "error": ModelError("m").to_wire()},
        {"type": adapters.ADAPTER_CHECKED, "check_id": 1, "report": None, "error": None},
        adapters.AdaptersHeld([], []).to_wire(),
    ]


# -- bytes changed


def crafted() -> list[Frames]:
    """Headers that no encoder makes."""
    envelope = b"\x84\xa1v\x01\xa4type\xa4ping\xa2id\x05\xa1x"  # a fourth field follows
    return [
        [],
        [b""],
        [b"", b""],
        [b"\xc1"],
        [b"\x80", b""],
        [b"\x81\xa1v"],
        *([envelope + marker * depth + b"\xc0"] for depth in (511, 513, 1023, 1025, 10_000)
          for marker in (b"\x91", b"\x81\xa1x")),
        [envelope + b"\x91" * 900_000],
        *([envelope + head + b"\xff\xff\xff\xff"] for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")),
        [envelope + b"\xc9\xff\xff\xff\xff\x01"],
        *([envelope + b"\xd6" + bytes([code]) + b"\0\0\0\0"] for code in (0, 1, 2, 127, 128, 255)),
        [envelope + b"\xd7\xff" + b"\xff" * 8],
        [envelope + b"\xd9\x02\xed\xa0"],
        [envelope + b"\xc0" + b"\xc0"],
        [b"\x83\xa1v\x01\xa1v\x01\xa4type\xa4ping"],
        [b"\x82\x01\x01\xc0\x01"],
        *([envelope + filler * 100_000] for filler in (b"\xc0", b"\x90", b"\x80", b"\xa0")),
        *([envelope + b"\xdd\x00\x01\x00\x00" + filler * 65_536] for filler in (b"\x90", b"\x80")),
        [b"\xff" * 1000] * 50,
        [envelope + b"\xc0"] + [b""] * 5000,
    ]  # fmt: skip


class ByteFuzzer:
    """Changes bytes and frames of right messages; what it makes depends on the seed alone."""

    def __init__(self, right: Sequence[Message], seed: int) -> None:
        self._random = random.Random(seed)
        self._corpus = [[bytes(frame) for frame in encode(message)] for message in right]

    def frames(self) -> Frames:
        """The frames of one message; never none at all."""
        choose = self._random
        frames = list(choose.choice(self._corpus))
        for _ in range(choose.choice((1, 1, 1, 1, 2, 4))):
            at = choose.randrange(len(frames)) if choose.random() < 0.4 else 0
            match choose.randrange(16):
                case 0 | 1 | 2 | 3 | 12 | 13 | 14 | 15:
                    frames[at] = self._flipped(frames[at])
                case 4 | 5:
                    frames[at] = frames[at][: choose.randrange(len(frames[at]) + 1)]
                case 6 | 7:
                    other = choose.choice(choose.choice(self._corpus))
                    cut, paste = choose.randrange(len(frames[at]) + 1), choose.randrange(len(other))
                    frames[at] = frames[at][:cut] + other[paste:]
                case 8:
                    cut = choose.randrange(len(frames[at]) + 1)
                    noise = choose.randbytes(choose.choice((1, 1, 2, 8)))
                    frames[at] = frames[at][:cut] + noise + frames[at][cut + choose.randrange(2) :]
                case 9:
                    frames.insert(
                        choose.randrange(len(frames) + 1), choose.choice((b"", frames[at]))
                    )
                case 10 if len(frames) > 1:
                    del frames[at]
                case 10:
                    frames = frames * choose.choice((2, 3, 30))
                case _:
                    choose.shuffle(frames)
        return frames

    def _flipped(self, frame: bytes) -> bytes:
        changed = bytearray(frame or b"\0")
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)
