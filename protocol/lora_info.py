"""A registered adapter as management shows it: ``OmniClient.loras`` and ``omni-engine loras``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_engine.protocol.adapters import AdapterReport
from omni_engine.protocol.errors import OmniError, error_from_wire


@dataclass(frozen=True, slots=True)
class LoRAUse:
    """How much an adapter is asked for.

    Attributes:
        total: requests that named it and its content in force, unfinished ones included.
        waiting: requests that wait.
        running: requests that run.
    """

    total: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class LoRAHolder:
    """A worker that has an adapter in memory.

    Attributes:
        worker: its id.
        device: whether the adapter is on its device.
        host: whether it is in its host memory.
    """

    worker: str
    device: bool
    host: bool


@dataclass(frozen=True, slots=True)
class LoRAInfo:
    """A registered adapter: what it is, how it is used, and who holds it.

    Attributes:
        model: name of the model that it is registered for.
        name: what requests call it.
        path: the file on the engine's machine.
        state: ``checking``, ``ready`` or ``broken``; ``unloaded`` in the answer to an unload.
        error: why it can't be used; with ``ready`` why its file's new content can't.
        digest: SHA-256 of the content in force, hex; None before the first check.
        default_scale: strength of requests that give none.
        pin: whether it is never evicted from a device.
        preload: whether workers load it before anybody asks.
        report: what the file holds; None before the first check.
        requests: how much it is asked for.
        last_used_s: seconds since a request named it last; None if none did.
        held: the workers that have it in memory.
    """

    model: str
    name: str
    path: str
    state: str
    error: OmniError | None
    digest: str | None
    default_scale: float
    pin: bool
    preload: bool
    report: AdapterReport | None
    requests: LoRAUse
    last_used_s: float | None
    held: tuple[LoRAHolder, ...]

    def to_wire(self) -> dict[str, Any]:
        """Return a msgpack-able dict."""
        return {
            "model": self.model,
            "name": self.name,
            "path": self.path,
            "state": self.state,
            "error": None if self.error is None else self.error.to_wire(),
            "digest": self.digest,
            "default_scale": self.default_scale,
            "pin": self.pin,
            "preload": self.preload,
            "report": None if self.report is None else self.report.to_wire(),
            "requests": {
                "total": self.requests.total,
                "waiting": self.requests.waiting,
                "running": self.requests.running,
            },
            "last_used_s": self.last_used_s,
            "held": [
                {"worker": holder.worker, "device": holder.device, "host": holder.host}
                for holder in self.held
            ],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> LoRAInfo:
        """Rebuild from ``to_wire``'s dict; keys that a later release added are passed over."""
        error, report, requests = wire["error"], wire["report"], wire["requests"]
        return cls(
            model=wire["model"],
            name=wire["name"],
            path=wire["path"],
            state=wire["state"],
            error=None if error is None else error_from_wire(error),
            digest=wire["digest"],
            default_scale=wire["default_scale"],
            pin=wire["pin"],
            preload=wire["preload"],
            report=None if report is None else AdapterReport.from_wire(report),
            requests=LoRAUse(requests["total"], requests["waiting"], requests["running"]),
            last_used_s=wire["last_used_s"],
            held=tuple(LoRAHolder(h["worker"], h["device"], h["host"]) for h in wire["held"]),
        )
