"""omni-engine: a serving engine for diffusion models. Importing it never imports torch."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_engine.engine.async_client import AsyncOmniClient
    from omni_engine.engine.client import OmniClient
    from omni_engine.engine.curve import ClientKeys
    from omni_engine.engine.handles import RequestEvent
    from omni_engine.engine.omni import AsyncOmni, Omni
    from omni_engine.protocol.errors import OmniError
    from omni_engine.protocol.lora_info import LoRAInfo
    from omni_engine.protocol.outputs import DiffusionOutput
    from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams
    from omni_engine.stages.contracts import DiffusionRequestBatch, StepBatch, StepRequestState

__version__ = version("omni-engine")

__all__ = [
    "AsyncOmni",
    "AsyncOmniClient",
    "ClientKeys",
    "DiffusionOutput",
    "DiffusionRequestBatch",
    "LoRAInfo",
    "LoRARequest",
    "Omni",
    "OmniClient",
    "OmniDiffusionSamplingParams",
    "OmniError",
    "RequestEvent",
    "StepBatch",
    "StepRequestState",
]

_HOMES = {
    "AsyncOmni": "engine.omni",
    "AsyncOmniClient": "engine.async_client",
    "ClientKeys": "engine.curve",
    "DiffusionOutput": "protocol.outputs",
    "DiffusionRequestBatch": "stages.contracts",
    "LoRAInfo": "protocol.lora_info",
    "LoRARequest": "protocol.sampling",
    "Omni": "engine.omni",
    "OmniClient": "engine.client",
    "OmniDiffusionSamplingParams": "protocol.sampling",
    "OmniError": "protocol.errors",
    "RequestEvent": "engine.handles",
    "StepBatch": "stages.contracts",
    "StepRequestState": "stages.contracts",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that the package itself imports at once."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
