"""What certification found: whether a pipeline's requests share forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from omni_engine.worker.call_rules import Kind

Source = Literal["table", "observed", "inferred"]


@dataclass(frozen=True, slots=True)
class FusionReport:
    """Whether a pipeline's requests share forwards, and why not.

    Attributes:
        fused: whether the denoisers' forwards are shared.
        finding: how requests are batched, or why they are not.
        encoders: whether text encoders are shared and remembered.
        sources: how it is known how a denoiser's arguments combine, by component: "table",
            "observed" or "inferred".
        observed: the observed rules that were certified, by component and argument.
        certified_at: when requests were compared, in UTC; None if none were.
        cached: whether that was in an earlier process.
        tolerance: by how much results could differ, the median over the requests; None if none
            were compared.
    """

    fused: bool
    finding: str
    encoders: bool = True
    sources: Mapping[str, Source] = field(default_factory=dict)
    observed: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict)
    certified_at: str | None = None
    cached: bool = False
    tolerance: float | None = None

    @property
    def provenance(self) -> str:
        """When requests were compared, for status; empty if none were."""
        if self.certified_at is None:
            return ""
        return f"certified {self.certified_at}; cached" if self.cached else "certified at load"

    @property
    def note(self) -> str:
        """The finding and when it was made; shown in status."""
        return f"{self.finding} ({self.provenance})" if self.provenance else self.finding
