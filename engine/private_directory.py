"""A process's private directory, removed at its end, or by the next one if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from omni_engine.protocol import plans

logger = logging.getLogger(__name__)

_ALIVE = "alive"
"""A file that a living owner holds a lock on; who can lock it knows that the owner is dead."""


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory of mode 0700 for as long as the context lasts.

    Directories of engines that were killed together with their workers, and of their gateways, are
    removed first.
    """
    _remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=plans.PRIVATE_DIRECTORY_PREFIX))
    try:
        # Locked before it gets its name: nobody finds it and can lock it.
        with open(directory / "new", "xb", opener=_open_for_us_only) as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
            os.rename(directory / "new", directory / _ALIVE)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _open_for_us_only(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _remove_abandoned() -> None:
    for place in Path(tempfile.gettempdir()).glob(f"{plans.PRIVATE_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has just gone, or is no directory of ours
            _remove_if_abandoned(place)


def _remove_if_abandoned(place: Path) -> None:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(place / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        logger.info("removing %s, which a process that was killed left", place)
        shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(descriptor)
