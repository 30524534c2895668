"""The clients that may connect: the public keys in a folder, as they are there now."""

from __future__ import annotations

import logging
import os
import stat

from omni_engine.engine.registered_adapter import FileState, file_state
from omni_engine.protocol.errors import ConfigError
from omni_engine.stages.key_files import PUBLIC_SUFFIX, read_public_key

logger = logging.getLogger(__name__)

_SHOWN = 5
"""Names of ignored files in one warning."""


class AllowedClients:
    """Knows the keys in a folder; looks again at each question, and reads what has changed.

    Args:
        folder: holds one ``NAME.key`` per client.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._read: dict[str, tuple[FileState | None, str | None]] = {}
        self._ignored: set[str] = set()
        self._unreadable = False
        if os.stat(folder).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            logger.warning("others on this machine can let clients in: run: chmod go-w %s", folder)
        self._look()  # what is wrong there shows at the start

    def name_of(self, public_key: str) -> str | None:
        """Return the name of the client with a key; None if it may not connect.

        Args:
            public_key: Z85 text.
        """
        self._look()
        names = (name for name, (_, key) in self._read.items() if key == public_key)
        return next((name.removesuffix(PUBLIC_SUFFIX) for name in names), None)

    def _look(self) -> None:
        try:
            there = os.listdir(self._folder)
        except OSError as error:
            if not self._unreadable:  # told once: whoever is refused comes again and again
                logger.error(
                    "nobody can connect: %s can't be read: %s", self._folder, error.strerror
                )
            self._unreadable, there = True, []
        else:
            self._unreadable = False
        self._warn_of_others(there)
        found = {}
        for name in (name for name in there if name.endswith(PUBLIC_SUFFIX)):
            path = os.path.join(self._folder, name)
            state, known = file_state(path), self._read.get(name)
            found[name] = known if known and known[0] == state else (state, _key_in(path))
        self._read = found

    def _warn_of_others(self, there: list[str]) -> None:
        """Warn, once, of files whose names keep them from counting as keys."""
        ignored = {n for n in there if not n.endswith(PUBLIC_SUFFIX) and not n.startswith(".")}
        if new := sorted(ignored - self._ignored):
            more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
            logger.warning(
                "ignored in %s: %s%s; only files named NAME%s let clients in",
                self._folder, ", ".join(new[:_SHOWN]), more, PUBLIC_SUFFIX,
            )  # fmt: skip
        self._ignored = ignored


def _key_in(path: str) -> str | None:
    try:
        return read_public_key(path)
    except ConfigError as error:
        logger.warning("nobody can connect with %s: %s", path, error.message)
        return None
