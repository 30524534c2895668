"""Families with a UNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import torch
from families_parts import (
    Family,
    clip_encoder,
    clip_tokenizer,
    picture,
    pooled_clip_encoder,
    redrawn,
    small_vae,
)
from PIL import Image
from tiny_models import tiny_stable_diffusion

_SIZE = {"height": 16, "width": 16}


def _xl_embeddings(width: int) -> dict[str, Any]:
    return {
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "transformer_layers_per_block": (1, 1),
        "projection_class_embeddings_input_dim": width,
    }


def _xl_parts(width: int = 80) -> dict[str, Any]:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), out_channels=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=64,
        norm_num_groups=4, attention_head_dim=8, **_xl_embeddings(width),
    )  # fmt: skip
    return {
        "unet": redrawn(unet),
        "scheduler": diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
        "vae": small_vae(),
        "text_encoder": clip_encoder(),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": pooled_clip_encoder(),
        "tokenizer_2": clip_tokenizer(),
        "image_encoder": None,
        "feature_extractor": None,
    }


def _xl() -> Any:
    return diffusers.StableDiffusionXLPipeline(**_xl_parts())


def _xl_img2img() -> Any:
    return diffusers.StableDiffusionXLImg2ImgPipeline(
        **_xl_parts(72), requires_aesthetics_score=True
    )


def _xl_inpaint() -> Any:
    return diffusers.StableDiffusionXLInpaintPipeline(
        **_xl_parts(72), requires_aesthetics_score=True
    )


def _xl_controlnet() -> Any:
    torch.manual_seed(0)
    net = diffusers.ControlNetModel(
        block_out_channels=(8, 16), layers_per_block=1, in_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=8,
        conditioning_embedding_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=64,
        **_xl_embeddings(80),
    )  # fmt: skip
    return diffusers.StableDiffusionXLControlNetPipeline(**_xl_parts(), controlnet=redrawn(net))


def _mask(index: int) -> dict[str, Any]:
    mask = np.zeros((16, 16), np.uint8)
    mask[4:, 2 * index :] = 255
    return {"image": picture(index, 16), "mask_image": Image.fromarray(mask)}


def _picture(index: int) -> dict[str, Any]:
    return {"image": picture(index, 16)}


def _with_scheduler(name: str, **config: Any) -> Callable[[], Any]:
    def build() -> Any:
        pipe = tiny_stable_diffusion()
        own = {n: v for n, v in pipe.scheduler.config.items() if n != "clip_sample"}
        pipe.scheduler = getattr(diffusers, name).from_config(own, **config)
        return pipe

    return build


def _sampled(scheduler: str, eta: float = 0.0, **config: Any) -> Family:
    """Stable Diffusion with a scheduler; one with noise of its own draws from the request."""
    return Family(_with_scheduler(scheduler, **config), {**_SIZE, "eta": eta})


_DPMPP_2M = "DPMSolverMultistepScheduler"

UNET_FAMILIES = {
    "stable_diffusion": Family(tiny_stable_diffusion, _SIZE),
    "stable_diffusion_ddim_eta": _sampled("DDIMScheduler", eta=0.8),
    "stable_diffusion_euler_a": _sampled("EulerAncestralDiscreteScheduler"),
    "stable_diffusion_dpmpp_2m": _sampled(_DPMPP_2M),
    "stable_diffusion_dpmpp_2m_sde": _sampled(_DPMPP_2M, algorithm_type="sde-dpmsolver++"),
    "stable_diffusion_unipc": _sampled("UniPCMultistepScheduler"),
    "stable_diffusion_lcm": _sampled("LCMScheduler"),
    "stable_diffusion_heun": _sampled("HeunDiscreteScheduler"),
    "sdxl": Family(_xl, _SIZE),
    "sdxl_img2img": Family(_xl_img2img, {"strength": 0.99}, own=_picture, rounds=True),
    "sdxl_inpaint": Family(_xl_inpaint, {**_SIZE, "strength": 1.0}, own=_mask, rounds=True),
    "sdxl_controlnet": Family(_xl_controlnet, _SIZE, own=_picture),
}
