"""Messages that are almost right: hypothesis changes what right ones say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
from fuzzing import Frames, Message
from hypothesis import strategies as st
from raw_client import Array

_TEXTS = ("", "f1", "f2", "\0", "a\ud800b", "\u202e", "..", "x" * 3000, "submit", "\U0010ffff")
_NUMBERS = (-1, 0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), 64, 72, 4096)
_REALS = (float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_REALS),
    st.sampled_from(_TEXTS),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=12)),
    st.builds(
        lambda dtype, shape: Array(dtype, tuple(shape), bytes(12)),
        st.sampled_from(("uint8", "float32", "bool", "bfloat16", "object", "")),
        st.lists(st.sampled_from((0, 1, 2, 3, 12, 2**40, 2**63)), max_size=4),
    ),
    st.integers(17, 600).map(lambda depth: _nested(depth)),
)
_JUNK = st.one_of(
    _SCALARS,
    st.lists(_SCALARS, max_size=4),
    st.dictionaries(st.sampled_from((*_TEXTS, 1, b"k")), _SCALARS, max_size=3),
)


_ACTIONS = ("replace", "remove", "add", "repeat", "wrap")
_INDICES = st.integers(0, 2**16)
_CHANGES = st.lists(st.tuples(_INDICES, st.sampled_from(_ACTIONS)), max_size=3)
_KEYS = st.sampled_from((*_TEXTS, "prompt", "sampling_params", "request_id", 1))
_COUNTS = st.sampled_from((1, 2, 40))
_EXTRA_FRAMES = st.one_of(st.none(), st.none(), st.none(), st.binary(max_size=8))


@st.composite
def almost_right(draw: Callable[[Any], Any], right: Sequence[Message]) -> Frames:
    """The frames of a message of which up to three places were changed."""
    message = copy.deepcopy(right[draw(_INDICES) % len(right)])
    for index, action in draw(_CHANGES):
        places = list(_places(message))
        holder, key = places[index % len(places)]
        match action:
            case "replace":
                holder[key] = draw(_JUNK)
            case "remove" if len(message) > 1:
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(_KEYS)] = holder[key]
            case "repeat" if isinstance(holder, list):
                holder.extend([holder[key]] * draw(_COUNTS))
            case _:
                holder[key] = [holder[key]]
    frames = encode_loosely(message)
    if (extra := draw(_EXTRA_FRAMES)) is not None:
        frames.append(extra)
    return frames


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The places inside maps and lists, as what holds it and the key; not all of long ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:20])
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list) and depth < 8:
            yield from _places(item, depth + 1)


def _nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


def encode_loosely(message: Any) -> Frames:
    """The frames of anything that msgpack can hold, lone surrogates included."""
    buffers: Frames = []

    def extension(value: Array) -> msgpack.ExtType:
        buffers.append(bytes(value.data))
        reference = [len(buffers) - 1, value.dtype, list(value.shape)]
        return msgpack.ExtType(1, msgpack.packb(reference))

    header = msgpack.packb(message, default=extension, unicode_errors="surrogatepass")
    return [header, *buffers]
