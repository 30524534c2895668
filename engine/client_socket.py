"""A client's socket, connected to an engine; why one that answers doesn't let it in."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from omni_engine.engine.curve import ClientKeys
from omni_engine.protocol.errors import ConfigError, EngineClosedError

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_HANGUPS = 3
"""Connections that ended during the handshake, one after the other: it is no accident."""
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def connected_socket(
    context: Context,
    endpoint: str,
    keys: ClientKeys | None = None,
    timeout_s: float | None = None,
) -> Socket:
    """Return a socket that is, or will be, connected to an engine.

    Args:
        context: of the socket.
        endpoint: where the engine listens.
        keys: for an engine that encrypts.
        timeout_s: seconds within which an engine must have let the client in; None doesn't wait.

    Raises:
        ConfigError: if the endpoint is not one, or a key can't be used.
        EngineClosedError: if no engine answers in time, or the one that does refuses the keys.
            In all cases the context is destroyed.
    """
    engine = context.socket(zmq.DEALER)
    engine.setsockopt(zmq.LINGER, 500)
    engine.setsockopt(zmq.RECONNECT_IVL, 20)
    engine.setsockopt(zmq.SNDHWM, 0)
    engine.setsockopt(zmq.RCVHWM, 0)
    try:
        if keys is not None:
            keys.put_on(engine)
        events = None if timeout_s is None else engine.get_monitor_socket(_EVENTS)
        _connect(engine, endpoint)
        if events is not None and timeout_s is not None:
            _await_handshake(events, endpoint, keys, timeout_s)
            engine.disable_monitor()
            events.close(linger=0)
    except BaseException:  # whatever it is: clean up, then pass it on
        context.destroy(linger=0)
        raise
    return engine


def send(engine: Socket, frames: Sequence[Any]) -> None:
    """Send a message; never blocks.

    ZeroMQ gives the connection up for good when an engine that was restarted refuses the keys; what
    is sent then is lost, and the engine's silence tells.
    """
    with contextlib.suppress(zmq.Again):
        engine.send_multipart(frames, zmq.NOBLOCK, copy=False)


def no_engine(endpoint: str) -> EngineClosedError:
    """Return the error of a client that nobody answers."""
    return EngineClosedError(
        f"no engine answers at {endpoint}",
        field="endpoint",
        value=endpoint,
        hint="Start one with `omni-engine serve`, or name its endpoint.",
    )


def _connect(engine: Socket, endpoint: str) -> None:
    try:
        engine.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"can't connect to {endpoint!r}: {error.strerror}",
            field="endpoint",
            value=endpoint,
            expected="ipc://PATH or tcp://HOST:PORT",
        ) from None


def _await_handshake(
    events: Socket, endpoint: str, keys: ClientKeys | None, timeout_s: float
) -> None:
    deadline, hangups = time.monotonic() + timeout_s, 0
    while (left_s := deadline - time.monotonic()) > 0:
        if not events.poll(math.ceil(left_s * 1000)):
            break
        match recv_monitor_message(events)["event"]:
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise _refused(
                    endpoint,
                    "does not know this client's key",
                    "Its public key must lie in the engine's curve.clients folder, as NAME.key.",
                )
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                raise _mismatch(endpoint, keys)
            case _:
                hangups += 1
        if hangups == _HANGUPS:
            raise _mismatch(endpoint, keys)
    raise no_engine(endpoint)


def _mismatch(endpoint: str, keys: ClientKeys | None) -> EngineClosedError:
    if keys is None:
        hint = "Give keys that it knows: --key and --server-key, in Python keys=ClientKeys(...)."
        return _refused(endpoint, "takes no client without keys", hint)
    hint = "Its public key must be the one in the server key file; without encryption, give none."
    return _refused(endpoint, "has another key, or none", hint)


def _refused(endpoint: str, why: str, hint: str) -> EngineClosedError:
    return EngineClosedError(
        f"the engine at {endpoint} {why}", field="endpoint", value=endpoint, hint=hint
    )
