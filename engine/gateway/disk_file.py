"""Files on disk that last as long as somebody holds them, and take no descriptor meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import weakref
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from omni_engine.engine.gateway.errors import GatewayError


class DiskFile:
    """An empty file that is removed when nobody refers to this object any more.

    Args:
        directory: holds it; removing that is up to who made it.

    Raises:
        OSError: if there is no room for it.
    """

    def __init__(self, directory: Path) -> None:
        descriptor, self._path = tempfile.mkstemp(dir=directory)
        os.close(descriptor)
        weakref.finalize(self, _remove, self._path)

    @property
    def path(self) -> str:
        """Where it is."""
        return self._path

    @functools.cached_property
    def size(self) -> int:
        """Bytes in it; to be asked once it is complete."""
        return os.stat(self._path).st_size

    def response(self, media_type: str, headers: dict[str, str]) -> FileResponse:
        """Return a response with its content, or the part of it that is asked for."""
        return _DiskFileResponse(self, media_type, headers)


class _DiskFileResponse(FileResponse):
    """Holds the file until it is sent, whatever becomes of it meanwhile."""

    def __init__(self, file: DiskFile, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(file.path, headers=headers, media_type=media_type)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            GatewayError: if the part that is asked for can't be had.
        """

        async def checked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                raise _no_such_part(message["status"], Headers(raw=message["headers"]))
            await send(message)

        await super().__call__(scope, receive, checked)


def _no_such_part(status: int, headers: Headers) -> GatewayError:
    size = headers.get("content-range")
    told = "is malformed" if size is None else f"asks for what is not there ({size})"
    return GatewayError(
        status,
        f"The Range header {told}. Expected: bytes=FIRST-LAST, counted from 0.",
        "Range",
        "invalid_range",
        None if size is None else {"Content-Range": size},
    )


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # its directory went first
        os.unlink(path)
