"""The bundled default model: a small Qwen-Image pipeline that draws coloured shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODEL_DIR = Path(__file__).parent / "model"
"""A plain diffusers folder; load it with any tool that loads diffusers pipelines."""

ADAPTER_DIR = Path(__file__).parent / "adapters"
"""The style adapters trained for the bundled model, one safetensors file each."""

SAMPLING_DEFAULTS: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_inference_steps": 16,
    "true_cfg_scale": 3.0,
    "negative_prompt": " ",
}
"""What the bundled model was trained and scored with."""
