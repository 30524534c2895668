"""What a picture's forwards cost and whom it shared them with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepCounts:
    """Counts over the denoiser forwards of one picture.

    Attributes:
        forwards: forwards it took part in.
        shared_with: requests in them, summed.
        largest: most requests in one of them.
    """

    forwards: int = 0
    shared_with: int = 0
    largest: int = 0

    @property
    def mean(self) -> float:
        """Mean number of requests in a forward."""
        return self.shared_with / self.forwards if self.forwards else 1.0

    def add(self, requests: int) -> None:
        """Count one forward that ``requests`` requests took part in."""
        self.forwards += 1
        self.shared_with += requests
        self.largest = max(self.largest, requests)
