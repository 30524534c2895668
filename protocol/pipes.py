"""Start-up messages over a pipe between a process and its child: length-prefixed msgpack.

Reading goes to the raw descriptor, since it is polled later: nothing may be left in a buffer.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import msgpack

_LENGTH = struct.Struct("!I")


def write_message(descriptor: int, message: Any) -> None:
    """Write one message of plain values.

    Raises:
        BrokenPipeError: if the reader is gone.
    """
    data = memoryview(msgpack.packb(message))
    data = memoryview(_LENGTH.pack(len(data)) + data)
    while data:
        data = data[os.write(descriptor, data) :]


def read_message(descriptor: int) -> Any:
    """Read one message.

    Raises:
        EOFError: if the writer closed the pipe before the message was complete.
    """
    (size,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size))
    return msgpack.unpackb(_read_exactly(descriptor, size))


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
