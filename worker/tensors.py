"""Between torch tensors and what crosses the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_engine.protocol.tensors import TensorData


def tensor_to_wire(tensor: torch.Tensor) -> npt.NDArray[Any] | TensorData:
    """Return a tensor's values for the codec; bfloat16 keeps its bits.

    Args:
        tensor: any shape and device, a dtype of ``protocol.tensors.ITEM_SIZES``.
    """
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return TensorData("bfloat16", tuple(host.shape), host.view(torch.uint16).numpy())
    return host.numpy()


def to_uint8(pictures: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Turn float pictures in [0, 1] into uint8, rounding as diffusers' ``numpy_to_pil`` does."""
    if pictures.dtype == np.uint8:
        return pictures
    return (pictures * 255).round().astype(np.uint8)


def to_sound(sound: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Turn a sound of shape (samples,) or (channels, samples) into float32 with channels."""
    return np.atleast_2d(sound).astype(np.float32, copy=False)
