"""A client's socket, connected to an engine."""

from __future__ import annotations

import zmq

from omni_engine.protocol.errors import ConfigError


def connected_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return a socket that is, or will be, connected to an engine.

    Raises:
        ConfigError: if the endpoint is not one; the context is destroyed then.
    """
    engine = context.socket(zmq.DEALER)
    engine.setsockopt(zmq.LINGER, 500)
    engine.setsockopt(zmq.RECONNECT_IVL, 20)
    engine.setsockopt(zmq.SNDHWM, 0)
    engine.setsockopt(zmq.RCVHWM, 0)
    try:
        engine.connect(endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(
            f"can't connect to {endpoint!r}: {error.strerror}",
            field="endpoint",
            value=endpoint,
            expected="ipc://PATH or tcp://127.0.0.1:PORT",
        ) from None
    return engine
