"""Remembers what text encoders returned: the same prompt, and every " ", comes again and again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from omni_engine.worker.fusion import Call
from omni_engine.worker.value_digest import DigestCache

_MAX_BYTES = 512 << 20
"""Encoders that return every layer's states hold megabytes per prompt."""


class PromptCache:
    """Encoder outputs, the least recently used going first.

    Args:
        size: most outputs kept; 0 keeps none.
        max_bytes: most bytes of tensors kept.

    Attributes:
        hits: lookups that were answered.
        misses: lookups that were not.
    """

    def __init__(self, size: int, max_bytes: int = _MAX_BYTES) -> None:
        self._size, self._max_bytes = size, max_bytes
        self._digests = DigestCache()
        self._outputs: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def key(self, call: Call, adapter: Hashable) -> Hashable | None:
        """Return what must be equal for two calls to have the same output; None if unknown.

        Args:
            call: an encoder's call.
            adapter: the active adapter; it may change the encoder, too.
        """
        if not self._size or not call.shareable:
            return None
        arguments = self._digests.digest(call.arguments)
        return (id(call.module), adapter, call.modes, arguments)

    def get(self, key: Hashable | None) -> Any | None:
        """Return a copy of the remembered output, or None."""
        found = None if key is None else self._outputs.get(key)
        if found is None:
            self.misses += key is not None
            return None
        self.hits += 1
        self._outputs.move_to_end(key)
        return copy.deepcopy(found[0])

    def put(self, key: Hashable | None, output: Any) -> None:
        """Remember a copy: the pipeline owns the output, which may be a part of a larger one."""
        if key is None or key in self._outputs or not _is_plain(output):
            return
        kept = _detached(output)
        size = sum({t.data_ptr(): t.numel() * t.element_size() for t in _tensors(kept)}.values())
        if size > self._max_bytes:
            return
        self._outputs[key] = (kept, size)
        self._bytes += size
        while len(self._outputs) > self._size or self._bytes > self._max_bytes:
            _, (_, freed) = self._outputs.popitem(last=False)
            self._bytes -= freed


def _detached(output: Any) -> Any:
    """Copy an output so that nothing is shared with it; equal tensors stay one."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(output):
        memo.setdefault(id(tensor), tensor.detach().clone())
    return copy.deepcopy(output, memo)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
