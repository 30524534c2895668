"""Memory that all requests together may take at a time; who comes when it's taken waits."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Bytes that are lent, in the order in which they were asked for.

    Args:
        total: bytes in all.
    """

    def __init__(self, total: int) -> None:
        self._left = self.total = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Wait for so many bytes; who takes them gives them back.

        Args:
            size: at most the total.
        """
        if not self._waiting and size <= self._left:
            self._left -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # lent in the same moment
                self.give_back(size)
            else:
                self._waiting.remove((size, turn))
                self._lend()
            raise

    def give_back(self, size: int) -> None:
        """Take bytes back, and lend them to those who wait."""
        self._left += size
        self._lend()

    def _lend(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            self._left -= size
            turn.set_result(None)


class Lease:
    """What one request has of a budget.

    Args:
        budget: that it is taken from.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget, self._taken = budget, 0

    async def take(self, size: int) -> None:
        """Wait for so many bytes more."""
        await self._budget.take(size)
        self._taken += size

    def end(self) -> None:
        """Give everything back."""
        self._budget.give_back(self._taken)
        self._taken = 0
