"""Adapter management, as the clients and ``Omni`` offer it: list, load, unload, pin."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from omni_engine.protocol import messages
from omni_engine.protocol.lora_info import LoRAInfo


class LoRACalls(ABC):
    """Adapter management of whoever can call an engine."""

    @abstractmethod
    def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        """Send a message and return its answer, or raise the engine's error."""

    def loras(self, model: str | None = None) -> list[LoRAInfo]:
        """Return the registered adapters with their use, and which workers hold them.

        Args:
            model: a served model's name; None for the engine's first.
        """
        reply = self._call(messages.LORAS, model=model)
        return [LoRAInfo.from_wire(lora) for lora in reply["loras"]]

    def load_lora(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        default_scale: float = 1.0,
        preload: bool = False,
        pin: bool = False,
        replace: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> LoRAInfo:
        """Register an adapter; returns when a worker has checked its file.

        Args:
            name: what requests will call it.
            path: a safetensors file, or a folder with one, on the engine's machine inside one of
                the stage's ``lora_dirs``; a relative path is looked for in each of them.
                ``bundled:NAME`` is an adapter of the bundled model.
            default_scale: strength of requests that give none, -100 to 100.
            preload: load it on every worker before anybody asks.
            pin: never evict it from a device.
            replace: whether the name may be in use; its requests so far keep the old content.
            model: a served model's name; None for the engine's first.
            timeout_s: seconds to wait for the check, which reads the whole file; None: no limit.

        Raises:
            InvalidRequestError: if the name is in use, or the path is none that may be loaded.
            OmniError: what is wrong with the file; nothing is registered then.
            RequestTimeoutError: if it takes longer; the check goes on.
        """
        body = _load_body(name, path, default_scale, preload, pin, replace, model)
        reply = self._call(messages.LOAD_LORA, timeout_s, **body)
        return LoRAInfo.from_wire(reply["lora"])

    def unload_lora(self, name: str, *, model: str | None = None) -> LoRAInfo:
        """Unregister an adapter: new requests that name it are refused, those taken in end.

        Returns:
            What it was; its ``requests`` tells how many still wait and run.

        Raises:
            UnknownAdapterError: if no adapter has the name.
            InvalidRequestError: if it is the stage's default.
        """
        reply = self._call(messages.UNLOAD_LORA, name=name, model=model)
        return LoRAInfo.from_wire(reply["lora"])

    def pin_lora(self, name: str, pin: bool = True, *, model: str | None = None) -> LoRAInfo:
        """Never evict an adapter from a device from now on, or, with ``pin=False``, again.

        Raises:
            UnknownAdapterError: if no adapter has the name.
            InvalidRequestError: if too little room would be left for other adapters.
        """
        reply = self._call(messages.PIN_LORA, name=name, pin=pin, model=model)
        return LoRAInfo.from_wire(reply["lora"])


class AsyncLoRACalls(ABC):
    """``LoRACalls`` for asyncio programs."""

    @abstractmethod
    async def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        """Send a message and return its answer, or raise the engine's error."""

    async def loras(self, model: str | None = None) -> list[LoRAInfo]:
        """Return the registered adapters; see ``OmniClient.loras``."""
        reply = await self._call(messages.LORAS, model=model)
        return [LoRAInfo.from_wire(lora) for lora in reply["loras"]]

    async def load_lora(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        default_scale: float = 1.0,
        preload: bool = False,
        pin: bool = False,
        replace: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> LoRAInfo:
        """Register an adapter; see ``OmniClient.load_lora``."""
        body = _load_body(name, path, default_scale, preload, pin, replace, model)
        reply = await self._call(messages.LOAD_LORA, timeout_s, **body)
        return LoRAInfo.from_wire(reply["lora"])

    async def unload_lora(self, name: str, *, model: str | None = None) -> LoRAInfo:
        """Unregister an adapter; see ``OmniClient.unload_lora``."""
        reply = await self._call(messages.UNLOAD_LORA, name=name, model=model)
        return LoRAInfo.from_wire(reply["lora"])

    async def pin_lora(self, name: str, pin: bool = True, *, model: str | None = None) -> LoRAInfo:
        """Never evict an adapter from a device, or again; see ``OmniClient.pin_lora``."""
        reply = await self._call(messages.PIN_LORA, name=name, pin=pin, model=model)
        return LoRAInfo.from_wire(reply["lora"])


def _load_body(
    name: str,
    path: str | os.PathLike[str],
    default_scale: float,
    preload: bool,
    pin: bool,
    replace: bool,
    model: str | None,
) -> dict[str, Any]:
    return {
        "name": name,
        "path": os.fspath(path),
        "default_scale": default_scale,
        "preload": preload,
        "pin": pin,
        "replace": replace,
        "model": model,
    }
