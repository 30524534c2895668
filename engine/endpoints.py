"""Where engines listen: the default endpoint, private directories, one engine per endpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from omni_engine.protocol.errors import ConfigError

_IPC = "ipc://"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def default_endpoint() -> str:
    """Return the endpoint used when none is configured: a socket in a private 0700 directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "omni-engine"
        if base
        else (Path(tempfile.gettempdir()) / f"omni-engine-{os.getuid()}")
    )
    return f"{_IPC}{folder}/engine"


def check_endpoint(endpoint: str) -> None:
    """Refuse a TCP endpoint beyond loopback.

    Raises:
        ConfigError: with the way out.
    """
    if endpoint.startswith("tcp://"):
        host = endpoint.removeprefix("tcp://").rpartition(":")[0]
        if host not in _LOOPBACK:
            raise ConfigError(
                "TCP beyond loopback would let anyone on the network use the engine",
                field="endpoint",
                value=endpoint,
                expected="ipc://PATH or tcp://127.0.0.1:PORT",
                hint="Encrypted TCP is not available in this version; tunnel the loopback port.",
            )


def bind_endpoint(socket: Any, endpoint: str) -> str:
    """Bind the engine's socket for clients; return the endpoint, with the port that ``*`` became.

    Raises:
        ConfigError: if the endpoint is not acceptable or can't be bound.
    """
    check_endpoint(endpoint)
    try:
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


class EndpointLock:
    """Keeps a second engine from taking over an ``ipc://`` endpoint that is in use.

    Creates the socket's directory (mode 0700) where it is missing, and removes the socket and lock
    files at the end.

    Raises:
        ConfigError: on entry, if another engine serves there or the directory is not private.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        is_path = endpoint.startswith(_IPC) and not endpoint.startswith(f"{_IPC}@")
        self._path = Path(endpoint.removeprefix(_IPC)) if is_path else None
        self._file: Any = None
        self._created_directory = False

    def __enter__(self) -> EndpointLock:
        if self._path is None:
            return self
        folder = self._path.parent
        self._created_directory = not folder.exists()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner(folder)
            self._file = self._lock_path.open("w")
        except OSError as error:
            raise ConfigError(
                f"can't make a socket in {folder}: {error.strerror}",
                field="endpoint",
                value=self._endpoint,
                expected="ipc:// and a path in a directory you can write to",
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                "another engine serves there already",
                field="endpoint",
                value=self._endpoint,
                expected="a free endpoint",
                hint="Stop it, or choose another with --endpoint.",
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._path is None:
            return
        for path in (self._path, self._lock_path):
            path.unlink(missing_ok=True)
        self._file.close()
        if self._created_directory:
            with contextlib.suppress(OSError):  # others may keep files there
                self._path.parent.rmdir()

    def _check_owner(self, folder: Path) -> None:
        if self._endpoint == default_endpoint() and folder.stat().st_uid != os.getuid():
            raise ConfigError(
                "the socket's directory belongs to another user",
                field="endpoint",
                value=self._endpoint,
                expected="a directory of your own",
            )

    @property
    def _lock_path(self) -> Path:
        if self._path is None:
            raise ValueError("only ipc endpoints are locked")
        return self._path.with_name(self._path.name + ".lock")
