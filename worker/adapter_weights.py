"""An adapter as the worker applies it: plain low-rank tensors per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The low-rank update of one linear or convolution layer.

    It adds ``up(down(x)) * scaling * scale`` to what the layer makes of x, where scale is the
    request's. Of a convolution, ``down`` has the layer's own kernel, stride and padding, no
    dilation and one group; ``up`` is 1 x 1.

    Attributes:
        down: (rank, in) of a linear layer, (rank, in, height, width) of a convolution.
        up: (out, rank) or (out, rank, 1, 1).
        scaling: alpha / rank, or alpha / sqrt(rank) of a rank-stabilised adapter.
    """

    down: Tensor
    up: Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """The width between down and up."""
        return int(self.down.shape[0])

    @property
    def num_bytes(self) -> int:
        """Of both tensors."""
        return self.down.nbytes + self.up.nbytes

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LayerWeights:
        """Return the same weights on a device, in a dtype; None keeps theirs."""
        down, up = (t.to(device=device, dtype=dtype) for t in (self.down, self.up))
        return dataclasses.replace(self, down=down, up=up)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's updates.

    Attributes:
        digest: SHA-256 of the file it came from, hex.
        layers: by "component.module.path", as in ``pipe.<component>.get_submodule(path)``.
    """

    digest: str
    layers: Mapping[str, LayerWeights]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", MappingProxyType(dict(sorted(self.layers.items()))))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(layer.num_bytes for layer in self.layers.values())

    @property
    def components(self) -> frozenset[str]:
        """The components that it changes: "transformer", "text_encoder"..."""
        return frozenset(path.partition(".")[0] for path in self.layers)

    def to(
        self, device: torch.device | str, dtype_of: Callable[[str], torch.dtype] | None = None
    ) -> AdapterWeights:
        """Return the same weights on a device.

        Args:
            device: where to.
            dtype_of: the dtype that a layer, named as in ``layers``, computes in; without it
                weights keep theirs.
        """
        layers = {
            path: layer.to(device, None if dtype_of is None else dtype_of(path))
            for path, layer in self.layers.items()
        }
        return AdapterWeights(self.digest, layers)
