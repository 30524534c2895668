"""Runs items together, and in smaller parts what fails: only the culprit ends with the error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from omni_engine.worker.failures import text_of
from omni_engine.worker.memory import MemoryCaps, is_out_of_memory, release_memory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class SharedRun(Generic[Item]):
    """One way of running items together.

    A run that fails is run again in halves if memory ran out, else each item alone.

    Attributes:
        what: is run, for the log: "a step".
        kind: decides the memory of a row; see ``MemoryCaps``.
        attempt: runs items; returns one result per item, or what was raised, bare.
        rows_of: rows of an item.
        memory: which runs are known to be too large.
    """

    what: str
    kind: str
    attempt: Callable[[Sequence[Item]], Sequence[Any] | BaseException]
    rows_of: Callable[[Item], int]
    memory: MemoryCaps

    def run(self, items: Sequence[Item]) -> list[Any]:
        """Return one result per item, in order; an error for one that fails even alone."""
        parts = self.memory.parts(items, self.kind, self.rows_of)
        return [result for part in parts for result in self._run_part(part)]

    def _run_part(self, items: Sequence[Item]) -> list[Any]:
        outcome = self.attempt(items)
        rows = sum(map(self.rows_of, items))
        if not isinstance(outcome, BaseException):
            self.memory.note_worked(self.kind, rows)
            return list(outcome)
        is_memory = is_out_of_memory(outcome)
        if is_memory:
            release_memory()
        if len(items) == 1:
            return [outcome]
        how = "in halves" if is_memory else "each alone"
        logger.warning("%s of %d failed (%s); run again %s",
                       self.what, len(items), text_of(outcome), how)  # fmt: skip
        return self._in_halves(items, rows) if is_memory else self._each_alone(items)

    def _each_alone(self, items: Sequence[Item]) -> list[Any]:
        return [result for item in items for result in self._run_part([item])]

    def _in_halves(self, items: Sequence[Item], rows: int) -> list[Any]:
        middle = len(items) // 2
        results = self.run(items[:middle]) + self.run(items[middle:])
        # One that is too large even alone says nothing about the others.
        if not any(isinstance(r, BaseException) and is_out_of_memory(r) for r in results):
            first = sum(map(self.rows_of, items[:middle]))
            self.memory.note_failed(self.kind, rows, max(first, rows - first))
        return results
