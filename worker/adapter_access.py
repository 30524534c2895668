"""What running requests need of adapters; ``AdapterRuntime`` gives it, or nobody does."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from omni_engine.protocol.adapters import AdapterActivation, shared_activation
from omni_engine.protocol.outputs import AppliedLoRA


class AdapterAccess(Protocol):
    """Keeps each request's adapters and makes them active while its forwards run."""

    def assign(self, request_id: str, activation: AdapterActivation | None) -> None:
        """Let a request run under adapters, or none, until it is released."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended."""

    def is_ready(self, request_id: str) -> bool:
        """Whether a request can run without waiting for a load, or its load has failed."""

    def lacks_room(self, request_id: str) -> bool:
        """Whether a request that isn't ready waits for room only; running it makes some."""

    def wait_ready(self, request_id: str) -> None:
        """Wait for a request's adapters; raises ``OmniError`` if one can't be loaded."""

    def applied(self, request_id: str) -> list[AppliedLoRA]:
        """Return what a request runs under, for its output to report."""

    def identity(self, request_id: str | None, component: str | None) -> Hashable:
        """Return what a component's outputs depend on beside its inputs; None: the bare model."""

    def rows(
        self, component: str | None, owners: Sequence[tuple[str | None, int]]
    ) -> AbstractContextManager[None]:
        """Make a forward's adapters active.

        Args:
            component: whose forward it is.
            owners: the requests whose rows it holds, and how many rows of each, in order.
        """

    def everywhere(self, activation: AdapterActivation | None) -> AbstractContextManager[None]:
        """Make adapters active for forwards that nobody accounts for."""


def under_shared(
    adapters: AdapterAccess, activations: Iterable[AdapterActivation | None]
) -> AbstractContextManager[None]:
    """Make what several requests share active everywhere; change nothing if they differ."""
    shared = shared_activation(activations)
    return contextlib.nullcontext() if shared is None else adapters.everywhere(*shared)


class NoAdapters:
    """The bare model for every request."""

    def assign(self, request_id: str, activation: AdapterActivation | None) -> None:
        """Do nothing: requests with adapters are not admitted."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Do nothing."""

    def is_ready(self, request_id: str) -> bool:
        """Return True."""
        return True

    def lacks_room(self, request_id: str) -> bool:
        """Return False."""
        return False

    def wait_ready(self, request_id: str) -> None:
        """Do nothing."""

    def applied(self, request_id: str) -> list[AppliedLoRA]:
        """Return nothing."""
        return []

    def identity(self, request_id: str | None, component: str | None) -> Hashable:
        """Return None: the bare model."""
        return None

    def rows(
        self, component: str | None, owners: Sequence[tuple[str | None, int]]
    ) -> AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()

    def everywhere(self, activation: AdapterActivation | None) -> AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()
