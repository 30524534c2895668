"""Where a worker's adapters come from: checked and converted once, then from the store."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import nn

from omni_engine.protocol.adapters import Adapter, AdapterReport
from omni_engine.worker.adapter_conversion import AdapterConverter
from omni_engine.worker.adapter_file import AdapterFile, RawFile, parse, read_raw, unusable
from omni_engine.worker.adapter_store import FORMAT, MAX_BYTES, AdapterStore
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights
from omni_engine.worker.certificates import cache_folder

logger = logging.getLogger(__name__)

_LIBRARIES = ("diffusers", "peft", "transformers")


class AdapterLibrary:
    """Checks adapters for one pipeline and fetches their weights.

    It reads files and converts them, which takes from milliseconds to seconds; one thread at a time
    may call it, the pipeline may run in another one meanwhile.

    Args:
        pipe: as diffusers made it, before any of its modules are wrapped; it isn't changed.
        folder: for the store; None means the user's cache folder.
        limit_bytes: what the store may hold; more is removed now.
    """

    def __init__(
        self, pipe: Any, folder: Path | None = None, *, limit_bytes: int = MAX_BYTES
    ) -> None:
        self._converter = AdapterConverter(pipe)
        root = folder if folder is not None else cache_folder()
        key = model_key(pipe, self._converter.components)
        self._store = AdapterStore(None if root is None else root / "adapters", key)
        self._store.sweep(limit_bytes)

    def check(self, name: str, path: str | Path) -> AdapterReport:
        """Find out what a file holds and whether the model can run under it.

        Args:
            name: of the adapter, for errors.
            path: of the file.

        Raises:
            AdapterError: if it can't be used, with the reason.
        """
        raw = read_raw(name, path)
        stored = self._store.report(raw.digest)
        return stored if stored is not None else self._convert(name, raw)[0]

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        """Return an adapter's weights in host memory, in the file's dtype.

        Raises:
            AdapterError: if they are neither in the store nor in the file any more.
        """
        stored = self._store.load(adapter.digest)
        if stored is not None:
            return stored
        raw = read_raw(adapter.name, adapter.path)
        if raw.digest != adapter.digest:
            raise unusable(
                adapter.name,
                "its file has changed since it was registered, and the content it had is gone",
                hint="Requests from now on use the new content.",
            )
        return self._convert(adapter.name, raw)[1]

    def _convert(self, name: str, raw: RawFile) -> tuple[AdapterReport, AdapterWeights]:
        started = time.perf_counter()
        file = parse(name, raw)
        weights = AdapterWeights(raw.digest, self._converter.convert(file))
        report = _report(file, weights)
        self._store.save(report, weights)
        milliseconds = (time.perf_counter() - started) * 1000
        layers = len(weights.layers)
        logger.info("adapter %s converted: %d layers, %.0f ms", name, layers, milliseconds)
        return report, weights


def model_key(pipe: Any, components: Mapping[str, nn.Module]) -> str:
    """Return a name for all models that the same converted adapters fit, whatever their weights.

    Args:
        pipe: the pipeline.
        components: those that adapters may change.
    """
    described = {
        name: [
            [path, type(module).__name__, [list(p.shape) for p in module.parameters(recurse=False)]]
            for path, module in component.named_modules()
        ]
        for name, component in components.items()
    }
    key = {
        "format": FORMAT,
        "pipeline": f"{type(pipe).__module__}:{type(pipe).__qualname__}",
        "components": described,
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    return sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _report(file: AdapterFile, weights: AdapterWeights) -> AdapterReport:
    layers: Mapping[str, LayerWeights] = weights.layers
    return AdapterReport(
        digest=file.digest,
        format=file.format,
        layers=dict(sorted(Counter(path.partition(".")[0] for path in layers).items())),
        ranks=sorted({layer.rank for layer in layers.values()}),
        modules=sorted({_kind(path) for path in layers}),
        num_bytes=weights.num_bytes,
    )


def _kind(path: str) -> str:
    """Return what a layer is called wherever it stands: "to_q", "to_out.0"."""
    found = re.search(r"[^.]+(?:\.\d+)*$", path)
    return path if found is None else found[0]
