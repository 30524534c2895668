"""Files without a name, which last as long as somebody holds them and are never left over."""

from __future__ import annotations

import os
import tempfile
import weakref

from starlette.responses import FileResponse


class UnnamedFile:
    """An empty file without a name, on disk in the folder for temporary files.

    Its room is free again when nobody refers to this object any more, or the process has ended.

    Raises:
        OSError: if there is no room for it.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def path(self) -> str:
        """Where this process, and no other, can open it by."""
        return f"/proc/self/fd/{self._descriptor}"

    @property
    def size(self) -> int:
        """Bytes in it."""
        return os.fstat(self._descriptor).st_size

    def response(self, media_type: str, headers: dict[str, str]) -> FileResponse:
        """Return a response with its content, or the part of it that is asked for."""
        return _UnnamedFileResponse(self, media_type, headers)


class _UnnamedFileResponse(FileResponse):
    """Holds the file until it is sent, whatever becomes of it meanwhile."""

    def __init__(self, file: UnnamedFile, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(file.path, headers=headers, media_type=media_type)
        self._file = file
