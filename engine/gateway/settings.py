"""What the gateway's process is told at its start."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from omni_engine.engine.curve import ClientKeys, owner_keys
from omni_engine.stages.config import DeployConfig, HttpArgs, Limits

_ANY_ADDRESS = {"tcp://0.0.0.0": "tcp://127.0.0.1", "tcp://[::]": "tcp://[::1]"}


class GatewaySettings(BaseModel):
    """Everything the process needs; sent over its standard input.

    Attributes:
        endpoint: where the engine listens.
        key: the gateway's own secret key file, for an engine that encrypts; else None.
        server_key: that engine's public key file, or None.
        listener: the descriptor of the socket that listens already; the launcher fills it in.
        http: the deploy file's section.
        limits: the engine's limits, to refuse early what it would refuse.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str
    key: str | None = None
    server_key: str | None = None
    listener: int = -1
    http: HttpArgs
    limits: Limits

    @property
    def keys(self) -> ClientKeys | None:
        """The keys with which to connect to the engine."""
        if self.key is None or self.server_key is None:
            return None
        return ClientKeys(self.key, self.server_key)


def settings_for(config: DeployConfig, endpoint: str) -> GatewaySettings:
    """Return the settings of a gateway beside an engine.

    Args:
        config: the engine's.
        endpoint: where it really listens.
    """
    keys = owner_keys(config.curve)
    host, _, port = endpoint.rpartition(":")
    return GatewaySettings(
        endpoint=f"{_ANY_ADDRESS[host]}:{port}" if host in _ANY_ADDRESS else endpoint,
        key=None if keys is None else str(keys.secret_key_file),
        server_key=None if keys is None else str(keys.server_key_file),
        http=config.http,
        limits=config.limits,
    )
