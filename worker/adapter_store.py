"""Keeps converted adapters on disk, so that each content is converted once per model.

One safetensors file per content, in a folder per kind of model, below the cache folder. What can't
be read back as it was written is removed; what can't be written is done without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from omni_engine.protocol.adapters import AdapterReport
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights
from omni_engine.worker.certificates import write_whole

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of the files; others aren't read."""

MAX_BYTES = 32 << 30
"""Of all models' adapters; beyond that, those that weren't used for the longest time go."""

_MAX_HEADER = 100_000_000
_OLD_PART_S = 3600.0
"""Seconds after which a file half written is nobody's any more."""

_UNREADABLE = (
    OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError
)  # fmt: skip


class AdapterStore:
    """The converted adapters of one kind of model.

    Args:
        folder: of all models' adapters; None keeps nothing.
        model_key: tells apart the models that the same converted weights don't fit; a file name.
    """

    def __init__(self, folder: Path | None, model_key: str) -> None:
        self._root, self._key = folder, model_key
        self._warned = False

    def report(self, digest: str) -> AdapterReport | None:
        """Return what was found when a content was converted; None if it isn't here."""
        path = self._path(digest)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, _MAX_HEADER)))
            end = max(entry["data_offsets"][1] for n, entry in header.items() if n[:2] != "__")
            if path.stat().st_size != 8 + length + end:
                raise ValueError("it is cut short")
            report = _report(header["__metadata__"], digest)
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            self._remove(path, error)
            return None
        _touch(path)
        return report

    def load(self, digest: str) -> AdapterWeights | None:
        """Return a content's weights; None if they aren't here."""
        path = self._path(digest)
        if path is None:
            return None
        try:
            data = path.read_bytes()
            tensors = load(data)
            metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            _report(metadata, digest)
            if int(metadata["checksum"]) != _checksum(tensors, metadata):
                raise ValueError("its content has changed")
            layers = {
                layer: LayerWeights(tensors[f"{layer}.down"], tensors[f"{layer}.up"], scaling)
                for layer, scaling in json.loads(metadata["scalings"]).items()
            }
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            self._remove(path, error)
            return None
        _touch(path)
        return AdapterWeights(digest, layers)

    def save(self, report: AdapterReport, weights: AdapterWeights) -> None:
        """Keep a content's weights."""
        path = self._path(report.digest)
        if path is None:
            return
        tensors = {f"{path}.down": layer.down for path, layer in weights.layers.items()}
        tensors |= {f"{path}.up": layer.up for path, layer in weights.layers.items()}
        metadata = {
            "version": str(FORMAT),
            "report": json.dumps(report.to_wire()),
            "scalings": json.dumps({p: layer.scaling for p, layer in weights.layers.items()}),
        }
        metadata["checksum"] = str(_checksum(tensors, metadata))
        try:
            write_whole(path, save(tensors, metadata))
        except OSError as error:
            self._warn(f"{path} can't be written", error)

    def sweep(self, limit_bytes: int = MAX_BYTES) -> None:
        """Remove what was unused for the longest time until the rest is within a limit.

        Several engines may do so at once: what is gone already is fine.
        """
        if self._root is None:
            return
        with contextlib.suppress(OSError):
            found = sorted(_files(self._root))
            total = sum(size for _, size, _ in found)
            for used, size, path in found:
                old_part = path.suffix == ".part" and used < time.time() - _OLD_PART_S
                if total <= limit_bytes and not old_part:
                    continue
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size

    def _path(self, digest: str) -> Path | None:
        if self._root is None or re.fullmatch("[0-9a-f]{64}", digest) is None:
            return None
        return self._root / self._key / f"{digest}.safetensors"

    def _remove(self, path: Path, why: Exception) -> None:
        if not isinstance(why, OSError):
            logger.info("the adapter store's %s is damaged and made anew: %s", path, why)
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            self._warn(f"{path} can't be read", why)

    def _warn(self, what: str, why: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the adapter store is done without: %s: %s", what, why)


def _report(metadata: Mapping[str, str], digest: str) -> AdapterReport:
    if metadata["version"] != str(FORMAT):
        raise ValueError(f"it is of version {metadata['version']}")
    wire: dict[str, Any] = json.loads(metadata["report"])
    report = AdapterReport.from_wire(wire)
    if report.digest != digest:
        raise ValueError("it is another adapter's")
    return report


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    value = zlib.crc32((metadata["report"] + metadata["scalings"]).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        described = f"{name} {tensor.dtype} {list(tensor.shape)}"
        data = tensor.contiguous().view(torch.uint8).numpy()
        value = zlib.crc32(data.data, zlib.crc32(described.encode(), value))
    return value


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield when it was used, size and path of each file in the models' folders."""
    for folder in root.iterdir():
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                found = path.stat()
                yield found.st_mtime, found.st_size, path


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)
