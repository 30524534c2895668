"""What clients and ``Omni`` can ask an engine about itself: state, models, figures, timeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from omni_engine.protocol import messages


class StatusCalls(ABC):
    """Questions of whoever can call an engine."""

    @abstractmethod
    def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        """Send a message and return its answer, or raise the engine's error."""

    def status(self) -> dict[str, Any]:
        """Return the engine's state: stages, workers, queues, counters."""
        status: dict[str, Any] = self._call(messages.STATUS)["status"]
        return status

    def models(self) -> list[dict[str, Any]]:
        """Return the served models: name, state, error, adapters."""
        models: list[dict[str, Any]] = self._call(messages.HELLO, client="")["models"]
        return models

    def metrics(self) -> dict[str, Any]:
        """Return what has happened since the engine's start, in numbers; see docs/protocol.md."""
        metrics: dict[str, Any] = self._call(messages.METRICS)["metrics"]
        return metrics

    def timeline(self, since: int | None = None) -> dict[str, Any]:
        """Return batches and ticks as boxes with their times; see docs/protocol.md.

        Args:
            since: the number of the first box that is wanted: ``next`` of the answer before, or 0
                for all that the engine still has. None for the latest.

        Raises:
            InvalidRequestError: if it is no number of a box.
        """
        timeline: dict[str, Any] = self._call(messages.TIMELINE, since=since)["timeline"]
        return timeline


class AsyncStatusCalls(ABC):
    """``StatusCalls`` for asyncio programs."""

    @abstractmethod
    async def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        """Send a message and return its answer, or raise the engine's error."""

    async def status(self) -> dict[str, Any]:
        """Return the engine's state: stages, workers, queues, counters."""
        status: dict[str, Any] = (await self._call(messages.STATUS))["status"]
        return status

    async def models(self) -> list[dict[str, Any]]:
        """Return the served models: name, state, error, adapters."""
        models: list[dict[str, Any]] = (await self._call(messages.HELLO, client=""))["models"]
        return models

    async def metrics(self) -> dict[str, Any]:
        """Return what has happened since the engine's start; see ``OmniClient.metrics``."""
        metrics: dict[str, Any] = (await self._call(messages.METRICS))["metrics"]
        return metrics

    async def timeline(self, since: int | None = None) -> dict[str, Any]:
        """Return batches and ticks as boxes with their times; see ``OmniClient.timeline``."""
        reply = await self._call(messages.TIMELINE, since=since)
        timeline: dict[str, Any] = reply["timeline"]
        return timeline
