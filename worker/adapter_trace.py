"""Follows a file's tensors through code that renames, splits, scales and joins them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class TensorTrace(TorchFunctionMode):
    """Knows which named tensors went into any tensor that this thread makes of them.

    A context manager; other threads aren't watched. It keeps the tensors that it has seen alive.

    Args:
        named: the tensors to follow, each with memory of its own.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._origins: dict[int, frozenset[str]] = {}
        self._seen: list[Tensor] = []
        for name, tensor in named.items():
            self._add(tensor, frozenset({name}))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function of torch and note what its result is made of."""
        result = func(*args, **(kwargs or {}))
        made_of = frozenset[str]()
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                made_of |= self.origins(tensor)
        if made_of:
            changed = args[:1] if func is Tensor.__setitem__ else ()
            for tensor in tree_leaves((result, changed)):
                if isinstance(tensor, Tensor):
                    self._add(tensor, made_of)
        return result

    def origins(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of those that a tensor was made of."""
        return self._origins.get(_memory(tensor), frozenset())

    def _add(self, tensor: Tensor, made_of: frozenset[str]) -> None:
        place = _memory(tensor)
        if place:  # 0: without memory
            self._seen.append(tensor)
            self._origins[place] = self._origins.get(place, frozenset()) | made_of


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
