"""Adapters on one worker: load on first use, keep a few, activate one per batch.

A batch without adapter runs the bare model, bit for bit, whatever was active before: adapters are
switched off, never fused into the weights.
"""

from __future__ import annotations

import hashlib
import logging
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open

from omni_engine.protocol.errors import ModelLoadError, OmniError
from omni_engine.protocol.outputs import AppliedLoRA
from omni_engine.protocol.plans import Adapter, AdapterActivation

logger = logging.getLogger(__name__)

_UNKNOWN = ("unknown", 0.0)
"""What is active after a failed switch: equal to nothing that can be asked for."""

_DOWN_SUFFIXES = (".lora_A.weight", ".lora_down.weight", ".lora.down.weight")


class AdapterManager:
    """Loads and activates adapters of one diffusers pipeline.

    Args:
        pipe: a pipeline with diffusers' LoRA loader.
        max_loras: adapters kept loaded, >= 1; the least recently used one goes first.
    """

    def __init__(self, pipe: Any, max_loras: int) -> None:
        self._pipe = pipe
        self._max_loras = max_loras
        self._loaded: OrderedDict[str, str] = OrderedDict()
        self._active: tuple[str, float] | None = None

    def activate(self, activation: AdapterActivation | None) -> list[AppliedLoRA]:
        """Make exactly this adapter at this scale active, or none.

        Returns:
            What is active now, for the outputs to report.

        Raises:
            ModelLoadError: if the adapter can't be loaded or fits the model only in part.
        """
        wanted = None if activation is None else activation.identity
        if wanted != self._active:
            self._active = _UNKNOWN
            if activation is None:
                self._pipe.disable_lora()
            else:
                self._switch_to(activation)
            self._active = wanted
        if activation is None:
            return []
        self._loaded.move_to_end(activation.adapter.digest)
        return [AppliedLoRA(activation.adapter.name, *activation.identity)]

    def check(self, adapters: tuple[Adapter, ...]) -> dict[str, OmniError]:
        """Load each adapter once, so that a broken one is known before anyone asks for it.

        Returns:
            The error of each adapter that can't be used, by name.
        """
        broken: dict[str, OmniError] = {}
        for adapter in adapters:
            try:
                self.activate(AdapterActivation(adapter, 1.0))
            except ModelLoadError as error:
                logger.error("adapter %s can't be used: %s", adapter.name, error)
                broken[adapter.name] = error
        if self._loaded:
            self.activate(None)
        return broken

    def _switch_to(self, activation: AdapterActivation) -> None:
        digest = activation.adapter.digest
        if digest not in self._loaded:
            self._load(activation.adapter)
        name = self._loaded[digest]
        self._pipe.enable_lora()
        self._pipe.set_adapters([name], [activation.scale])

    def _load(self, adapter: Adapter) -> None:
        name = f"adapter_{adapter.digest[:24]}"
        path = Path(adapter.path)
        started = time.perf_counter()
        expected = count_targets(adapter)
        try:
            _check_content(adapter)
            with warnings.catch_warnings():  # peft warns of every adapter after the first
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")
                self._pipe.load_lora_weights(
                    str(path.parent), weight_name=path.name, adapter_name=name, use_safetensors=True
                )
        except (ValueError, RuntimeError, KeyError, OSError, TypeError) as error:
            self._restore_after_failure(name)
            raise _unusable(adapter, f"{type(error).__name__}: {error}") from None
        matched = self._count_matched(name)
        if matched != expected:
            self._restore_after_failure(name)
            raise _unusable(adapter, f"{matched} of its {expected} layers match the model")
        self._loaded[adapter.digest] = name
        if len(self._loaded) > self._max_loras:
            _, oldest = self._loaded.popitem(last=False)
            self._pipe.delete_adapters(oldest)
        milliseconds = (time.perf_counter() - started) * 1000
        logger.info("adapter %s loaded: %d layers, %.0f ms", adapter.name, matched, milliseconds)

    def _count_matched(self, name: str) -> int:
        return sum(
            isinstance(layer, BaseTunerLayer) and name in getattr(layer, "lora_A", {})
            for module in self._modules()
            for layer in module.modules()
        )

    def _restore_after_failure(self, name: str) -> None:
        """Drop what a failed load left behind and switch everything off."""
        if self._count_matched(name):
            self._pipe.delete_adapters(name)
        self._pipe.disable_lora()
        self._active = None

    def _modules(self) -> list[torch.nn.Module]:
        return [m for m in self._pipe.components.values() if isinstance(m, torch.nn.Module)]


def count_targets(adapter: Adapter) -> int:
    """Return the number of layers an adapter's file holds updates for.

    Raises:
        ModelLoadError: if the file can't be read or holds no LoRA weights.
    """
    try:
        with safe_open(adapter.path, framework="numpy") as file:
            targets = {key for key in file.keys() if key.endswith(_DOWN_SUFFIXES)}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _unusable(adapter, f"its file can't be read: {error}") from None
    if not targets:
        raise _unusable(adapter, "its file holds no LoRA weights")
    return len(targets)


def _check_content(adapter: Adapter) -> None:
    """Raise ``ModelLoadError`` if the file is no longer what was registered under the name."""
    with open(adapter.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != adapter.digest:
        raise _unusable(adapter, "its file has changed; start the engine anew to serve it")


def _unusable(adapter: Adapter, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"adapter {adapter.name!r} can't be used with this model: {reason}",
        field="lora_modules",
        value=adapter.name,
        expected="LoRA weights of which every layer matches the model",
    )
