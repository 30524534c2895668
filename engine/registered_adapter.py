"""One name of the adapter registry: what it means now, and what its file looked like."""

from __future__ import annotations

import os
import stat
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from omni_engine.engine.adapter_checks import Check
from omni_engine.protocol.adapters import Adapter, AdapterReport
from omni_engine.protocol.errors import (
    ModelLoadError,
    OmniError,
    UnknownAdapterError,
    nearest,
    shorten,
)

_HOW_TO_REGISTER = "Register it under lora_modules or with `omni-engine loras load` first."
_NAMES_SHOWN = 20
_NAMES_COMPARED = 1000
"""Looking for the nearest of more names than these would hold up the engine."""


class FileState(NamedTuple):
    """What tells without reading a file that it is not the one seen before.

    Copying may keep the time of modification, but not that of the change.
    """

    mtime_ns: int
    ctime_ns: int
    size: int
    inode: int


def file_state(path: str) -> FileState | None:
    """Look at a file; None if there is none, or nothing that may be read."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait, perhaps for ever
        return None
    return FileState(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


@dataclass(slots=True, eq=False)
class RegisteredAdapter:
    """What a name means.

    Attributes:
        name: what requests call it.
        path: the safetensors file.
        default_scale: strength of requests that give none.
        pin: whether workers always keep it on the device.
        preload: whether workers load it before anybody asks.
        confined: whether the file must stay where its path says, reached through no link.
        asked_by: the client that asked for its load; None for those of the configuration.
        adapter: the content in force; None before the first good verdict.
        report: what that content holds.
        error: why the name can't be used, or why the file's new content can't.
        check: of the file as it is now, until its verdict.
        seen: the file when its check was asked for; None if there was none.
        changed: whether the file changed again while it was checked.
    """

    name: str
    path: str
    default_scale: float = 1.0
    pin: bool = False
    preload: bool = False
    confined: bool = False
    asked_by: Hashable | None = None
    adapter: Adapter | None = None
    report: AdapterReport | None = None
    error: OmniError | None = None
    check: Check | None = None
    seen: FileState | None = None
    changed: bool = False

    @property
    def state(self) -> str:
        """``checking``, ``ready`` or ``broken``."""
        if self.check is not None:
            return "checking"
        return "broken" if self.adapter is None else "ready"

    @property
    def digest(self) -> str | None:
        """SHA-256 of the content in force, hex."""
        return None if self.adapter is None else self.adapter.digest

    def put_in_force(self, report: AdapterReport) -> None:
        """Take the content that a worker has found to be good."""
        self.adapter = Adapter(self.name, self.path, report.digest, self.default_scale)
        self.report, self.error = report, None

    def find_unreadable(self) -> OmniError | None:
        """Return why the file can't be what the name means, if that shows without reading it."""
        if self.seen is None:
            return self._gone(f"there is no file {self.path}")
        if self.confined and os.path.realpath(self.path) != self.path:
            return self._gone(f"{self.path} leads elsewhere now")
        return None

    def _gone(self, reason: str) -> OmniError:
        kept = "" if self.adapter is None else "; its content of before stays in force"
        return ModelLoadError(
            f"adapter {self.name!r}: {reason}{kept}",
            field="lora_modules",
            value=self.name,
            expected="a safetensors file that stays where it was registered",
        )


class Settled(NamedTuple):
    """What a verdict came to.

    Attributes:
        entry: the adapter that was checked.
        error: why the file is not in force, if it isn't.
        done: False if the file has to be checked again, because it changed meanwhile.
        open: whether requests that wait for the name have to wait on.
        retired: the content that was in force before.
    """

    entry: RegisteredAdapter
    error: OmniError | None = None
    done: bool = True
    open: bool = False
    retired: str | None = None


def unknown_adapter(
    name: str, known: Iterable[str], field: str = "lora_request.name"
) -> UnknownAdapterError:
    """Build the error for a name that is not registered, naming the nearest one that is."""
    names = sorted(known)
    close = nearest(name, names) if len(names) <= _NAMES_COMPARED else None
    expected = "one of " + ", ".join(names[:_NAMES_SHOWN])
    if more := names[_NAMES_SHOWN:]:
        expected += f" and {len(more)} more"
    return UnknownAdapterError(
        f"no adapter named {shorten(name)!r} is registered",
        field=field,
        value=name,
        expected=expected if names else "no adapter: this stage has none registered",
        hint=f"Did you mean {close!r}?" if close else _HOW_TO_REGISTER,
    )
