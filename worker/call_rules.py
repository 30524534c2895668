"""How the arguments of a denoiser's forward combine when requests share it.

Rules come in this order: the table below, what a probe call observed, inference from the values.
The table holds only what inference gets wrong or can't know; most models need no entry.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch


class Kind(enum.Enum):
    """What an argument is to the rows of a forward."""

    ROWS = "rows"
    """Rows in dimension 0, or a whole multiple of them: concatenated."""
    ROWS_1 = "rows in dimension 1"
    """Rows in dimension 1: concatenated there."""
    EXPAND = "expand"
    """A scalar or one item for all rows: expanded to the request's rows, then concatenated."""
    EACH = "each"
    """A list, tuple or dict of tensors, each judged by itself."""
    ROW_LIST = "list of rows"
    """A list with one entry per row: lists are joined."""
    SAME = "same"
    """Must be equal by value between the requests; the first one's is used."""
    SAME_LIST = "list of equal rows"
    """A list with one equal entry per row: joined; the entry must be equal between requests."""
    SAME_ROWS = "equal rows"
    """Has rows, but the model reads only the first: must be equal between requests."""
    STATE = "state"
    """An object that belongs to one request, merged tensor by tensor where its class is known."""
    OPAQUE = "opaque"
    """It is not known how it combines: the call runs alone, as it is."""


RULES: Mapping[str, Mapping[str, Kind]] = {
    "FluxTransformer2DModel": {"img_ids": Kind.SAME, "txt_ids": Kind.SAME},
    "FluxControlNetModel": {"img_ids": Kind.SAME, "txt_ids": Kind.SAME},
    "ChromaTransformer2DModel": {"img_ids": Kind.SAME, "txt_ids": Kind.SAME},
    "QwenImageTransformer2DModel": {"img_shapes": Kind.SAME_LIST},
    "QwenImage21Transformer2DModel": {
        "img_shapes": Kind.SAME_LIST,
        "img_mask": Kind.SAME_ROWS,
        "kv_cache": Kind.STATE,
    },
    "ZImageTransformer2DModel": {"x": Kind.ROW_LIST, "cap_feats": Kind.ROW_LIST},
    "HiDreamImageTransformer2DModel": {"encoder_hidden_states_llama3": Kind.ROWS_1},
    "StableAudioDiTModel": {"timestep": Kind.EXPAND, "rotary_embedding": Kind.SAME},
    "CogVideoXTransformer3DModel": {"image_rotary_emb": Kind.SAME},
    "Kandinsky5Transformer3DModel": {
        "visual_rope_pos": Kind.SAME,
        "text_rope_pos": Kind.SAME,
        "scale_factor": Kind.SAME,
    },
    "GlmImageTransformer2DModel": {"kv_caches": Kind.STATE},
    "Flux2Transformer2DModel": {
        "kv_cache": Kind.STATE,
        "img_ids": Kind.SAME_ROWS,
        "txt_ids": Kind.SAME_ROWS,
    },
    "UNet2DConditionModel": {"down_block_additional_residuals": Kind.EACH},
    "ControlNetModel": {"added_cond_kwargs": Kind.EACH},
    "PixArtTransformer2DModel": {"encoder_attention_mask": Kind.ROWS},
    "SanaTransformer2DModel": {"encoder_attention_mask": Kind.ROWS},
    "Lumina2Transformer2DModel": {"encoder_attention_mask": Kind.ROWS},
    "LTXVideoTransformer3DModel": {"encoder_attention_mask": Kind.ROWS},
    "HunyuanVideoTransformer3DModel": {"encoder_attention_mask": Kind.ROWS},
}

PADDED: Mapping[str, Mapping[str, str]] = {
    "QwenImageTransformer2DModel": {"encoder_hidden_states": "encoder_hidden_states_mask"},
}
"""Token arguments that may be padded to the longest, with the mask that hides the padding."""

FLOAT_TIMESTEPS = frozenset(
    {
        "CogVideoXTransformer3DModel",
        "ControlNetModel",
        "LTXVideoTransformer3DModel",
        "PixArtTransformer2DModel",
        "SD3Transformer2DModel",
        "UNet2DConditionModel",
        "WanTransformer3DModel",
    }
)
"""Models whose first act is to turn ``timestep`` into float32: whole ones (DDIM, DPM++, UniPC) may
come as float32, as others (Euler, Heun) are, without changing a bit. float32 holds whole numbers up
to 2**24."""

MERGEABLE_STATES = frozenset({"QwenImage21KVCache", "Flux2KVCache"})
"""Classes of per-request objects whose tensors are rows in dimension 0."""

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)


_WITHOUT_ROWS = frozenset({Kind.EXPAND, Kind.SAME, Kind.STATE, Kind.OPAQUE})


class NoRowsError(TypeError):
    """No argument tells how many rows a call has; the call can't be shared."""


def count_rows(arguments: Mapping[str, Any], rules: Mapping[str, Kind]) -> int:
    """Return the rows of a call: the fewest a rule tells, else the first argument's with rows.

    Raises:
        NoRowsError: if there is none.
    """
    told = [
        length
        for name, value in arguments.items()
        if (length := _rows_by_rule(value, rules.get(name))) is not None
    ]
    if told:
        return min(told)
    for name, value in arguments.items():
        if rules.get(name) in _WITHOUT_ROWS:
            continue
        if _is_tensor_list(value):
            return len(value)
        if isinstance(value, torch.Tensor) and value.ndim >= 2:
            return int(value.shape[0])
    raise NoRowsError("no argument carries rows")


def fits(kind: Kind, value: Any) -> bool:
    """Whether a rule can be meant for a value: arguments may come in several types."""
    match kind:
        case Kind.ROWS | Kind.SAME_ROWS:
            return value is None or (isinstance(value, torch.Tensor) and value.ndim >= 1)
        case Kind.ROWS_1:
            return value is None or (isinstance(value, torch.Tensor) and value.ndim >= 2)
        case Kind.EXPAND:
            return value is None or (isinstance(value, torch.Tensor) and value.numel() == 1)
        case Kind.ROW_LIST | Kind.SAME_LIST:
            return value is None or isinstance(value, list)
        case Kind.EACH:
            return value is None or isinstance(value, list | tuple | dict)
        case Kind.SAME | Kind.STATE | Kind.OPAQUE:
            return True


def _rows_by_rule(value: Any, kind: Kind | None) -> int | None:
    if value is None or kind is None or not fits(kind, value):
        return None
    if kind is Kind.ROW_LIST:
        return len(value)
    if kind is Kind.ROWS_1:
        return int(value.shape[1])
    return int(value.shape[0]) if kind is Kind.ROWS and value.ndim >= 2 else None


def infer_kind(value: Any, rows: int, *, known_model: bool = True) -> Kind:
    """Infer an argument's kind from its value.

    Args:
        value: the argument.
        rows: rows of the call.
        known_model: models without a table entry get no benefit of the doubt. Their integer and
            boolean tensors with rows must be equal, since models often read only the first row of
            positions and masks; their lists and dicts must be equal, since a list's entries may be
            rows or may have rows.
    """
    if isinstance(value, torch.Tensor):
        return _infer_tensor(value, rows, known_model)
    if isinstance(value, dict | list | tuple):
        items = list(value.values()) if isinstance(value, dict) else value
        return _infer_items(items) if known_model else Kind.SAME
    return Kind.SAME if isinstance(value, _PLAIN) else Kind.STATE


def _infer_tensor(value: torch.Tensor, rows: int, known_model: bool) -> Kind:
    if value.ndim == 0:
        return Kind.EXPAND
    if value.shape[0] == rows:
        trusted = known_model or value.is_floating_point() or value.ndim == 1
        return Kind.ROWS if trusted else Kind.SAME_ROWS
    if value.ndim >= 3 and value.is_floating_point() and value.shape[0] % rows == 0:
        return Kind.ROWS
    if value.ndim == 1 and value.shape[0] == 1:
        return Kind.EXPAND
    return Kind.SAME


def _infer_items(items: Any) -> Kind:
    nested = any(isinstance(item, torch.Tensor | list | tuple | dict) for item in items)
    return Kind.EACH if nested else Kind.SAME


def _is_tensor_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, torch.Tensor) for item in value)
    )
