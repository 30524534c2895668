"""What certification found: whether a pipeline's requests share forwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Whether a pipeline's requests share forwards, and why not.

    Attributes:
        fused: whether the denoisers' forwards are shared.
        note: how requests are batched, or why they are not; shown in status.
        encoders: whether text encoders are shared and remembered.
    """

    fused: bool
    note: str
    encoders: bool = True
