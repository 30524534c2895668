"""Files with CURVE keys, in the format of ``zmq.auth``: read, and refused where others can."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from omni_engine.protocol.errors import ConfigError

PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"

_MAX_BYTES = 65_536
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LINE = re.compile(r'^[ \t]*(public|secret)-key[ \t]*=[ \t]*"([!-~]{40})"[ \t\r]*$', re.MULTILINE)
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class KeyFile:
    """What a file holds; keys are Z85 text of 40 characters.

    Attributes:
        public: the public key.
        secret: the secret key; None in a public file. Never shown.
    """

    public: str
    secret: str | None = field(default=None, repr=False)


def read_public_key(path: str | os.PathLike[str]) -> str:
    """Return the public key in a file, which may be the secret one.

    Raises:
        ConfigError: if the file can't be read or holds no key.
    """
    return _read(Path(path), secret=False).public


def read_secret_key(path: str | os.PathLike[str]) -> KeyFile:
    """Return the pair of keys in a file that nobody else can read.

    Raises:
        ConfigError: if it can't be read, others can, or it holds no secret key.
    """
    return _read(Path(path), secret=True)


def _read(path: Path, *, secret: bool) -> KeyFile:
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is no file")
            text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "make keys with `omni-engine keys new`" if not path.exists() else None
        raise ConfigError(f"the key file {path} can't be read: {reason}", hint=hint) from None
    keys = {kind: key for kind, key in _LINE.findall(text) if _Z85.fullmatch(key)}
    if "public" not in keys:
        raise ConfigError(f"{path} holds no key", hint="make one with `omni-engine keys new`")
    if secret and "secret" not in keys:
        hint = f"name the file that ends with {SECRET_SUFFIX}"
        raise ConfigError(f"{path} holds no secret key", hint=hint)
    if secret and mode & _OTHERS:
        message = f"the secret key {path} can be used by others on this machine"
        raise ConfigError(message, hint=f"run: chmod 600 {path}")
    return KeyFile(keys["public"], keys.get("secret"))


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer blocks
