"""What is known of diffusers pipeline families beyond their signatures.

The general mechanism never needs an entry here; an entry only allows a faster path or a better
message. Keyed by class name, so that nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_engine.stages import bundled


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one pipeline class.

    Attributes:
        exact_list_call: one ``__call__`` with lists of prompts, negative prompts and generators
            gives each row the picture it would get alone, ragged prompts included.
    """

    exact_list_call: bool = False


FAMILIES: dict[str, Family] = {
    "QwenImagePipeline": Family(exact_list_call=True),
}


def family_of(class_name: str) -> Family:
    """Return what is known of a pipeline class; nothing for an unknown one."""
    return FAMILIES.get(class_name, Family())


def model_defaults(model: str) -> dict[str, Any]:
    """Return the sampling parameters that suit a known model better than its pipeline's own.

    Args:
        model: the resolved model: a folder or a hub id.
    """
    return dict(bundled.SAMPLING_DEFAULTS) if model == str(bundled.MODEL_DIR) else {}
