"""The adapter registry: names to files and digests, kept in the frontend.

Nothing on a request's path asks a worker about adapters.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from omni_engine.protocol.errors import ConfigError, OmniError, UnknownAdapterError, nearest
from omni_engine.protocol.plans import Adapter, AdapterActivation
from omni_engine.protocol.sampling import LoRARequest, canonical_scale
from omni_engine.stages.config import EngineArgs


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class AdapterRegistry:
    """The adapters of one stage.

    Args:
        arguments: the stage's settings; every adapter's file is read once for its digest.

    Raises:
        ConfigError: if an adapter's file is missing.
    """

    def __init__(self, arguments: EngineArgs) -> None:
        self._adapters = {module.name: _register(module) for module in arguments.lora_modules}
        self._broken: dict[str, OmniError] = {}
        default = arguments.default_lora
        self._default = None if default is None else LoRARequest(default.name, default.scale)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All registered adapters, in the order of the configuration."""
        return tuple(self._adapters.values())

    def mark_broken(self, errors: dict[str, OmniError]) -> None:
        """Remember adapters that a worker could not load; requests naming them are refused."""
        self._broken.update(errors)

    def resolve(self, asked: LoRARequest | None) -> AdapterActivation | None:
        """Return what a request runs under: its own adapter, the stage's default, or none.

        Raises:
            UnknownAdapterError: if the name is not registered.
            ModelLoadError: if the adapter is registered, but unusable.
        """
        asked = asked or self._default
        if asked is None:
            return None
        adapter = self._adapters.get(asked.name)
        if adapter is None:
            raise self._unknown(asked.name)
        if asked.name in self._broken:
            raise self._broken[asked.name].with_traceback(None)  # else it grows with every raise
        scale = adapter.default_scale if asked.scale is None else asked.scale
        scale = canonical_scale(scale)
        return None if scale == 0 else AdapterActivation(adapter, scale)

    def describe(self) -> list[dict[str, Any]]:
        """Return name, digest, default scale and error of every adapter, for status."""
        return [
            {
                **dataclasses.asdict(adapter),
                "error": str(self._broken[name]) if name in self._broken else None,
            }
            for name, adapter in self._adapters.items()
        ]

    def _unknown(self, name: str) -> UnknownAdapterError:
        close = nearest(name, set(self._adapters))
        return UnknownAdapterError(
            f"no adapter named {name!r} is registered",
            field="lora_request.name",
            value=name,
            expected="one of " + ", ".join(sorted(self._adapters))
            if self._adapters
            else "no adapter: this stage has none registered",
            hint=f"Did you mean {close!r}?" if close else "Register it under lora_modules.",
        )


def _register(module: Any) -> Adapter:
    path = module.resolved_file()
    try:
        digest = file_digest(path)
    except OSError as error:
        raise ConfigError(
            f"can't read the file of adapter {module.name!r}: {error.strerror}",
            field="lora_modules",
            value=str(path),
            expected="a readable safetensors file",
        ) from None
    return Adapter(module.name, str(path), digest, canonical_scale(module.default_scale))
