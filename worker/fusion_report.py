"""What certification found: whether a pipeline's requests share forwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Whether a pipeline's requests share forwards, and why not."""

    fused: bool
    note: str
