"""Checks of adapter files: which wait for a worker, and which worker has which.

Pure: no sockets, no clock; a check itself is done by a worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from omni_engine.protocol.adapters import ADAPTER_CHECK

MAX_OUTSTANDING = 4
"""Checks that one worker has at most: enough to keep it reading, few enough to lose with it."""

MAX_TRIES = 2
"""A file that took two workers with it is not given to a third."""


@dataclass(slots=True, eq=False)
class Check:
    """A file that a worker is to check.

    Attributes:
        check_id: unique within the stage.
        name: the adapter's name, for messages.
        path: the file.
        repeats: checks before this one during which the file changed.
        tries: workers that it was given to.
    """

    check_id: int
    name: str
    path: str
    repeats: int = 0
    tries: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return a message for ``codec.encode``."""
        return {
            "type": ADAPTER_CHECK,
            "check_id": self.check_id,
            "name": self.name,
            "path": self.path,
        }


class CheckQueue:
    """The checks of one stage from when they are asked for until they are answered."""

    def __init__(self) -> None:
        self._ids = count()
        self._urgent: OrderedDict[int, Check] = OrderedDict()
        self._waiting: OrderedDict[int, Check] = OrderedDict()
        self._given: dict[str, dict[int, Check]] = {}

    def __len__(self) -> int:
        return len(self._urgent) + len(self._waiting) + sum(map(len, self._given.values()))

    def ask(self, name: str, path: str, *, urgent: bool = False, repeats: int = 0) -> Check:
        """Queue a check; an urgent one goes before those that are not."""
        check = Check(next(self._ids), name, path, repeats)
        (self._urgent if urgent else self._waiting)[check.check_id] = check
        return check

    def hurry(self, check: Check) -> None:
        """Make a check urgent; nothing changes if it waits no longer."""
        if self._waiting.pop(check.check_id, None) is not None:
            self._urgent[check.check_id] = check

    def withdraw(self, check: Check) -> None:
        """Forget a check; a worker's answer to it will be passed over."""
        self._urgent.pop(check.check_id, None)
        self._waiting.pop(check.check_id, None)
        for given in self._given.values():
            given.pop(check.check_id, None)

    def give(self, worker_ids: Sequence[str]) -> list[tuple[str, Check]]:
        """Spread waiting checks over workers; returns who gets which."""
        given: list[tuple[str, Check]] = []
        while (queue := self._urgent or self._waiting) and worker_ids:
            worker_id = min(worker_ids, key=self._outstanding)
            if self._outstanding(worker_id) >= MAX_OUTSTANDING:
                break
            check_id, check = queue.popitem(last=False)
            check.tries += 1
            self._given.setdefault(worker_id, {})[check_id] = check
            given.append((worker_id, check))
        return given

    def answered(self, worker_id: str, check_id: int) -> Check | None:
        """Take note of an answer; returns None if the check was withdrawn."""
        return self._given.get(worker_id, {}).pop(check_id, None)

    def lose(self, worker_id: str) -> list[Check]:
        """Let the checks of a lost worker go to another; returns those that are given up."""
        lost = self._given.pop(worker_id, {})
        for check_id, check in reversed(lost.items()):
            if check.tries < MAX_TRIES:
                self._urgent[check_id] = check
                self._urgent.move_to_end(check_id, last=False)
        return [check for check in lost.values() if check.tries >= MAX_TRIES]

    def drain(self) -> list[Check]:
        """Forget all checks and return them."""
        everything = [*(c for g in self._given.values() for c in g.values())]
        everything += [*self._urgent.values(), *self._waiting.values()]
        self._given.clear()
        self._urgent.clear()
        self._waiting.clear()
        return everything

    def _outstanding(self, worker_id: str) -> int:
        return len(self._given.get(worker_id, {}))
