"""Makes adapter files for any pipeline: random ones in three formats, broken ones of each kind."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

Layer = tuple[str, str, nn.Module]
"""Component, path below it, the layer."""

ATTENTION = re.compile(
    r"(?:^|\.)(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|[qkv]_proj|out_proj)$"
)
"""Layers that adapters usually change."""

_KOHYA_PREFIXES = {
    "unet": "lora_unet",
    "transformer": "lora_unet",
    "text_encoder": "lora_te1",
    "text_encoder_2": "lora_te2",
}


def random_adapter(
    pipe: Any,
    path: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    strength: float = 0.5,
    components: Iterable[str] = ("unet", "transformer"),
    layers: Callable[[str, nn.Module], bool] | None = None,
    format: str = "peft",
    dtype: torch.dtype = torch.float32,
    alpha: float | None = None,
) -> Path:
    """Write an adapter of random weights and return its path.

    Args:
        pipe: what has the components: a pipeline.
        path: of the file.
        rank: of every layer.
        seed: of the weights.
        strength: how large its change of a layer is, about, measured in the layer's input.
        components: those it changes; the ones that the pipeline lacks don't count.
        layers: which layers, by path and module; all linear ones in attention by default.
        format: "peft", "diffusers" or "kohya".
        dtype: of the weights.
        alpha: written down if given, so that scale 1 means alpha / rank.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    chosen = list(layers_of(pipe, components, layers))
    if not chosen:
        raise ValueError("no layer is chosen")
    name = {"peft": _peft, "diffusers": _diffusers, "kohya": _kohya}[format]
    for component, layer_path, layer in chosen:
        down, up = _random_weights(layer, rank, strength, generator)
        names = name(pipe, component, layer_path)
        tensors[names[0]], tensors[names[1]] = down.to(dtype), up.to(dtype)
        if alpha is not None and format == "kohya":
            tensors[names[2]] = torch.tensor(float(alpha), dtype=dtype)
    metadata = {"format": "pt"}
    if alpha is not None and format != "kohya":
        metadata["lora_adapter_metadata"] = json.dumps(_peft_settings(chosen, rank, alpha))
    save_file({key: t.contiguous() for key, t in tensors.items()}, path, metadata)
    return path


def layers_of(
    pipe: Any,
    components: Iterable[str],
    wanted: Callable[[str, nn.Module], bool] | None = None,
) -> Iterator[Layer]:
    """Yield the layers of a pipeline that an adapter can change and that are wanted."""
    for component in components:
        module = getattr(pipe, component, None)
        if module is None:
            continue
        for path, layer in module.named_modules():
            if not isinstance(layer, nn.Linear | nn.Conv2d):
                continue
            if wanted(path, layer) if wanted is not None else ATTENTION.search(path):
                yield component, path, layer


def _random_weights(
    layer: nn.Module, rank: int, strength: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    out, *inner = layer.weight.shape
    fan_in = torch.Size(inner).numel()
    down = torch.randn((rank, *inner), generator=generator) / fan_in**0.5
    up = torch.randn((out, rank, *(1 for _ in inner[1:])), generator=generator)
    return down, up * strength / rank**0.5


def _peft(_: Any, component: str, path: str) -> tuple[str, str, str]:
    stem = f"{component}.{path}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.alpha"


def _diffusers(_: Any, component: str, path: str) -> tuple[str, str, str]:
    kind = "lora_linear_layer" if component.startswith("text_encoder") else "lora"
    stem = f"{component}.{path}.{kind}"
    return f"{stem}.down.weight", f"{stem}.up.weight", f"{stem}.alpha"


def _kohya(pipe: Any, component: str, path: str) -> tuple[str, str, str]:
    prefix = _KOHYA_PREFIXES[component]
    if component.startswith("text_encoder") and not path.startswith("text_model."):
        path = f"text_model.{path}"  # Kohya's files know the encoder as it was always built
    if component == "text_encoder" and getattr(pipe, "text_encoder_2", None) is None:
        prefix = "lora_te"
    stem = f"{prefix}_{path.replace('.', '_')}"
    return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"


def _peft_settings(chosen: list[Layer], rank: int, alpha: float) -> dict[str, Any]:
    """Settings as diffusers writes them next to what ``save_lora_weights`` saves."""
    settings: dict[str, Any] = {}
    for component in {component for component, _, _ in chosen}:
        settings[f"{component}.r"] = rank
        settings[f"{component}.lora_alpha"] = alpha
        settings[f"{component}.target_modules"] = [p for c, p, _ in chosen if c == component]
    return settings


def broken_adapter(kind: str, good: Path, folder: Path) -> Path:
    """Write a broken version of a good adapter file in the PEFT format and return its path.

    Args:
        kind: one of ``BROKEN``.
        good: a file as ``random_adapter`` writes it; of two layers at least.
        folder: where to.
    """
    path = folder / f"{kind}{'.bin' if kind == 'pickle' else '.safetensors'}"
    _MAKERS[kind](good, path)
    return path


def _rewritten(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path, Path], None]:
    def make(good: Path, path: Path) -> None:
        save_file({k: t.contiguous() for k, t in change(load_file(good)).items()}, path)

    return make


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    def make(good: Path, path: Path) -> None:
        path.write_bytes(change(good.read_bytes()))

    return make


def _pickled(good: Path, path: Path) -> None:
    torch.save(load_file(good), path)


def _first(tensors: dict[str, torch.Tensor], side: str) -> str:
    return next(key for key in sorted(tensors) if f".lora_{side}." in key)


def _with_value(value: float) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[_first(tensors, "B")].view(-1)[0] = value
        return tensors

    return change


def _without_down(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    del tensors[_first(tensors, "A")]
    return tensors


def _uneven_ranks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    key = _first(tensors, "A")
    tensors[key] = torch.cat([tensors[key], tensors[key][:1]])
    return tensors


def _wider(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: torch.cat([t, t], 1) if ".lora_A." in k else t for k, t in tensors.items()}


def _prefixed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"other.{key.partition('.')[2]}": tensor for key, tensor in tensors.items()}


def _partial(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    stem = _first(tensors, "A").partition(".lora_")[0]
    component = stem.partition(".")[0]
    return {key.replace(f"{stem}.", f"{component}.no.such.layer."): t for key, t in tensors.items()}


def _with_extra(suffix: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stem = _first(tensors, "B").partition(".lora_")[0]
        width = tensors[f"{stem}.lora_B.weight"].shape[0]
        return {**tensors, f"{stem}.{suffix}": torch.ones(width)}

    return change


def _renamed_to(a: str, b: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key.replace("lora_A.weight", a).replace("lora_B.weight", b): tensor
            for key, tensor in tensors.items()
        }

    return change


def _endless_header(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"

_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "pickle": _pickled,
    "pickle_renamed": _pickled,
    "truncated": _bytes(lambda data: data[:-20]),
    "header_only": _bytes(lambda data: data[:30]),
    "garbage": _bytes(lambda _: b"\x00" * 100),
    "endless_header": _bytes(_endless_header),
    "empty_file": _bytes(lambda _: b""),
    "git_lfs_pointer": _bytes(lambda _: _POINTER),
    "no_tensors": _rewritten(lambda _: {}),
    "no_lora": _rewritten(lambda _: {"transformer.proj_out.weight": torch.ones(4, 4)}),
    "wrong_prefix": _rewritten(_prefixed),
    "partial": _rewritten(_partial),
    "other_architecture": _rewritten(_wider),
    "uneven_ranks": _rewritten(_uneven_ranks),
    "up_without_down": _rewritten(_without_down),
    "nan": _rewritten(_with_value(float("nan"))),
    "infinite": _rewritten(_with_value(float("inf"))),
    "dora": _rewritten(_with_extra("lora_magnitude_vector")),
    "lora_bias": _rewritten(_with_extra("lora_B.bias")),
    "weight_difference": _rewritten(_with_extra("diff_b")),
    "lokr": _rewritten(_renamed_to("lokr_w1", "lokr_w2")),
    "loha": _rewritten(_renamed_to("hada_w1_a", "hada_w1_b")),
}

BROKEN = tuple(_MAKERS)
"""The kinds that ``broken_adapter`` makes."""
