"""Multipart messages: a msgpack header, then raw buffers that the header refers to by index.

An array in the header is msgpack extension type 1 holding ``[index, dtype, shape]``; the bytes are
frame ``index + 1``. Buffers are neither copied on the way out (pyzmq sends from the array's memory)
nor on the way in (arrays are views of the received frame). Never pickle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from omni_engine.protocol.errors import MalformedMessageError, MessageTooLargeError
from omni_engine.protocol.tensors import ITEM_SIZES, TensorData

EXT_BUFFER = 1
MAX_HEADER_BYTES = 16 * 2**20
MAX_FRAMES = 4096

Frame = bytes | bytearray | memoryview


def encode(message: dict[str, Any]) -> list[Any]:
    """Return the frames of a message: header first, then one frame per array.

    Args:
        message: plain values, numpy arrays and ``TensorData``, nested in dicts, lists and tuples.

    Raises:
        TypeError: for a value that has no place on the wire.
    """
    buffers: list[Any] = []

    def reference(value: object) -> msgpack.ExtType:
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            dtype, shape, data = array.dtype.name, array.shape, array.reshape(-1).view(np.uint8)
            if array.dtype.byteorder == ">":
                raise TypeError("big-endian arrays have no place on the wire")
        elif isinstance(value, TensorData):
            dtype, shape, data = value.dtype, value.shape, value.data
        else:
            raise TypeError(f"{type(value).__name__} has no place on the wire")
        if dtype not in ITEM_SIZES:
            raise TypeError(f"dtype {dtype} has no place on the wire")
        buffers.append(data)
        return msgpack.ExtType(EXT_BUFFER, msgpack.packb([len(buffers) - 1, dtype, list(shape)]))

    header: bytes = msgpack.packb(message, default=reference)
    return [header, *buffers]


def decode(frames: Sequence[Any], max_message_bytes: int | None = None) -> dict[str, Any]:
    """Decode the frames of one message; arrays become read-only views of their frame.

    Args:
        frames: bytes-like objects or zmq ``Frame``s.
        max_message_bytes: total size accepted; None for no limit.

    Raises:
        MessageTooLargeError: if the frames are larger in sum than allowed.
        MalformedMessageError: if anything else is wrong with them.
    """
    views = [memoryview(getattr(frame, "buffer", frame)) for frame in frames]
    _check_sizes(views, max_message_bytes)
    unread = dict(enumerate(views[1:]))

    def resolve(code: int, data: bytes) -> Any:
        if code != EXT_BUFFER:
            raise MalformedMessageError(f"unknown msgpack extension type {code}")
        return _array(msgpack.unpackb(data), unread)

    try:
        message = msgpack.unpackb(views[0], ext_hook=resolve, strict_map_key=True)
    except UnicodeDecodeError as error:
        raise MalformedMessageError(
            "the header holds text that is not UTF-8",
            field="header",
            value=str(error),
            expected="UTF-8 in every msgpack str",
        ) from None
    except (ValueError, TypeError, msgpack.UnpackException, OverflowError) as error:
        raise MalformedMessageError(
            "the header is not valid msgpack",
            field="header",
            value=str(error) or repr(error),
            expected="one msgpack map with string keys",
        ) from None
    if not isinstance(message, dict):
        raise MalformedMessageError(
            "the header is not a map",
            field="header",
            value=type(message).__name__,
            expected="a map",
        )
    if unread:
        raise MalformedMessageError(
            "the header refers to fewer buffers than were sent",
            field="frames",
            value=sorted(unread),
        )
    return message


def message_bytes(frames: Sequence[Any]) -> int:
    """Return the summed size of a message's frames."""
    return sum(memoryview(getattr(frame, "buffer", frame)).nbytes for frame in frames)


def _check_sizes(views: list[memoryview], max_message_bytes: int | None) -> None:
    if not views:
        raise MalformedMessageError("the message has no frames")
    if len(views) > MAX_FRAMES:
        raise MalformedMessageError(
            "the message has too many frames",
            field="frames",
            value=len(views),
            expected=f"at most {MAX_FRAMES}",
        )
    total = sum(view.nbytes for view in views)
    if max_message_bytes is not None and total > max_message_bytes:
        raise MessageTooLargeError(
            "the message is too large",
            field="message",
            value=f"{total} bytes",
            expected=f"at most {max_message_bytes} bytes in all frames",
        )
    if views[0].nbytes > MAX_HEADER_BYTES:
        raise MessageTooLargeError(
            "the header is too large",
            field="header",
            value=f"{views[0].nbytes} bytes",
            expected=f"at most {MAX_HEADER_BYTES} bytes; arrays travel as frames of their own",
        )


def _array(reference: Any, unread: dict[int, memoryview]) -> Any:
    match reference:
        case [int(index), str(dtype), list(shape)] if index in unread:
            pass
        case _:
            raise MalformedMessageError(
                "a buffer reference is malformed",
                field="header",
                value=reference,
                expected="[index, dtype, shape]",
            )
    if dtype not in ITEM_SIZES or not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
        raise MalformedMessageError(
            "a buffer's dtype or shape is unknown",
            field="header",
            value=reference,
            expected=", ".join(ITEM_SIZES),
        )
    view = unread.pop(index)
    if math.prod(shape) * ITEM_SIZES[dtype] != view.nbytes:
        raise MalformedMessageError(
            "a buffer's size does not fit its shape",
            field=f"frames[{index + 1}]",
            value=f"{view.nbytes} bytes",
            expected=f"{dtype} of shape {shape}",
        )
    if dtype == "bfloat16":
        return TensorData(dtype, tuple(shape), view)
    return np.frombuffer(view, dtype=dtype).reshape(shape)
