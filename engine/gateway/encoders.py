"""Threads for work that would hold up the event loop: encoding, decoding, base64."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_NICENESS = 15

P = ParamSpec("P")
R = TypeVar("R")


class EncoderPool:
    """A few threads that leave the processor to the workers when these need it.

    Args:
        threads: how many.
        observe: told how many seconds each call took.
    """

    def __init__(self, threads: int, observe: Callable[[float], None] = lambda _: None) -> None:
        self._threads = ThreadPoolExecutor(threads, "omni-encoder", _step_back)
        self._observe = observe

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function in one of the threads and return what it returns.

        Cancelling the wait leaves a call that has begun running; one that has not is dropped.
        """

        def timed() -> R:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._observe(time.perf_counter() - began)

        return await asyncio.wrap_future(self._threads.submit(timed))

    def close(self) -> None:
        """End the threads once they are done; what has not begun is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _step_back() -> None:
    """Lower the calling thread's priority; only Linux has one for each thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
