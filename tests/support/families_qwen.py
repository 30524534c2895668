"""The QwenImage families."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from families_parts import EQUAL_PROMPTS, Family, flow, picture, qwen_tokenizer, redrawn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_ROPE = {"mrope_section": [1, 1, 2], "rope_type": "default"}


class VisionProcessor:
    """Stands for the processors of Qwen's vision models: the real ones need video libraries.

    Args:
        tokenizer: of the text.
        patch: pixels of a patch.
        token_types: whether to tell the tokens of pictures.
    """

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any, *, patch: int = 14, token_types: bool = False) -> None:
        self.tokenizer = tokenizer
        self.chat_template = tokenizer.chat_template
        self._token_types = token_types
        pixels = (2 * patch) ** 2
        self.image_processor = Qwen2VLImageProcessorPil(
            patch_size=patch, merge_size=2, temporal_patch_size=2,
            size={"shortest_edge": pixels, "longest_edge": pixels * 64},
        )  # fmt: skip

    def __call__(
        self, text: Any = None, images: Any = None, padding: Any = True,
        return_tensors: str = "pt", padding_side: str | None = None, **_: Any,
    ) -> transformers.BatchFeature:  # fmt: skip
        texts = [text] if isinstance(text, str) else list(text)
        seen: dict[str, Any] = {}
        if images is not None:
            made = self.image_processor(images=images, return_tensors="pt")
            seen = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
            texts = self._expanded(texts, seen["image_grid_thw"])
        side = {} if padding_side is None else {"padding_side": padding_side}
        tokens = self.tokenizer(texts, padding=padding, return_tensors=return_tensors, **side)
        found = {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
        if self._token_types:
            pad = self.tokenizer.convert_tokens_to_ids(self.image_token)
            found["mm_token_type_ids"] = (found["input_ids"] == pad).long()
        return transformers.BatchFeature({**found, **seen})

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> Any:
        if not tokenize:
            options.pop("padding", None)
        made = self.tokenizer.apply_chat_template(messages, tokenize=tokenize, **options)
        is_flat = tokenize and not options.get("return_dict", True) and isinstance(made[0], int)
        return [made] if is_flat else made

    def decode(self, *tokens: Any) -> Any:
        return self.tokenizer.decode(*tokens)

    def _expanded(self, texts: list[str], grids: torch.Tensor) -> list[str]:
        """Give every picture as many tokens as it has merged patches."""
        remaining = iter(grids)
        made = []
        for text in texts:
            first, *rest = text.split(self.image_token)
            for part in rest:
                first += self.image_token * (int(next(remaining).prod()) // 4) + part
            made.append(first)
        return made


def _token_ids(tokenizer: Any) -> dict[str, int]:
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": "<|vision_start|>",
             "vision_end_token_id": "<|vision_end|>"}  # fmt: skip
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


_TEXT = {"vocab_size": 700, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
         "rope_theta": 1e6, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip


def qwen25_encoder() -> Any:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
              "out_hidden_size": 32, "fullatt_block_indexes": [0]}  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_scaling": {**_ROPE, "type": "default"}},
        vision_config=vision,
        **_token_ids(qwen_tokenizer()),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_encoder() -> Any:
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
              "out_hidden_size": 32, "patch_size": 16, "spatial_merge_size": 2,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 64}  # fmt: skip
    rope = {**_ROPE, "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_scaling": rope},
        vision_config=vision,
        **_token_ids(qwen_tokenizer()),
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _parts(channels: int = 4, vae: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=4 * channels, out_channels=channels, num_layers=2,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4), **config,
    )  # fmt: skip
    return {
        "scheduler": flow(use_dynamic_shifting=True),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=channels, dim_mult=[1, 2, 2], num_res_blocks=1, attn_scales=[],
            temperal_downsample=[False, True], latents_mean=[0.0] * channels,
            latents_std=[1.0] * channels, **(vae or {}),
        ),
        "text_encoder": qwen25_encoder(),
        "tokenizer": qwen_tokenizer(),
        "transformer": redrawn(transformer),
    }  # fmt: skip


def _qwen_image() -> Any:
    return diffusers.QwenImagePipeline(**_parts())


def _edit() -> Any:
    return diffusers.QwenImageEditPipeline(**_parts(), processor=VisionProcessor(qwen_tokenizer()))


def _edit_plus() -> Any:
    return diffusers.QwenImageEditPlusPipeline(
        **_parts(), processor=VisionProcessor(qwen_tokenizer())
    )


def _layered() -> Any:
    parts = _parts(8, {"input_channels": 4}, use_additional_t_cond=True, use_layer3d_rope=True)
    return diffusers.QwenImageLayeredPipeline(**parts, processor=VisionProcessor(qwen_tokenizer()))


def _qwen_image_21() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, context_in_dim=32, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=8, dim_mult=[1] * 5, num_res_blocks=1,
        attn_scales=[], temperal_downsample=[False, True, True, True], latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )  # fmt: skip
    processor = VisionProcessor(qwen_tokenizer("left"), patch=16, token_types=True)
    return diffusers.QwenImage21Pipeline(
        scheduler=flow(use_dynamic_shifting=True), vae=vae, text_encoder=_qwen3_encoder(),
        processor=processor, transformer=redrawn(transformer),
    )  # fmt: skip


def _small_pictures(
    module: Any, pixels: int, extra: tuple[None, ...] = ()
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """These pipelines resize input pictures to a million pixels; here to a few."""

    def dimensions(_: int, ratio: float) -> tuple[Any, ...]:
        width = math.sqrt(pixels * pixels * ratio)
        return (round(width / 32) * 32, round(width / ratio / 32) * 32, *extra)

    return lambda: mock.patch.object(module, "calculate_dimensions", dimensions)


def _one(index: int) -> dict[str, Any]:
    return {"image": picture(index, 64)}


def _two(index: int) -> dict[str, Any]:
    return {"image": [picture(index, 64), picture(index + 50, 64)]}


def _with_alpha(index: int) -> dict[str, Any]:
    return {"image": picture(index, 32, "RGBA")}


_SIZE = {"height": 32, "width": 32}
_TRUE_CFG: dict[str, Any] = {"guidance": "true_cfg_scale"}
_EQUAL_NOTE = "prompts of equal length share: they can't be padded"

QWEN_FAMILIES = {
    "qwen_image": Family(_qwen_image, _SIZE, **_TRUE_CFG, note="prompts padded, hidden by a mask"),
    "qwen_image_edit": Family(
        _edit, _SIZE, own=_one, context=_small_pictures(pipeline_qwenimage_edit, 64, (None,)),
        **_TRUE_CFG,
    ),
    "qwen_image_edit_plus": Family(
        _edit_plus, _SIZE, own=_two, context=_small_pictures(pipeline_qwenimage_edit_plus, 64),
        **_TRUE_CFG,
    ),
    "qwen_image_layered": Family(
        _layered, {"layers": 2, "resolution": 640, "output_type": "pt"}, own=_with_alpha,
        context=_small_pictures(pipeline_qwenimage_layered, 32),
        latents=False, note="layers come as frames with alpha; asked for latents, diffusers fails",
        **_TRUE_CFG,
    ),
    "qwen_image_21": Family(
        _qwen_image_21, {"height": 64, "width": 64}, prompts=EQUAL_PROMPTS, note=_EQUAL_NOTE,
        beyond=(1, 12),
        **_TRUE_CFG,
    ),
}  # fmt: skip
