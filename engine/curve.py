"""Keys of engines and clients: pairs are made, and put on sockets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from omni_engine.protocol.errors import ConfigError, OmniError
from omni_engine.stages.config import CurveArgs
from omni_engine.stages.key_files import (
    PUBLIC_SUFFIX,
    SECRET_SUFFIX,
    KeyFile,
    read_public_key,
    read_secret_key,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}")


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs to talk to an engine that encrypts.

    Attributes:
        secret_key_file: the client's own ``NAME.key_secret``; nobody else may be able to read it.
        server_key_file: the engine's public key, ``NAME.key``.
    """

    secret_key_file: str | os.PathLike[str]
    server_key_file: str | os.PathLike[str]

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket's connections be encrypted; call it before the socket connects.

        Raises:
            ConfigError: if a file is missing, holds no key, or is secret and others can read it.
        """
        own = load_pair(self.secret_key_file, "secret_key_file")
        try:
            server_key = read_public_key(self.server_key_file)
        except ConfigError as error:
            raise _about(error, "server_key_file", self.server_key_file) from None
        put_pair_on(socket, own)
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_key)


def owner_keys(curve: CurveArgs) -> ClientKeys | None:
    """Return the keys for an engine's owner to use it: its own; None if it needs none."""
    return None if curve.secret_key is None else ClientKeys(curve.secret_key, curve.secret_key)


def put_pair_on(socket: zmq.Socket[bytes], pair: KeyFile) -> None:
    """Let a socket have a pair of keys."""
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret or "")


def load_pair(path: str | os.PathLike[str], field: str) -> KeyFile:
    """Return a pair of keys that belong together.

    Args:
        path: of the secret key file.
        field: the setting that names it, for errors.

    Raises:
        ConfigError: if it is missing or malformed, or others can read it.
    """
    try:
        pair = read_secret_key(path)
        if zmq.curve_public((pair.secret or "").encode()).decode() != pair.public:
            raise ConfigError(f"the two keys in {path} do not belong together")
    except ConfigError as error:
        raise _about(error, field, path) from None
    return pair


def new_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a pair of keys; return the files of the public and of the secret one.

    Args:
        folder: for the files; is created, for us only.
        name: of the files, without their endings.

    Raises:
        ConfigError: if there are such files already, or the name or the folder won't do.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "that can't be the name of a key", field="NAME", value=name,
            expected='letters, digits, "_", ".", "@" and "-"',
        )  # fmt: skip
    public, secret = (folder / f"{name}{suffix}" for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX))
    made: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (secret, public):  # pyzmq would overwrite them, and write for all to read
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            made.append(path)
        zmq.auth.create_certificates(folder, name)
        public.chmod(0o644)
    except OSError as error:
        for path in made:
            path.unlink(missing_ok=True)
        there = isinstance(error, FileExistsError)
        raise ConfigError(
            f"can't make keys in {folder}: {error.strerror}", field="NAME", value=name,
            expected="a name that is not in use" if there else "a folder that you can write to",
            hint="Keys are never overwritten." if there else None,
        ) from None  # fmt: skip
    return public, secret


def _about(error: OmniError, field: str, path: str | os.PathLike[str]) -> ConfigError:
    return ConfigError(error.message, field=field, value=os.fspath(path), hint=error.hint)
