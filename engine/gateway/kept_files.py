"""Files that are kept for a while, in bounded memory."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from omni_engine.engine.gateway.errors import GatewayError

_NAME_BYTES = 24


@dataclass(frozen=True)
class KeptFile:
    """A file that is kept.

    Attributes:
        data: its content.
        media_type: its content type.
        until: the clock's time when it is forgotten.
    """

    data: bytes
    media_type: str
    until: float


class KeptFiles:
    """Files by names that nobody can guess; the oldest go first when there is no room.

    Args:
        most_bytes: of all files together.
        ttl_s: seconds for which a file is kept.
        clock: returns seconds.
    """

    def __init__(
        self, most_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes, self._ttl_s, self._clock = most_bytes, ttl_s, clock
        self._files: OrderedDict[str, KeptFile] = OrderedDict()
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of all files together."""
        return self._bytes

    def keep(self, data: bytes, media_type: str) -> str:
        """Keep a file; return its name.

        Raises:
            GatewayError: if it alone is larger than all may be.
        """
        if len(data) > self._most_bytes:
            raise GatewayError(
                400,
                f"The picture has {len(data)} bytes, and at most {self._most_bytes} are kept "
                '(http.max_kept_bytes). Ask for it with response_format "b64_json".',
                "response_format",
                "limit_exceeded",
            )
        self._forget_expired()
        while self._bytes + len(data) > self._most_bytes:
            self._forget(next(iter(self._files)))
        name = f"{secrets.token_urlsafe(_NAME_BYTES)}.{media_type.rpartition('/')[2]}"
        self._files[name] = KeptFile(data, media_type, self._clock() + self._ttl_s)
        self._bytes += len(data)
        return name

    def find(self, name: str) -> KeptFile | None:
        """Return a file; None if there is none of that name (any more)."""
        self._forget_expired()
        return self._files.get(name)

    def seconds_left(self, file: KeptFile) -> int:
        """Return for how long a file will still be there."""
        return max(0, int(file.until - self._clock()))

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._files and (name := next(iter(self._files))):
            if self._files[name].until > now:
                return
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._bytes -= len(self._files.pop(name).data)
