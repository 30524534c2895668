"""Pictures that have joined a step loop and wait to be encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.residents import Picture
from omni_engine.worker.step_calls import error_of


class Newcomers:
    """Keeps pictures in the order in which they came until their adapters are loaded.

    Args:
        adapters: tells which are loaded.
    """

    def __init__(self, adapters: AdapterAccess) -> None:
        self._adapters = adapters
        self._waiting: deque[Picture] = deque()

    def extend(self, pictures: Iterable[Picture]) -> None:
        """Take pictures in."""
        self._waiting.extend(pictures)

    def take(
        self,
        most: int,
        is_wanted: Callable[[Picture], bool],
        fail: Callable[[Picture, BaseException], None],
        *,
        wait: bool,
    ) -> list[Picture]:
        """Return the next pictures whose adapters are loaded.

        Args:
            most: how many at most.
            is_wanted: whether a picture's request goes on; others are forgotten.
            fail: told of those whose adapter can't be loaded.
            wait: whether to wait for the first one's adapter if none is loaded.
        """
        newcomers = [picture for picture in self._waiting if is_wanted(picture)]
        ready = [one for one in newcomers if self._adapters.is_ready(one.request_id)]
        chunk = (ready or (newcomers[:1] if wait else []))[:most]
        self._waiting = deque(one for one in newcomers if one not in chunk)
        loaded: list[Picture] = []
        for picture in chunk:
            if (error := error_of(self._adapters.wait_ready, picture.request_id)) is None:
                loaded.append(picture)
            else:
                fail(picture, error)
        return loaded
