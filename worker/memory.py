"""What happens when memory runs out: how it is recognised, released, and avoided from then on."""

from __future__ import annotations

import errno
import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

_TEXTS = (
    "out of memory",  # CUDA, HIP, MPS, XPU
    "allocate memory",  # "can't allocate memory": torch's CPU allocator; "Cannot allocate memory"
    "not enough memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
)
_MOST_KINDS = 1024
"""Kinds of forward that are remembered; what clients ask for decides how many there are."""

Item = TypeVar("Item")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, the device's or the host's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(known in text for known in _TEXTS)


def release_memory() -> None:
    """Give back what nobody uses any more; an error at hand would keep what its frames hold."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


class MemoryCaps:
    """The most rows of a forward, by its kind, as far as memory that ran out has taught.

    A kind is what decides the memory of a row, in words: ``"UNet2DConditionModel 64x64"``.
    Written by the main thread; ``shown`` may be called from any.
    """

    def __init__(self) -> None:
        self._most: OrderedDict[str, int] = OrderedDict()
        self._worked: OrderedDict[str, int] = OrderedDict()

    def limit(self, kind: str) -> int | None:
        """Return the most rows of a forward of this kind; None: not known."""
        return self._most.get(kind)

    def shown(self) -> dict[str, int]:
        """Return all limits."""
        return dict(self._most)

    def note_worked(self, kind: str, rows: int) -> None:
        """Note that a forward of so many rows found enough memory."""
        if rows > self._worked.get(kind, 0):
            _put(self._worked, kind, rows)

    def note_failed(self, kind: str, rows: int, smaller: int) -> None:
        """Note that a forward did not find enough memory, but its parts did.

        Args:
            kind: of the forward.
            rows: it had.
            smaller: rows of the larger one of its parts.
        """
        if smaller < (worked := self._worked.get(kind, 0)) < rows:
            smaller = worked
        if smaller >= self._most.get(kind, rows):
            return
        _put(self._most, kind, smaller)
        logger.warning(
            "memory ran out in a forward of %d rows of %s: from now on it has at most %d",
            rows,
            kind,
            smaller,
        )

    def parts(
        self, items: Sequence[Item], kind: str, rows_of: Callable[[Item], int]
    ) -> list[Sequence[Item]]:
        """Split items in order so that no part has more rows than its forward may have."""
        limit = self.limit(kind)
        if limit is None:
            return [items]
        parts: list[list[Item]] = [[]]
        rows = 0
        for item in items:
            more = rows_of(item)
            if parts[-1] and rows + more > limit:
                parts.append([])
                rows = 0
            parts[-1].append(item)
            rows += more
        return [part for part in parts if part]


def _put(kept: OrderedDict[str, int], kind: str, rows: int) -> None:
    kept[kind] = rows
    if len(kept) > _MOST_KINDS:
        kept.popitem(last=False)
