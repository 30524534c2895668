"""Adapter management as clients ask for it: list, load, unload, pin."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from omni_engine.engine.adapter_files import allowed_file, is_bundled
from omni_engine.engine.registered_adapter import RegisteredAdapter
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.protocol import messages
from omni_engine.protocol.errors import (
    AdapterError,
    LimitExceededError,
    OmniError,
    QueueFullError,
)
from omni_engine.protocol.lora_info import LoRAInfo
from omni_engine.protocol.messages import ClientMessage
from omni_engine.protocol.sampling import canonical_scale
from omni_engine.stages.config import Limits

Send = Callable[[dict[str, Any]], None]

KINDS = frozenset({messages.LORAS, messages.LOAD_LORA, messages.UNLOAD_LORA, messages.PIN_LORA})
"""The messages that are for this desk."""

_RETRY_MS = 1000.0
_DEFAULT_LIMITS = Limits()


def answer(
    message: ClientMessage,
    stage: StageRuntime,
    send: Send,
    now: float,
    *,
    client: Hashable = None,
    limits: Limits = _DEFAULT_LIMITS,
) -> None:
    """Do what a client asks for; a load is answered when a worker has checked the file.

    Args:
        message: checked, of one of ``KINDS``.
        stage: which stage it is about.
        send: sends a message to the client.
        now: seconds, monotonic.
        client: whose message it is.
        limits: how many adapters may be registered, and loaded at once for one client.

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
            if stage.state == "down":
                raise stage.unavailable(now)
            _check_room(body["name"], stage, client, limits)
            _load(message, stage, tell, send, client, now)
        case messages.UNLOAD_LORA:
            tell(stage.adapters.unload(body["name"], now))
        case messages.PIN_LORA:
            tell(stage.adapters.pin(body["name"], body["pin"], now))


def _check_room(name: str, stage: StageRuntime, client: Hashable, limits: Limits) -> None:
    """Refuse a load beyond what one client may load at once, or a stage may have registered."""
    registry = stage.adapters.registry
    if registry.num_loading_for(client) >= limits.max_pending_loads:
        raise QueueFullError(
            f"{limits.max_pending_loads} adapters are being loaded for this client already",
            field="name",
            value=name,
            expected="fewer loads at once (max_pending_loads)",
            hint="Wait for the answer to one of them.",
            retry_after_ms=_RETRY_MS,
        )
    if name not in registry and len(registry) >= limits.max_adapters:
        raise LimitExceededError(
            f"{len(registry)} adapters are registered already",
            field="name",
            value=name,
            expected=f"at most {limits.max_adapters} adapters (max_adapters)",
            hint="Unload one that is not needed, or replace one.",
        )


def _load(
    message: ClientMessage,
    stage: StageRuntime,
    tell: Callable[[LoRAInfo], None],
    send: Send,
    client: Hashable,
    now: float,
) -> None:
    def loaded(result: LoRAInfo | OmniError) -> None:
        if isinstance(result, LoRAInfo):
            tell(result)
        else:
            send(messages.error_message(_about_path(result, body["path"]), message.id))

    body = message.body
    scale = 1.0 if body["default_scale"] is None else body["default_scale"]
    entry = RegisteredAdapter(
        name=body["name"],
        path=allowed_file(body["path"], stage.stage.engine_args),
        default_scale=canonical_scale(scale),
        pin=bool(body["pin"]),
        preload=bool(body["preload"]),
        confined=not is_bundled(body["path"]),
        asked_by=client,
    )
    stage.adapters.load(entry, replace=bool(body["replace"]), loaded=loaded)


def _about_path(error: OmniError, path: str) -> OmniError:
    """Return a verdict on a file as one on the path that the client gave."""
    if not isinstance(error, AdapterError):
        return error
    return AdapterError(
        error.message, field="path", value=path, expected=error.expected, hint=error.hint
    )
