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
from omni_engine.protocol.tensors import ITEM_SIZES, MAX_DIMENSIONS, TensorData

EXT_BUFFER = 1
MAX_HEADER_BYTES = 2 * 2**20
MAX_FRAMES = 4096
MAX_CONTAINERS = 2**14
MAX_ITEMS = 2**16
"""Maps and lists of a header, and values that they hold in all: decoding so many takes a few ms.

Bytes alone are no bound: 16 MB of empty lists take 6 seconds and 1.2 GB.
"""

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
            array, dtype, shape = value, value.dtype.name, value.shape
        elif isinstance(value, TensorData):
            array, dtype, shape = np.asarray(memoryview(value.data)), value.dtype, value.shape
        else:
            raise TypeError(f"{type(value).__name__} has no place on the wire")
        if dtype not in ITEM_SIZES or array.dtype.newbyteorder("<") != array.dtype:
            raise TypeError(f"dtype {dtype} ({array.dtype.str}) has no place on the wire")
        if len(shape) > MAX_DIMENSIONS:
            raise TypeError(f"an array of {len(shape)} dimensions has no place on the wire")
        buffers.append(np.asarray(array, order="C").reshape(-1).view(np.uint8))
        return msgpack.ExtType(EXT_BUFFER, msgpack.packb([len(buffers) - 1, dtype, list(shape)]))

    try:
        header: bytes = msgpack.packb(message, default=reference)
    except (ValueError, OverflowError) as error:  # bad text, nesting, large integers
        raise TypeError(f"a value has no place on the wire: {error}") from None
    return [header, *buffers]


def decode(
    frames: Sequence[Any], max_message_bytes: int | None = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Decode the frames of one message; arrays become read-only views of their frame.

    Args:
        frames: bytes-like objects or zmq ``Frame``s.
        max_message_bytes: total size accepted; None for no limit.
        trusted: whether the limits of header and frames don't apply: between the engine and its
            workers, where a batch holds what came in many messages.

    Raises:
        MessageTooLargeError: if the frames are larger in sum than allowed.
        MalformedMessageError: if anything else is wrong with them.
    """
    views = [_view(frame).toreadonly() for frame in frames]
    if not views:
        raise MalformedMessageError("the message has no frames")
    if not trusted:
        _check_sizes(views, max_message_bytes)
    unread = dict(enumerate(views[1:]))

    bounds = {} if trusted else counted_containers()

    def resolve(code: int, data: bytes) -> Any:
        if code != EXT_BUFFER:
            raise MalformedMessageError(f"unknown msgpack extension type {code}")
        return _array(msgpack.unpackb(data, **bounds), unread)

    try:
        message = msgpack.unpackb(views[0], ext_hook=resolve, strict_map_key=True, **bounds)
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


def counted_containers() -> dict[str, Any]:
    """Return options for ``msgpack.unpackb`` that end it at the first map, list or item too many.

    It raises ``MessageTooLargeError`` then; ``ValueError`` for too many in a single map or list.
    """
    containers, items = MAX_CONTAINERS, MAX_ITEMS

    def count(container: Any) -> Any:
        nonlocal containers, items
        containers -= 1
        items -= len(container)
        if containers < 0 or items < 0:
            raise MessageTooLargeError(
                "the header holds too much",
                field="header",
                expected=f"at most {MAX_CONTAINERS} maps and lists with {MAX_ITEMS} values in all; "
                "arrays travel as frames of their own",
            )
        return container

    return {
        "object_hook": count,
        "list_hook": count,
        "max_array_len": MAX_ITEMS,
        "max_map_len": MAX_ITEMS,
    }


def message_bytes(frames: Sequence[Any]) -> int:
    """Return the summed size of a message's frames."""
    return sum(_view(frame).nbytes for frame in frames)


def _view(frame: Any) -> memoryview:
    return memoryview(getattr(frame, "buffer", frame))


def _check_sizes(views: list[memoryview], max_message_bytes: int | None) -> None:
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
        case [index, str(dtype), list(shape)] if type(index) is int and index in unread:
            pass
        case _:
            raise MalformedMessageError(
                "a buffer reference is malformed",
                field="header",
                value=reference,
                expected="[index, dtype, shape]",
            )
    if (
        dtype not in ITEM_SIZES
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**40 for n in shape)
    ):
        raise MalformedMessageError(
            "a buffer's dtype or shape is unknown",
            field="header",
            value=reference,
            expected=f"at most {MAX_DIMENSIONS} dimensions of one of {', '.join(ITEM_SIZES)}",
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
    if dtype == "bool" and np.frombuffer(view, np.uint8).max(initial=0) > 1:
        raise MalformedMessageError(
            "a boolean array holds other bytes than 0 and 1", field=f"frames[{index + 1}]"
        )
    return np.frombuffer(view, dtype=dtype).reshape(shape)
