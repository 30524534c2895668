"""Waits for what other processes and threads do, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], timeout_s: float = 15) -> Any:
    """Return the condition's value once it is true; fail if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)
    return found
