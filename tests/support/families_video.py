"""Families that make videos or sound."""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from diffusers.pipelines.wan import pipeline_wan_i2v
from families_parts import (
    Family,
    clip_encoder,
    clip_tokenizer,
    decoder_tokenizer,
    flow,
    picture,
    redrawn,
    t5_encoder,
    t5_tokenizer,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil


def _size(pixels: int, frames: int) -> dict[str, Any]:
    return {"height": pixels, "width": pixels, "num_frames": frames, "max_sequence_length": 16}


def _wan_parts(channels: int = 16, **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        **config,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    return {
        "transformer": redrawn(transformer),
        "transformer_2": None,
        "vae": vae,
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
    }


def _wan() -> Any:
    return diffusers.WanPipeline(**_wan_parts())


def _wan22_parts(channels: int = 16) -> dict[str, Any]:
    """One denoiser for the noisy half of the steps and another for the rest."""
    low = redrawn(_wan_parts(channels)["transformer"], seed=2)
    return {**_wan_parts(channels), "transformer_2": low, "boundary_ratio": 0.875}


def _wan22() -> Any:
    return diffusers.WanPipeline(**_wan22_parts())


def _wan22_i2v() -> Any:
    return diffusers.WanImageToVideoPipeline(
        **_wan22_parts(36), image_encoder=None, image_processor=None
    )


def _wan_i2v() -> Any:
    parts = _wan_parts(36, image_dim=8)
    torch.manual_seed(0)
    encoder = transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(
            hidden_size=8, projection_dim=8, num_hidden_layers=2, num_attention_heads=2,
            image_size=32, intermediate_size=16, patch_size=8,
        )
    )  # fmt: skip
    return diffusers.WanImageToVideoPipeline(
        **parts, image_encoder=encoder, image_processor=CLIPImageProcessorPil(crop_size=32, size=32)
    )


def _ltx() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=2, caption_channels=32,
    )  # fmt: skip
    scaling = (True, True, False, False)
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=scaling, decoder_spatio_temporal_scaling=scaling,
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4, patch_size=1, patch_size_t=1,
    )  # fmt: skip
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return diffusers.LTXPipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=flow(),
        text_encoder=t5_encoder(), tokenizer=t5_tokenizer(),
    )  # fmt: skip


def _cogvideox() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=32, num_layers=2, sample_width=2, sample_height=2,
        sample_frames=9, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=226,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4, block_out_channels=(8,) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, latent_channels=4, layers_per_block=1,
        norm_num_groups=2, temporal_compression_ratio=4,
    )  # fmt: skip
    return diffusers.CogVideoXPipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=diffusers.CogVideoXDPMScheduler(),
        text_encoder=t5_encoder(), tokenizer=t5_tokenizer(),
    )  # fmt: skip


def _hunyuan_video() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, guidance_embeds=True,
        text_embed_dim=16, pooled_projection_dim=32, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(8,) * 4,
        layers_per_block=1, norm_num_groups=4,
    )  # fmt: skip
    llama = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3,
        pad_token_id=0, vocab_size=700,
    )  # fmt: skip
    return diffusers.HunyuanVideoPipeline(
        transformer=redrawn(transformer), vae=vae, scheduler=flow(shift=7.0),
        text_encoder=transformers.LlamaModel(llama), tokenizer=decoder_tokenizer(),
        text_encoder_2=clip_encoder(), tokenizer_2=clip_tokenizer(),
    )  # fmt: skip


def _stable_audio() -> Any:
    torch.manual_seed(0)
    transformer = diffusers.StableAudioDiTModel(
        sample_size=4, in_channels=3, num_layers=2, attention_head_dim=4, out_channels=3,
        num_key_value_attention_heads=2, cross_attention_dim=4, time_proj_dim=8,
        global_states_input_dim=8, cross_attention_input_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=3, audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    return diffusers.StableAudioPipeline(
        transformer=redrawn(transformer), vae=vae, text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(25),
        projection_model=StableAudioProjectionModel(32, 4, min_value=0, max_value=32),
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0,
            sigma_schedule="exponential",
        ),
    )  # fmt: skip


def _no_text_repair() -> contextlib.AbstractContextManager[Any]:
    """The pipeline calls ftfy whether or not it is installed."""
    repair = types.SimpleNamespace(fix_text=str)
    return mock.patch.object(pipeline_wan_i2v, "ftfy", repair, create=True)


def _picture(index: int) -> dict[str, Any]:
    return {"image": picture(index, 16)}


_HUNYUAN = {**_size(16, 9), "prompt_template": {"template": "{}", "crop_start": 0}}

_WAN22 = {**_size(16, 5), "guidance_scale_2": 3.0}
_TWO_DENOISERS = "two denoisers: requests on different sides of the boundary take turns"

VIDEO_FAMILIES = {
    "wan": Family(_wan, _size(16, 5)),
    "wan_image_to_video": Family(
        _wan_i2v, _size(16, 5), own=_picture, context=_no_text_repair
    ),
    "wan22": Family(_wan22, _WAN22, beyond=(3, 3), note=_TWO_DENOISERS),
    "wan22_image_to_video": Family(
        _wan22_i2v, _WAN22, own=_picture, context=_no_text_repair,
        beyond=(3, 3), note=_TWO_DENOISERS,
    ),
    "ltx": Family(_ltx, _size(32, 9)),
    "cogvideox": Family(_cogvideox, {**_size(16, 8), "max_sequence_length": 226}),
    "hunyuan_video": Family(
        _hunyuan_video, _HUNYUAN, negative=False, beyond=(0, 4),
        note="the timestep of a first step is float32: it shares with other first steps only",
    ),
    "stable_audio": Family(
        _stable_audio, {"audio_end_in_s": 2.0}, beyond=(5, 9),
        note="with 12 calls of its projection model",
    ),
}  # fmt: skip
