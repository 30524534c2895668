"""The training settings in an adapter's file: which of them count, and which can't be served."""

from __future__ import annotations

import json
from typing import Any

_APPLIED = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules"}
)
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""They matter in training, or say where the weights are, which the file's tensors do as well."""

_PLAIN_VALUES = {"bias": "none", "peft_type": "LORA"}
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""What weights were before training; other starts change the model's own weights, too."""


def checked_settings(text: str | None) -> dict[str, Any] | None:
    """Return a file's settings as diffusers takes them; None where it has none.

    Args:
        text: JSON of the settings, by component: {"transformer.r": 8, ...}.

    Raises:
        ValueError: if it is no such JSON, or a setting asks for what is no plain LoRA.
    """
    if not text:
        return None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError("the settings in its file (lora_adapter_metadata) are no JSON object")
    for key, value in settings.items():
        field = key.rpartition(".")[2]
        if field == "init_lora_weights" and value in _PLAIN_STARTS:
            settings[key] = True
        elif field in _APPLIED | _WITHOUT_EFFECT or not value:
            continue
        elif _PLAIN_VALUES.get(field) != value:
            raise ValueError(f"its settings ask for {field}: {value!r}, which isn't plain LoRA")
    return settings
