"""Families whose prompts go through a model that also sees pictures."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
import transformers
from families_parts import (
    EQUAL_PROMPTS,
    Family,
    clip_encoder,
    clip_tokenizer,
    decoder_tokenizer,
    double_stays_double,
    flow,
    plain_vae,
    qwen_tokenizer,
    redrawn,
    small_vae,
    t5_encoder,
    t5_tokenizer,
)
from families_qwen import VisionProcessor, qwen25_encoder


def _kandinsky5() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=32, in_text_dim2=32, time_dim=16, out_visual_dim=4,
        patch_size=(1, 2, 2), model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=2,
        axes_dims=(1, 1, 2), visual_cond=False, attention_type="regular",
    )  # fmt: skip
    pipe = diffusers.Kandinsky5T2IPipeline(
        transformer=redrawn(transformer), vae=plain_vae(), scheduler=flow(shift=7.0),
        text_encoder=qwen25_encoder(), tokenizer=VisionProcessor(qwen_tokenizer()),
        text_encoder_2=clip_encoder(), tokenizer_2=clip_tokenizer(),
    )  # fmt: skip
    pipe.resolutions = [(128, 128)]
    return pipe


class MistralProcessor(VisionProcessor):
    """Knows the options of Mistral's processor that Flux2 doesn't pass for text alone."""

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=tokenize,
            **{n: v for n, v in options.items() if not n.startswith("image")},
        )  # fmt: skip


def _flux2() -> Any:
    torch.manual_seed(0)
    encoder = transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config={
                "model_type": "mistral", "vocab_size": 700, "hidden_size": 16,
                "intermediate_size": 37, "max_position_embeddings": 512, "num_attention_heads": 4,
                "num_hidden_layers": 31, "num_key_value_heads": 2, "sliding_window": None,
                "pad_token_id": 0,
            },
            vision_config={
                "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 4, "intermediate_size": 37, "image_size": 30,
                "patch_size": 6, "num_channels": 3,
            },
            vision_feature_layer=-1, image_token_index=1,
        )
    )  # fmt: skip
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=48, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",), block_out_channels=(4,),
        up_block_types=("UpDecoderBlock2D",), layers_per_block=1, latent_channels=1,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return diffusers.Flux2Pipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=flow(use_dynamic_shifting=True),
        text_encoder=encoder, tokenizer=MistralProcessor(qwen_tokenizer()),
    )  # fmt: skip


_GLM_TOKENS = ("<|image|>", "<sop>", "<eop>", "<|user|>")


class GlmProcessor:
    """Stands for GLM-Image's processor, for text alone."""

    def __init__(self) -> None:
        self.tokenizer = decoder_tokenizer(_GLM_TOKENS, side="left", bos=False)

    def apply_chat_template(
        self, messages: Any, padding: Any = False, target_h: int = 32, target_w: int = 32, **_: Any
    ) -> transformers.BatchFeature:
        rows, columns = target_h // 32, target_w // 32
        ratio = math.sqrt(rows / columns)
        grids = [(rows, columns), (max(1, int(ratio * 2)), max(1, int(2 / ratio)))]
        sizes = "".join(f"<sop>{height} {width}<eop>" for height, width in grids)
        texts = [
            "<|user|>" + "".join(part["text"] for turn in turns for part in turn["content"]
                                 if part["type"] == "text") + f"{sizes}<bos>"
            for turns in messages
        ]  # fmt: skip
        tokens = self.tokenizer(texts, padding=padding, return_tensors="pt")
        grid = torch.tensor([[1, height, width] for height, width in grids])
        return transformers.BatchFeature(
            {
                "input_ids": tokens["input_ids"],
                "attention_mask": tokens["attention_mask"],
                "image_grid_thw": grid.repeat(len(texts), 1),
                "images_per_sample": torch.tensor([2] * len(texts)),
            }
        )


def _glm_encoder() -> Any:
    torch.manual_seed(0)
    config = transformers.GlmImageConfig(
        text_config={
            "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 2048, "vision_vocab_size": 128, "eos_token_id": None,
            "pad_token_id": 0,
            "rope_parameters": {"mrope_section": (4, 2, 2), "rope_type": "default",
                                "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": 32,
                       "patch_size": 8, "intermediate_size": 32},
        vq_config={"embed_dim": 32, "num_embeddings": 128, "latent_channels": 32},
        image_token_id=4,
    )  # fmt: skip
    config.image_start_token_id, config.image_end_token_id = 2, 3
    encoder = transformers.GlmImageForConditionalGeneration(config)
    encoder.generation_config.eos_token_id = None
    encoder.generation_config.pad_token_id = 0
    return redrawn(encoder)  # else its logits are so flat that the prompt changes no token


def _glm_image() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.GlmImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, text_embed_dim=32, time_embed_dim=16, condition_dim=8,
        prior_vq_quantizer_codebook_size=128,
    )  # fmt: skip
    vae = small_vae(4, (4, 8, 8, 8), latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return diffusers.GlmImagePipeline(
        tokenizer=t5_tokenizer(), processor=GlmProcessor(), text_encoder=t5_encoder(),
        vision_language_encoder=_glm_encoder(), vae=vae, transformer=redrawn(transformer),
        scheduler=flow(),
    )  # fmt: skip


_KANDINSKY = {"height": 128, "width": 128, "max_sequence_length": 128}
_FLUX2 = {"height": 8, "width": 8, "max_sequence_length": 320}
_GLM = {"height": 64, "width": 64, "max_sequence_length": 16}
_EQUAL_NOTE = "prompts of equal length share: they can't be padded"

LANGUAGE_FAMILIES = {
    "kandinsky5": Family(
        _kandinsky5,
        _KANDINSKY,
        prompts=EQUAL_PROMPTS,
        note=_EQUAL_NOTE,
        beyond=(1, 1),
        context=double_stays_double,
    ),
    "flux2": Family(_flux2, _FLUX2, negative=False),
    "glm_image": Family(_glm_image, _GLM, negative=False),
}
