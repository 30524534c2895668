"""ZeroMQ's own wire protocol (ZMTP 3.1) byte by byte, and bytes that are none of it."""

from __future__ import annotations

import random
import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(23, b"\0") + b"\0" + bytes(31)
MORE, LONG, COMMAND = 1, 2, 4
_TIMEOUT_S = 30.0


def connected(endpoint: str, timeout_s: float = _TIMEOUT_S) -> socket.socket:
    """A plain socket, connected to an ipc or tcp endpoint."""
    transport, _, address = endpoint.partition("://")
    one = socket.socket(socket.AF_UNIX if transport == "ipc" else socket.AF_INET)
    one.settimeout(timeout_s)
    if transport == "ipc":
        one.connect(address)
    else:
        host, _, port = address.rpartition(":")
        one.connect((host, int(port)))
    return one


def frame(data: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """A frame; ``size`` is what it announces, where that is not the size of its data."""
    size = len(data) if size is None else size
    if size > 255 or flags & LONG:
        return bytes([flags | LONG]) + struct.pack("!Q", size) + data
    return bytes([flags, size]) + data


def ready(kind: str = "DEALER", identity: bytes = b"") -> bytes:
    """The command that ends a handshake without encryption."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind.encode()), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack("!I", len(value)) + value
    return frame(body, COMMAND)


def greeted(one: socket.socket) -> None:
    """Do a right handshake: after it, frames are messages."""
    one.sendall(GREETING)
    received = 0
    while received < len(GREETING):
        received += len(one.recv(len(GREETING) - received))
    one.sendall(ready())


def garbage(choose: random.Random) -> bytes:
    """Bytes that no peer should send, be it at the start or after the handshake."""
    noise = choose.randbytes(choose.choice((0, 1, 9, 64, 300, 5000)))
    command = bytes([choose.randrange(256)]) + choose.choice((b"PING", b"ERROR", b"READY", b"X"))
    return choose.choice(
        (
            noise,
            b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
            GREETING[: choose.randrange(len(GREETING))],
            GREETING[:10] + noise,
            GREETING.replace(b"NULL", b"PLAIN"[:4]) + noise,
            GREETING + noise,
            GREETING + ready("PUB"),
            GREETING + ready("DEALER", choose.randbytes(300)),
            GREETING + ready()[: choose.randrange(40)],
            frame(b"", LONG, 2**64 - 1),
            frame(noise, LONG, 2**63),
            frame(b"", MORE) * 50,
            frame(noise, 0xF8),
            frame(command + noise, COMMAND),
            frame(choose.randbytes(10), COMMAND, 2**40),
            frame(b"x", MORE) * choose.choice((1, 5000)),
        )
    )
