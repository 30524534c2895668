"""The bundled default model: a small Qwen-Image pipeline that draws coloured shapes."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""A plain diffusers folder; load it with any tool that loads diffusers pipelines."""

ADAPTER_DIR = Path(__file__).parent / "adapters"
"""The style adapters trained for the bundled model, one safetensors file each."""
