"""The lock beside an engine's socket file: who holds it owns the socket, or may take it away."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_ATTEMPTS = 20
_RETRY_S = 0.01


def lock_path(socket: Path) -> Path:
    """Return the lock file of a socket file."""
    return socket.with_name(socket.name + ".lock")


def take_lock(socket: Path) -> int | None:
    """Return a descriptor with the lock; None if what was locked isn't the lock file any more.

    Raises:
        BlockingIOError: if another engine holds the lock.
        OSError: if the lock file can't be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(lock_path(socket), flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), lock_path(socket).stat()):
            return descriptor
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, FileNotFoundError):  # its engine has ended and removed it
            return None
        raise
    os.close(descriptor)
    return None


def release_lock(socket: Path, descriptor: int) -> None:
    """Take a socket file and its lock file away."""
    for path in (socket, lock_path(socket)):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def remove_if_abandoned(socket: Path) -> None:
    """Take the socket file of an engine that has just died away, unless another serves there."""
    for _ in range(_ATTEMPTS):
        if not lock_path(socket).exists():
            return
        try:
            descriptor = take_lock(socket)
        except BlockingIOError:  # the system may not have released it yet
            time.sleep(_RETRY_S)
        except OSError:  # the folder is gone, or no longer ours
            return
        else:
            if descriptor is not None:
                release_lock(socket, descriptor)
                return
