"""What the gateway's process is told at its start."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from omni_engine.engine.curve import ClientKeys
from omni_engine.stages.config import HttpArgs, Limits


class GatewaySettings(BaseModel):
    """Everything the process needs; sent over its standard input.

    Attributes:
        endpoint: where the engine listens.
        key: the gateway's own secret key file, for an engine that encrypts; else None.
        server_key: that engine's public key file, or None.
        listener: the descriptor of the socket that listens already.
        http: the deploy file's section.
        limits: the engine's limits, to refuse early what it would refuse.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: str
    key: str | None = None
    server_key: str | None = None
    listener: int
    http: HttpArgs
    limits: Limits

    @property
    def keys(self) -> ClientKeys | None:
        """The keys with which to connect to the engine."""
        if self.key is None or self.server_key is None:
            return None
        return ClientKeys(self.key, self.server_key)
