"""Where engines listen: the default endpoint, private directories, one engine per endpoint."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from omni_engine.protocol.errors import ConfigError
from omni_engine.protocol.socket_locks import release_lock, take_lock
from omni_engine.stages.curve_checks import is_beyond_loopback

_IPC = "ipc://"
_ATTEMPTS = 100
"""How often an engine that is just ending may take a lock file away before another gives up."""


def default_endpoint() -> str:
    """Return the endpoint used when none is configured: a socket in a private 0700 directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "omni-engine"
        if base
        else (Path(tempfile.gettempdir()) / f"omni-engine-{os.getuid()}")
    )
    return f"{_IPC}{folder}/engine"


def socket_file(endpoint: str) -> Path | None:
    """Return the file of an ``ipc://`` endpoint; None for one that has none."""
    has_file = endpoint.startswith(_IPC) and not endpoint.startswith(f"{_IPC}@")
    return Path(endpoint.removeprefix(_IPC)) if has_file else None


def check_endpoint(endpoint: str, *, encrypted: bool = False) -> None:
    """Refuse a TCP endpoint beyond loopback, unless connections to it are encrypted.

    Raises:
        ConfigError: with the way out.
    """
    if is_beyond_loopback(endpoint) and not encrypted:
        raise ConfigError(
            "TCP beyond loopback needs keys: without, anyone on the network could use the engine",
            field="endpoint",
            value=endpoint,
            expected="keys, ipc://PATH or tcp://127.0.0.1:PORT",
            hint="Make keys with `omni-engine keys new`; an engine takes them as curve.secret_key "
            "and curve.clients, a client as --key and --server-key (in Python: ClientKeys).",
        )


def bind_endpoint(socket: Any, endpoint: str, *, encrypted: bool = False) -> str:
    """Bind the engine's socket for clients; return the endpoint, with the port that ``*`` became.

    Raises:
        ConfigError: if the endpoint is not acceptable or can't be bound.
    """
    check_endpoint(endpoint, encrypted=encrypted)
    try:
        with _for_us_only():
            socket.bind(endpoint)
    except zmq.ZMQError as error:
        too_long = error.errno == errno.ENAMETOOLONG
        raise ConfigError(
            f"can't listen on {endpoint}: {error.strerror}",
            field="endpoint",
            value=endpoint,
            expected="an address that is free",
            hint="TMPDIR says where private sockets are; make it shorter." if too_long else None,
        ) from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


@contextlib.contextmanager
def _for_us_only() -> Iterator[None]:
    """Let files that are made meanwhile, such as sockets, be ours alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class EndpointLock:
    """Keeps a second engine from taking over an ``ipc://`` endpoint that is in use.

    Creates the socket's directory (mode 0700) where it is missing, and removes the socket and lock
    files at the end.

    Raises:
        ConfigError: on entry, if another engine serves there or the directory is not private.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._path = socket_file(endpoint)
        self._lock: int | None = None
        self._created_directory = False

    def __enter__(self) -> EndpointLock:
        if self._path is None:
            return self
        for _ in range(_ATTEMPTS):
            try:
                self._lock = self._take(self._path)
            except BlockingIOError:
                break
            except OSError as error:
                if _directory_was_taken_away(error, self._path.parent):
                    continue
                raise ConfigError(
                    f"can't make a socket in {self._path.parent}: {error.strerror}",
                    field="endpoint",
                    value=self._endpoint,
                    expected="ipc:// and a path in a directory you can write to",
                ) from None
            if self._lock is not None:
                return self
        raise ConfigError(
            "another engine serves there already",
            field="endpoint",
            value=self._endpoint,
            expected="a free endpoint",
            hint="Stop it, or choose another with --endpoint.",
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._path is None or self._lock is None:
            return
        release_lock(self._path, self._lock)
        if self._created_directory or self._endpoint == default_endpoint():
            with contextlib.suppress(OSError):  # others may keep files there
                self._path.parent.rmdir()

    def _take(self, path: Path) -> int | None:
        """Return a descriptor with the lock; None if what was locked isn't the lock file any more.

        Raises:
            BlockingIOError: if another engine holds the lock.
        """
        folder = path.parent
        self._created_directory = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._endpoint == default_endpoint():
            _check_private(folder, self._endpoint)
        return take_lock(path)


def _directory_was_taken_away(error: OSError, folder: Path) -> bool:
    """Whether an engine that ended removed the directory in between; making it anew will do."""
    if isinstance(error, FileExistsError):  # mkdir's, when it was gone again a moment later
        return folder.is_dir() or not os.path.lexists(folder)
    return isinstance(error, FileNotFoundError)


def _check_private(folder: Path, endpoint: str) -> None:
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & 0o077:
        raise ConfigError(
            "the default socket's directory can be used by others on this machine"
            if mine
            else "the default socket's directory is not your own",
            field="endpoint",
            value=endpoint,
            expected="a directory of your own, of mode 0700",
            hint=f"Run: chmod 700 {folder}" if mine else f"Remove {folder}.",
        )
