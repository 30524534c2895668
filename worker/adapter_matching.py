"""Holds an adapter's converted weights against the model: which layers they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers import ModelMixin
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from omni_engine.worker.adapter_file import AdapterFile, some, unusable
from omni_engine.worker.adapter_trace import TensorTrace

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""How names of weights end in PEFT's format."""

Pairs = dict[str, dict[str, Tensor]]
"""Weights by path below a component; those of one layer by ``DOWN`` and ``UP``."""


@dataclass(slots=True)
class _Matched:
    pairs: dict[str, Pairs] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    """Names as after the conversion."""

    unmatched_tensors: list[Tensor] = field(default_factory=list)


def match(
    file: AdapterFile,
    source_layers: Mapping[str, str],
    converted: Mapping[str, Tensor],
    targets: Mapping[str, tuple[str, nn.Module]],
    trace: TensorTrace,
) -> dict[str, Pairs]:
    """Return an adapter's weights by component and path, if all of them fit.

    Args:
        file: the adapter.
        source_layers: the layer that each tensor in question belongs to, by the tensor's name in
            the file.
        converted: what diffusers' converter made of those tensors.
        targets: component and module that names with a prefix are for, by prefix.
        trace: watched the conversion.

    Raises:
        AdapterError: if some layers have no match, or don't fit in kind or shape.
    """
    found = _matched(converted, targets)
    layers = sorted(set(source_layers.values()))
    used = {key for tensor in converted.values() for key in trace.origins(tensor)}
    lost = {source_layers[key] for key in source_layers.keys() - used}
    for tensor in found.unmatched_tensors:
        lost |= {source_layers[key] for key in trace.origins(tensor)}
    if lost or found.unmatched:
        known = next(iter(targets))
        example = next(path for path, m in targets[known][1].named_modules() if _fits(m))
        expected = f"names of the model's layers, such as {known}.{example}.lora_A.weight"
        names = some(sorted(lost) or found.unmatched)
        if len(lost) == len(layers):
            reason = f"none of its {len(layers)} layers is known to the model: {names}"
            hint = "It was made for another model, or its keys lack the model's prefix."
        else:
            hint = None
            count = len(layers) - len(lost)
            reason = (
                f"{count} of its {len(layers)} layers match the model; without a match: {names}"
            )
        raise unusable(file.name, reason, expected=expected, hint=hint)
    for prefix, pairs in found.pairs.items():
        component, module = targets[prefix]
        _check_fit(file.name, component, module, pairs)
    return {targets[prefix][0]: pairs for prefix, pairs in found.pairs.items()}


def _matched(
    converted: Mapping[str, Tensor], targets: Mapping[str, tuple[str, nn.Module]]
) -> _Matched:
    found = _Matched()
    rest = dict(converted)
    for prefix, (_, module) in targets.items():
        own = {key: rest.pop(key) for key in converted if key.startswith(f"{prefix}.")}
        named = {key.removeprefix(f"{prefix}."): tensor for key, tensor in own.items()}
        for key, tensor in (_in_peft_names(module, named) if named else {}).items():
            path, side = key.removesuffix(DOWN).removesuffix(UP), key[-len(DOWN) :]
            if side in (DOWN, UP) and _has_module(module, path):
                found.pairs.setdefault(prefix, {}).setdefault(path, {})[side] = tensor
            else:
                found.unmatched.append(f"{prefix}.{key}")
                found.unmatched_tensors.append(tensor)
    found.unmatched += rest
    found.unmatched_tensors += rest.values()
    return found


def _in_peft_names(module: nn.Module, named: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Return one component's weights under PEFT's names, as diffusers does before it loads them."""
    renamed: dict[str, Tensor]
    if isinstance(module, ModelMixin):
        if "lora_A" in next(iter(named)):
            return named
        renamed = convert_unet_state_dict_to_peft(named)
        return renamed
    renamed = convert_state_dict_to_peft(convert_state_dict_to_diffusers(named))
    if hasattr(module, "text_model"):
        return renamed
    return {key.removeprefix("text_model."): tensor for key, tensor in renamed.items()}


def _has_module(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _fits(module: nn.Module) -> bool:
    return _why_unfit(module) is None


def _why_unfit(module: nn.Module) -> str | None:
    """Return why no update can be applied to a layer; None if one can."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "part of a MultiheadAttention"
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and set(module.dilation) == {1}
        return None if plain and module.padding_mode == "zeros" else "a grouped or dilated Conv2d"
    return None if isinstance(module, nn.Linear) else f"a {type(module).__name__}"


def _check_fit(name: str, component: str, module: nn.Module, pairs: Pairs) -> None:
    wrong = []
    for path, pair in pairs.items():
        layer: Any = module.get_submodule(path)
        if (kind := _why_unfit(layer)) is not None:
            reason = f"it changes {component}.{path}, which is {kind}"
            raise unusable(name, reason, expected="changes of linear and convolution layers only")
        if pair.keys() != {DOWN, UP}:
            raise unusable(name, f"its weights of {component}.{path} are incomplete")
        out, *inner = layer.weight.shape
        down, up = tuple(pair[DOWN].shape), tuple(pair[UP].shape)
        if down[1:] != tuple(inner) or up != (out, down[0], *(1 for _ in inner[1:])):
            wrong.append(f"{component}.{path}: down {down} and up {up} for a layer {(out, *inner)}")
    if wrong:
        reason = f"{len(wrong)} of its {len(pairs)} layers have another shape than {component}'s: "
        hint = "It was made for a model of another size or architecture."
        raise unusable(name, reason + some(wrong), expected="the layers' shapes", hint=hint)
