"""From ``--connect`` to an engine: the address is checked and tried before a client is made."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omni_engine.cli import interrupts
from omni_engine.protocol.errors import ConfigError, EngineClosedError

if TYPE_CHECKING:
    from omni_engine.engine.client import OmniClient

AUTO = "auto"
_PROBE_TIMEOUT_S = 5.0


def resolve_endpoint(address: str) -> str:
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
    check_endpoint(address)
    _probe(address)
    return address


@contextmanager
def connected(address: str) -> Iterator[OmniClient]:
    """Connect to a running engine.

    Raises:
        ConfigError: if the address is wrong.
        EngineClosedError: if no engine answers there.
    """
    from omni_engine.engine.client import OmniClient

    interrupts.release()
    with OmniClient(resolve_endpoint(address)) as client:
        yield client


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
