"""Reads the small notations of the command line: ``NAME:SCALE``, ``NAME=VALUE``, JSON."""

from __future__ import annotations

import json
from typing import Any

from omni_engine.protocol.errors import ConfigError


def parse_lora(text: str) -> tuple[str, float | None]:
    """Split ``NAME[:SCALE]``; what follows a colon and is no number belongs to the name."""
    name, _, scale = text.rpartition(":")
    try:
        return (name, float(scale)) if name else (text, None)
    except ValueError:
        return text, None


def parse_assignment(flag: str, text: str, wanted: str) -> tuple[str, str]:
    """Split ``NAME=VALUE``.

    Raises:
        ConfigError: if a part is missing.
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigError(f"{flag} takes {wanted}", field=flag, value=text, expected=wanted)
    return name, value


def parse_lora_module(text: str) -> dict[str, str]:
    """Return the entry of ``lora_modules`` that a ``NAME=PATH`` means.

    Raises:
        ConfigError: if a part is missing.
    """
    name, path = parse_assignment("--lora-modules", text, "NAME=PATH")
    return {"name": name, "path": path}


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the value of ``--default-sampling-params``.

    Raises:
        ConfigError: if it is no JSON object.
    """
    try:
        if isinstance(value := json.loads(text), dict):
            return value
    except json.JSONDecodeError:
        pass
    raise ConfigError("--default-sampling-params takes a JSON object",
                      field="--default-sampling-params", value=text,
                      expected='an object such as {"num_inference_steps": 8}')  # fmt: skip
