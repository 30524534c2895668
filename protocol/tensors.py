"""Tensors on the wire: dtype name, shape and raw bytes, including the dtypes that numpy lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMPY_DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)

ITEM_SIZES: dict[str, int] = {name: np.dtype(name).itemsize for name in _NUMPY_DTYPES}
ITEM_SIZES["bfloat16"] = 2
"""Bytes per item of every dtype that may cross the wire; all little-endian."""

MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A tensor's raw little-endian bytes with a dtype that numpy may not know (bfloat16).

    Args:
        dtype: a name in ``ITEM_SIZES``.
        shape: any number of dimensions, each >= 0.
        data: contiguous bytes, C order; not copied.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * ITEM_SIZES[self.dtype]
        if memoryview(self.data).nbytes != expected:
            raise ValueError(f"{self.dtype} {self.shape} needs {expected} bytes")

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the values as a numpy array; bfloat16 is widened to float32, exactly."""
        if self.dtype != "bfloat16":
            return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)
        bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(self.shape)
