"""Families with a transformer that make pictures."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from families_parts import (
    Family,
    clip_encoder,
    clip_tokenizer,
    decoder_tokenizer,
    flow,
    gemma_encoder,
    picture,
    plain_vae,
    pooled_clip_encoder,
    qwen3_encoder,
    qwen_tokenizer,
    redrawn,
    small_vae,
    t5_encoder,
    t5_tokenizer,
)


def _size(pixels: int, longest: int | None = None) -> dict[str, Any]:
    size = {"height": pixels, "width": pixels}
    return size if longest is None else {**size, "max_sequence_length": longest}


def _flux_parts() -> dict[str, Any]:
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    return {
        "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": clip_encoder(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": t5_tokenizer(),
        "transformer": redrawn(transformer),
        "vae": plain_vae(1, (8,)),
    }


def _flux() -> Any:
    return diffusers.FluxPipeline(**_flux_parts())


def _flux_kontext() -> Any:
    return diffusers.FluxKontextPipeline(**_flux_parts())


def _sd3() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
        pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=redrawn(transformer), scheduler=flow(), vae=plain_vae(),
        text_encoder=pooled_clip_encoder(), tokenizer=clip_tokenizer(),
        text_encoder_2=pooled_clip_encoder(), tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(), tokenizer_3=t5_tokenizer(),
    )  # fmt: skip


def _pixart_sigma() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=32, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3,
        caption_channels=32, in_channels=4, cross_attention_dim=24, out_channels=8,
    )  # fmt: skip
    return diffusers.PixArtSigmaPipeline(
        transformer=redrawn(transformer), vae=small_vae(4, (8, 8, 8, 8)), text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(), scheduler=diffusers.DPMSolverMultistepScheduler(),
    )  # fmt: skip


def _sana() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=4, num_cross_attention_heads=2, cross_attention_head_dim=4,
        cross_attention_dim=8, caption_channels=8, sample_size=16,
    )  # fmt: skip
    blocks, scales = ("ResBlock",) * 5 + ("EfficientViTBlock",), ((),) * 5 + ((5,),)
    vae = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2,
        encoder_block_types=blocks, decoder_block_types=blocks,
        encoder_block_out_channels=(8,) * 6, decoder_block_out_channels=(8,) * 6,
        encoder_qkv_multiscales=scales, decoder_qkv_multiscales=scales,
        encoder_layers_per_block=(1,) * 6, decoder_layers_per_block=(1,) * 6,
        downsample_block_type="conv", upsample_block_type="interpolate",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip
    return diffusers.SanaPipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=flow(shift=7.0),
        text_encoder=gemma_encoder(), tokenizer=decoder_tokenizer(),
    )  # fmt: skip


def _lumina2() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, hidden_size=8, num_layers=2, multiple_of=16,
        num_attention_heads=1, num_kv_heads=1, axes_dim_rope=(4, 2, 2), cap_feat_dim=8,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(
        transformer=redrawn(transformer), vae=plain_vae(), scheduler=flow(),
        text_encoder=gemma_encoder(), tokenizer=decoder_tokenizer(),
    )  # fmt: skip


def _z_image() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=32, n_layers=2,
        n_refiner_layers=1, n_heads=2, n_kv_heads=2, qk_norm=True, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        transformer=redrawn(transformer), vae=plain_vae(), scheduler=flow(),
        text_encoder=qwen3_encoder(), tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def _chroma() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32, approximator_layers=1, approximator_num_channels=16,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        transformer=redrawn(transformer), vae=plain_vae(1, (8,)), scheduler=flow(),
        text_encoder=t5_encoder(), tokenizer=t5_tokenizer(),
    )  # fmt: skip


def _flux2_klein() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=48, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",), block_out_channels=(4,),
        up_block_types=("UpDecoderBlock2D",), layers_per_block=1, latent_channels=1,
        norm_num_groups=1, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return diffusers.Flux2KleinPipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=flow(use_dynamic_shifting=True),
        text_encoder=qwen3_encoder(transformers.Qwen3ForCausalLM, 28),
        tokenizer=qwen_tokenizer(),
    )  # fmt: skip


def _kontext_picture(index: int) -> dict[str, Any]:
    return {"image": picture(index, 16)}


_KONTEXT = {**_size(8, 32), "max_area": 64, "_auto_resize": False}
_SANA = {**_size(128, 24), "complex_human_instruction": None, "use_resolution_binning": False}

IMAGE_FAMILIES = {
    "flux": Family(_flux, _size(8, 32), negative=False),
    "stable_diffusion_3": Family(_sd3, _size(16, 32)),
    "pixart_sigma": Family(_pixart_sigma, {**_size(32, 24), "use_resolution_binning": False}),
    "sana": Family(_sana, _SANA, float64=False),
    "lumina2": Family(_lumina2, _size(32, 256), float64=False),
    "z_image": Family(_z_image, _size(32, 32), no_guidance=0.0, rounds=True),
    "chroma": Family(_chroma, _size(8, 32)),
    "flux2_klein": Family(_flux2_klein, _size(8, 64), negative=False),
    "flux_kontext": Family(
        _flux_kontext,
        _KONTEXT,
        negative=False,
        own=_kontext_picture,
    ),
}
