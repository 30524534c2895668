"""Reads an adapter's file, and finds what is wrong with it before any model is asked.

Files are read into memory, never mapped: one that is cut short while it is mapped kills the
process. Pickle files are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from omni_engine.protocol.errors import AdapterError
from omni_engine.worker.adapter_settings import checked_settings

_MAX_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""

MAX_BYTES = 4 << 30
"""Of a file: checking one takes several times its size in host memory."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_STARTS = {
    b"PK\x03\x04": "it is a zip archive, as torch.save writes pickles",
    b"\x80": "it is a pickle",
    b"version https://git-lfs": "it is a Git LFS pointer, not the file that it points to",
    b"GGUF": "it is a GGUF file",
    b"<": "it is a page of markup, such as a failed download",
}

_SIDES = re.compile(r"(.+?)[._](A|B|down|up)(?:\.[^.]+)?\.weight")
_KIND_OF_SIDE = {"A": "down", "B": "up", "down": "down", "up": "up"}

_OTHER_METHODS = (
    ("dora_scale", "DoRA"),
    ("lora_magnitude_vector", "DoRA"),
    ("lokr_", "LoKr"),
    ("hada_", "LoHa"),
    ("oft_", "OFT"),
    ("lora_mid", "LoCon with a middle tensor (Tucker decomposition)"),
    ("lora_embedding_", "LoRA of embeddings"),
    ("ia3_", "IA3"),
    ("vera_lambda", "VeRA"),
    (".diff", "weight differences next to LoRA"),
)
"""What a tensor's name gives away about an adapter that isn't plain LoRA."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """A file in memory; ``digest`` is of exactly these bytes."""

    digest: str
    data: bytes


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """The names of one layer's tensors in a file."""

    down: str
    up: str


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What an adapter's file holds, checked as far as that goes without a model.

    Attributes:
        name: of the adapter, for errors.
        digest: SHA-256 of the file, hex.
        format: "peft", "diffusers" or "kohya".
        tensors: all of them, by their names in the file.
        settings: of the training, by component ("transformer.lora_alpha"), where the file has them.
        header: the file's own metadata.
        layers: those that it has updates for, by the name they have in the file.
    """

    name: str
    digest: str
    format: str
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Any] | None
    header: Mapping[str, str]
    layers: Mapping[str, SourceLayer]


def unusable(
    name: str, reason: str, *, expected: str | None = None, hint: str | None = None
) -> AdapterError:
    """Return the error of an adapter that can't be used, for this reason."""
    return AdapterError(
        f"adapter {name!r} can't be used: {reason}",
        field="lora_modules",
        value=name,
        expected=expected,
        hint=hint,
    )


def some(names: Iterable[str]) -> str:
    """Return up to three names as text, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def read_raw(name: str, path: str | Path) -> RawFile:
    """Read a file that may be an adapter into memory.

    Args:
        name: of the adapter, for errors.
        path: of the file.

    Raises:
        AdapterError: if it can't be read, or isn't a safetensors file that may hold LoRA weights;
            such a file is refused by its first bytes, however large it is.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise unusable(name, f"{path} is no file")
            start, size = _read_header(name, Path(path), file)
            # No more than was there: the file may be growing, to whatever size
            data = start + file.read(size - len(start))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise unusable(name, f"its file can't be read: {reason}: {path}") from None
    return RawFile(hashlib.sha256(data).hexdigest(), data)


def parse(name: str, raw: RawFile) -> AdapterFile:
    """Return what a file holds.

    Raises:
        AdapterError: if it is damaged, or not plain LoRA weights that a model could take.
    """
    try:
        unordered = load(raw.data)
        header = json.loads(raw.data[8 : 8 + int.from_bytes(raw.data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise unusable(name, f"its file is damaged or cut short: {error}") from None
    order = sorted(unordered, key=lambda key: header[key]["data_offsets"])
    tensors = {key: unordered[key] for key in order}  # as diffusers reads a file
    layers = _layers(name, tensors)
    _check_tensors(name, tensors, layers)
    metadata = header.get("__metadata__", {})
    try:
        settings = checked_settings(metadata.get("lora_adapter_metadata"))
    except ValueError as error:
        raise unusable(name, str(error)) from None
    return AdapterFile(name, raw.digest, _format(tensors), tensors, settings, metadata, layers)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer blocks


def _read_header(name: str, path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """Return the first bytes of a safetensors file, its header included, and the file's size."""
    expected = "a safetensors file"
    hint = "Pickle files are never read: convert it to safetensors."
    start = file.read(64)
    may_be_right = start[8:9] == b"{"  # before that comes a length: any bytes
    for magic, meaning in _STARTS.items():
        if start.startswith(magic) and not may_be_right:
            raise unusable(name, f"{path.name}: {meaning}", expected=expected, hint=hint)
    if path.suffix.lower() in _PICKLE_SUFFIXES:
        reason = f"{path.name} has the name of a pickle file"
        raise unusable(name, reason, expected=expected, hint=hint)
    length = int.from_bytes(start[:8], "little")
    size = os.fstat(file.fileno()).st_size
    if length > _MAX_HEADER or not may_be_right:
        reason = f"{path.name}, of {size} bytes, is no safetensors file"
        raise unusable(name, reason, expected=expected)
    start += file.read(max(0, 8 + length - len(start)))
    if len(start) < 8 + length:
        reason = f"its file is cut short: its header has {length} bytes, the file {size}"
        raise unusable(name, reason, expected="the complete file")
    try:
        header = json.loads(start[8 : 8 + length])
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise unusable(name, f"the header of {path.name} is damaged", expected=expected) from None
    if end > size:
        reason = f"its file is cut short: its tensors end at byte {end}, the file at {size}"
        raise unusable(name, reason, expected="the complete file")
    if end < size:
        reason = f"its file is damaged: its tensors end at byte {end}, the file at {size}"
        raise unusable(name, reason, expected="nothing after the tensors")
    if size > MAX_BYTES:
        reason = f"its file has {size / 2**30:.1f} GiB"
        raise unusable(name, reason, expected=f"an adapter of at most {MAX_BYTES >> 30} GiB")
    _layers(name, entries)
    return start, size


def _layers(name: str, keys: Iterable[str]) -> dict[str, SourceLayer]:
    """Return the layers that a file's tensors are for."""
    downs: dict[str, str] = {}
    ups: dict[str, str] = {}
    alphas, others = [], []
    for key in sorted(keys):
        if (found := _SIDES.fullmatch(key)) is not None and "lora" in key:
            sides = downs if _KIND_OF_SIDE[found[2]] == "down" else ups
            sides[_layer_name(found[1])] = key
        elif key.endswith(".alpha"):
            alphas.append(_layer_name(key.removesuffix(".alpha")))
        else:
            others.append(key)
    for method in _methods(others):
        raise unusable(name, f"it is {method}", expected="plain LoRA")
    if not downs and not ups:
        held = f"it holds {some(others)}" if others else "it holds no tensors at all"
        raise unusable(name, f"its file holds no LoRA weights: {held}")
    if others:
        reason = f"{len(others)} of its tensors are no LoRA weights: {some(others)}"
        raise unusable(name, reason, expected="LoRA weights only")
    for kind, there, missing in (("up", ups, downs), ("down", downs, ups)):
        if lonely := sorted(there.keys() - missing.keys()):
            other = "down" if kind == "up" else "up"
            reason = f"{len(lonely)} layers have {kind} weights without {other}: {some(lonely)}"
            raise unusable(name, reason)
    if lonely := sorted(set(alphas) - downs.keys()):
        raise unusable(name, f"{len(lonely)} layers have an alpha and no weights: {some(lonely)}")
    return {layer: SourceLayer(downs[layer], ups[layer]) for layer in downs}


def _methods(keys: list[str]) -> Iterator[str]:
    """Yield what method other than LoRA tensors are of, with an example."""
    for key in keys:
        for mark, method in _OTHER_METHODS:
            if mark in key:
                yield f"{method} ({key})"
        if "lora" in key and key.endswith(".bias"):
            yield f"LoRA with biases ({key})"


def _layer_name(stem: str) -> str:
    return re.sub(r"[._]lora(_linear_layer)?$", "", stem)


def _format(keys: Iterable[str]) -> str:
    keys = list(keys)
    if any(".lora_down." in key or ".lora_up." in key for key in keys):
        return "kohya"
    if any(".lora_A." in key or ".lora_B." in key for key in keys):
        return "peft"
    return "diffusers"


def _check_tensors(
    name: str, tensors: Mapping[str, Tensor], layers: Mapping[str, SourceLayer]
) -> None:
    for key, tensor in tensors.items():
        is_alpha = key.endswith(".alpha")
        if tensor.dtype not in _DTYPES and not (is_alpha and not tensor.is_floating_point()):
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            kind = str(tensor.dtype).removeprefix("torch.")
            raise unusable(name, f"{key} is {kind}", expected=f"one of {allowed}")
        if (
            tensor.numel() == 0
            or (is_alpha and tensor.numel() > 1)
            or (not is_alpha and tensor.ndim < 2)
        ):
            raise unusable(name, f"{key} has shape {tuple(tensor.shape)}: no layer's update has")
    for layer, keys in layers.items():
        down, up = tensors[keys.down], tensors[keys.up]
        if down.shape[0] != up.shape[1]:
            reason = (
                f"its ranks don't fit: of {layer}, down has rank {down.shape[0]} "
                f"{tuple(down.shape)} and up {up.shape[1]} {tuple(up.shape)}"
            )
            raise unusable(name, reason, expected="one rank per layer")
    broken = [key for key, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        reason = f"{len(broken)} of its {len(tensors)} tensors hold NaN or infinity: {some(broken)}"
        raise unusable(name, reason, expected="finite numbers")
