"""Hashable stand-ins for values: equal exactly when the values are equal.

A tensor's digest is remembered as long as the tensor lives: pipelines pass the same object at every
step, so a request pays for reading it (on a GPU, a synchronisation) once.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


class DigestCache:
    """Digests of tensors by identity."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[torch.Tensor], Hashable]] = {}

    def digest(self, value: Any) -> Hashable:
        """Return the stand-in of any value; objects of unknown classes equal only themselves."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, list | tuple):
            return tuple(self.digest(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self.digest(value[name])) for name in sorted(value))
        return (type(value), value) if isinstance(value, _PLAIN) else ("object", id(value))

    def fields(self, value: Any, within: tuple[int, ...] = ()) -> Hashable:
        """Return the stand-in of an object's class and plain fields, its parts' included."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if id(value) in within:
            return "itself"
        inside = (*within, id(value))
        if isinstance(value, list | tuple):
            return (type(value), tuple(self.fields(item, inside) for item in value))
        named = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        if isinstance(value, type) or callable(value):
            named = {}
        return (type(value), tuple((str(n), self.fields(v, inside)) for n, v in named.items()))

    def equal_rows(self, value: torch.Tensor) -> Hashable:
        """Return the stand-in of a tensor's one repeated row, or of the tensor if rows differ."""
        if value.shape[0] > 1 and not bool((value == value[:1]).all()):
            return ("object", id(value))
        return ("row", self._of_tensor(value, first_row=True))

    def _of_tensor(self, tensor: torch.Tensor, *, first_row: bool = False) -> Hashable:
        key = id(tensor) * 2 + first_row
        found = self._digests.get(key)
        if found is not None and found[0]() is tensor:
            return found[1]
        digest = _content(tensor[0] if first_row else tensor)
        forget = self._digests.pop
        self._digests[key] = (weakref.ref(tensor, lambda _: forget(key, None)), digest)
        return digest


def _content(tensor: torch.Tensor) -> Hashable:
    host = tensor.detach().cpu().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b""
    return (tuple(host.shape), host.dtype, data)
