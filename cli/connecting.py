"""From ``--connect`` to an engine: the address is checked and tried before a client is made."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omni_engine.cli import interrupts
from omni_engine.protocol.errors import ConfigError, EngineClosedError

if TYPE_CHECKING:
    from omni_engine.engine.client import OmniClient
    from omni_engine.engine.curve import ClientKeys

AUTO = "auto"
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class KeyOptions:
    """Options of commands that connect to an engine that encrypts."""

    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", envvar="OMNI_ENGINE_KEY", rich_help_panel="Keys",
                     help="Your secret key, for an engine that encrypts (NAME.key_secret)."),
    ] = None  # fmt: skip
    server_key: Annotated[
        Path | None,
        typer.Option("--server-key", metavar="FILE", envvar="OMNI_ENGINE_SERVER_KEY",
                     rich_help_panel="Keys", help="That engine's public key (NAME.key)."),
    ] = None  # fmt: skip

    def keys(self) -> ClientKeys | None:
        """Return the keys that were given, if they were.

        Raises:
            ConfigError: if only one of two was.
        """
        from omni_engine.engine.curve import ClientKeys

        if self.key is not None and self.server_key is not None:
            return ClientKeys(self.key, self.server_key)
        for flag, value, other in (
            ("--key", self.key, "--server-key"),
            ("--server-key", self.server_key, "--key"),
        ):
            if value is not None:
                raise ConfigError(
                    f"{flag} has no effect without {other}", field=flag, value=str(value),
                    expected=f"{other} FILE to be given as well",
                )  # fmt: skip
        return None


def keys_on_command_line(context: typer.Context) -> bool:
    """Return whether keys were given as options, not just in the environment."""
    sources = (context.get_parameter_source(name) for name in ("key", "server_key"))
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def resolve_endpoint(address: str, keys: ClientKeys | None = None) -> str:
    """Return the endpoint that ``--connect`` names.

    Raises:
        ConfigError: if it isn't an address that a client may use.
        EngineClosedError: if nobody listens there; a ZeroMQ client would wait for somebody.
    """
    from pydantic import TypeAdapter, ValidationError

    from omni_engine.engine.endpoints import check_endpoint, default_endpoint
    from omni_engine.stages.config import Endpoint
    from omni_engine.stages.config_words import allowed

    if address == AUTO:
        address = default_endpoint()
    try:
        TypeAdapter(Endpoint).validate_python(address)
    except ValidationError:
        raise ConfigError(
            "--connect takes an engine's address", field="--connect", value=address,
            expected=f'"{AUTO}", or {allowed(("endpoint",))}',
        ) from None  # fmt: skip
    check_endpoint(address, encrypted=keys is not None)
    _probe(address)
    return address


@contextmanager
def connected(
    address: str, options: KeyOptions, *, reconnect_timeout_s: float | None = None
) -> Iterator[OmniClient]:
    """Connect to a running engine.

    Args:
        address: as of ``--connect``.
        options: the keys.
        reconnect_timeout_s: how long the engine may be silent; None for the client's default.

    Raises:
        ConfigError: if the address or a key is wrong.
        EngineClosedError: if no engine answers there, or it refuses the keys.
    """
    from omni_engine.engine.client import OmniClient

    interrupts.release()
    keys = options.keys()
    limits = {} if reconnect_timeout_s is None else {"reconnect_timeout_s": reconnect_timeout_s}
    with OmniClient(resolve_endpoint(address, keys), keys=keys, **limits) as client:
        yield client


@contextmanager
def lost_engine() -> Iterator[None]:
    """Say what to do when the engine that a block watches goes away.

    Raises:
        EngineClosedError: if it has; with a hint.
    """
    try:
        yield
    except EngineClosedError as error:
        raise EngineClosedError(
            error.message, field="--connect",
            hint="It has ended, or is stuck. Start it with `omni-engine serve`, then try again.",
        ) from None  # fmt: skip


def _probe(endpoint: str) -> None:
    scheme, _, place = endpoint.partition("://")
    try:
        if scheme == "tcp":
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            probe.connect("\0" + place[1:] if place.startswith("@") else place)
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise EngineClosedError(
            f"no engine answers at {endpoint}: {reason}", field="--connect", value=endpoint,
            hint="Start one with `omni-engine serve`, or name its address.",
        ) from None  # fmt: skip
