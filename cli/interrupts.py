"""Ctrl-C and SIGTERM in commands that own an engine: nothing gets lost, nothing stays behind.

While libraries are imported and settings are checked, native code may swallow a KeyboardInterrupt;
so ``hold`` notes Ctrl-C and ``release`` raises it.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pending: list[int] = []


def hold() -> None:
    """Note Ctrl-C from now on; does nothing where SIGINT is ignored, as in background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def release() -> None:
    """Let Ctrl-C interrupt from now on.

    Raises:
        KeyboardInterrupt: if it was pressed while it was held.
    """
    if signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _pending:
        _pending.clear()
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Hold Ctrl-C for a block that must not be left half done."""
    hold()
    try:
        yield
    finally:
        release()


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the block like an exception, so that what it started is ended."""
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _note(number: int, _frame: FrameType | None) -> None:
    _pending.append(number)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
