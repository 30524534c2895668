"""Tiny random diffusers pipelines built from configs, saved as ordinary model folders."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

_SPECIAL = ["<|startoftext|>", "<|endoftext|>"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a red circle", "a blue square", "a cat"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[(name, i) for i, name in enumerate(_SPECIAL)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        pad_token=_SPECIAL[1],
        model_max_length=77,
    )


def tiny_stable_diffusion(
    cls: type[StableDiffusionPipeline] = StableDiffusionPipeline,
) -> StableDiffusionPipeline:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=16,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=320,
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_hidden_layers=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    for module in (unet, vae, text):
        module.eval()
        for parameter in module.parameters():  # no zero-initialised gate may hide an input
            torch.nn.init.normal_(parameter, std=0.25)
    return cls(
        vae=vae,
        text_encoder=text,
        tokenizer=tiny_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )


def save_tiny_stable_diffusion(folder: Path, *, img2img: bool = False) -> Path:
    cls = StableDiffusionImg2ImgPipeline if img2img else StableDiffusionPipeline
    tiny_stable_diffusion(cls).save_pretrained(folder, safe_serialization=True)
    return folder
