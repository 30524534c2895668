"""What can be wrong with where clients connect and with the keys that it takes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from omni_engine.protocol.errors import ConfigError
from omni_engine.stages.key_files import read_secret_key

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_TCP = re.compile(r"tcp://[^\s/]+:([0-9]{1,5}|\*)")


def is_beyond_loopback(endpoint: str) -> bool:
    """Whether other machines could connect."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    return endpoint.startswith("tcp://") and host not in _LOOPBACK


def curve_problems(
    endpoint: Any, secret_key: Any, clients: Any
) -> Iterator[tuple[str, ConfigError]]:
    """Yield what is wrong, each with the dotted place of the value that is.

    Args:
        endpoint: where clients connect; this and the others may be of any type: a wrong one is
            passed over, others check that.
        secret_key: path of the engine's secret key.
        clients: path of the folder with the clients' public keys.
    """
    is_tcp = isinstance(endpoint, str) and _TCP.fullmatch(endpoint) is not None
    if is_tcp and is_beyond_loopback(endpoint) and secret_key is None and clients is None:
        message = f"{endpoint} would let anyone on the network use the engine"
        hint = "make keys with `omni-engine keys new`, and set curve.secret_key and curve.clients"
        yield "endpoint", ConfigError(message, hint=hint)
    given = {"curve.secret_key": secret_key, "curve.clients": clients}
    for place, other in (tuple(given), tuple(reversed(given))):
        if given[place] is not None and given[other] is None:
            yield place, ConfigError(f"{place} has no effect without {other}", hint=f"set {other}")
    if isinstance(secret_key, str) and secret_key.strip():
        try:
            read_secret_key(secret_key)
        except ConfigError as error:
            yield "curve.secret_key", error
    if isinstance(clients, str) and clients.strip() and not os.path.isdir(clients):
        hint = "create it, and copy the clients' public keys (NAME.key) there"
        yield "curve.clients", ConfigError(f"there is no folder {clients}", hint=hint)
