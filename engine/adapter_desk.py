"""Adapter management as clients ask for it: list, load, unload, pin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_engine.engine.adapter_files import allowed_file, is_bundled
from omni_engine.engine.registered_adapter import RegisteredAdapter
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.protocol import messages
from omni_engine.protocol.errors import AdapterError, OmniError
from omni_engine.protocol.lora_info import LoRAInfo
from omni_engine.protocol.messages import ClientMessage
from omni_engine.protocol.sampling import canonical_scale

Send = Callable[[dict[str, Any]], None]

KINDS = frozenset({messages.LORAS, messages.LOAD_LORA, messages.UNLOAD_LORA, messages.PIN_LORA})
"""The messages that are for this desk."""


def answer(message: ClientMessage, stage: StageRuntime, send: Send, now: float) -> None:
    """Do what a client asks for; a load is answered when a worker has checked the file.

    Args:
        message: checked, of one of ``KINDS``.
        stage: which stage it is about.
        send: sends a message to the client.
        now: seconds, monotonic.

    Raises:
        OmniError: if it is refused at once.
    """
    body = message.body

    def tell(info: LoRAInfo) -> None:
        send(messages.engine_message(messages.LORA, message.id, lora=info.to_wire()))

    match message.type:
        case messages.LORAS:
            wire = [info.to_wire() for info in stage.adapters.describe(now)]
            send(messages.engine_message(messages.LORAS, message.id, loras=wire))
        case messages.LOAD_LORA:
            _load(message, stage, tell, send)
        case messages.UNLOAD_LORA:
            tell(stage.adapters.unload(body["name"], now))
        case messages.PIN_LORA:
            tell(stage.adapters.pin(body["name"], body["pin"], now))


def _load(
    message: ClientMessage, stage: StageRuntime, tell: Callable[[LoRAInfo], None], send: Send
) -> None:
    def loaded(result: LoRAInfo | OmniError) -> None:
        if isinstance(result, LoRAInfo):
            tell(result)
        else:
            send(messages.error_message(_about_path(result, body["path"]), message.id))

    body = message.body
    if stage.state == "down":
        raise stage.unavailable()
    scale = 1.0 if body["default_scale"] is None else body["default_scale"]
    entry = RegisteredAdapter(
        name=body["name"],
        path=allowed_file(body["path"], stage.stage.engine_args),
        default_scale=canonical_scale(scale),
        pin=bool(body["pin"]),
        preload=bool(body["preload"]),
        confined=not is_bundled(body["path"]),
    )
    stage.adapters.load(entry, replace=bool(body["replace"]), loaded=loaded)


def _about_path(error: OmniError, path: str) -> OmniError:
    """Return a verdict on a file as one on the path that the client gave."""
    if not isinstance(error, AdapterError):
        return error
    return AdapterError(
        error.message, field="path", value=path, expected=error.expected, hint=error.hint
    )
