"""Parts of tiny random pipelines: tokenizers, text encoders, autoencoders, weights, requests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

M = TypeVar("M", bound=torch.nn.Module)

PROMPTS = (
    "a cat",
    "a small red circle on a blue square",
    "a big dog",
    "a bird above a white house beside a lake",
    "a tree",
)
EQUAL_PROMPTS = ("a red cat", "a big dog", "a blue house", "a white bird", "a small lake")
"""Of one token length: for families whose prompts can't be padded."""

STEPS = (3, 2, 4, 2, 3)
GUIDANCE = (4.0, 2.0, 6.0, 3.0, 5.0)
_WORDS = sorted({word for prompt in (*PROMPTS, *EQUAL_PROMPTS, "bad") for word in prompt.split()})


def _no_extras(_: int) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny pipeline of one family and five requests for it.

    Attributes:
        build: returns the pipeline in float32.
        base: call arguments of all requests.
        beyond: forwards that the requests may take beyond the fewest, in request and in step mode.
        guidance: name of the guidance argument, if there is one.
        no_guidance: its value that switches guidance off, if it can be.
        negative: whether the call takes a negative prompt.
        prompts: of the requests.
        own: arguments of request i: its pictures, mostly.
        latents: whether the pipeline can return latents.
        float64: whether the family runs in float64.
        rounds: whether the pipeline insists on float32 somewhere.
        certified: whether certification can run on it in the time of a test.
        why_alone: why requests don't share forwards; None if they do.
        context: entered while the pipeline runs.
        note: for the table.
    """

    build: Callable[[], Any]
    base: dict[str, Any]
    beyond: tuple[int, int] = (0, 0)
    guidance: str | None = "guidance_scale"
    no_guidance: float = 1.0
    negative: bool = True
    prompts: Sequence[str] = PROMPTS
    own: Callable[[int], dict[str, Any]] = _no_extras
    latents: bool = True
    float64: bool = True
    rounds: bool = False
    certified: bool = True
    why_alone: str | None = None
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str = ""

    def request(self, index: int) -> dict[str, Any]:
        """The arguments of request i but its generator."""
        given: dict[str, Any] = {
            "prompt": self.prompts[index],
            "num_inference_steps": STEPS[index],
            "output_type": "latent",
        }
        if self.guidance is not None:
            given[self.guidance] = GUIDANCE[index]
        if self.negative:
            given["negative_prompt"] = "bad"
        return {**given, **self.base, **self.own(index)}

    def pipeline(self) -> Any:
        """The pipeline in evaluation mode and in the most exact type it can run in."""
        pipe = self.build()
        pipe.set_progress_bar_config(disable=True)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
        return pipe.to(dtype=torch.float64) if self.float64 else pipe


def redrawn(module: M, seed: int = 1) -> M:
    """Draw all weights anew, so that no zero-initialised gate hides an input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(noise / math.sqrt(weight[0].numel()))
            else:
                is_norm = "norm" in name and name.endswith("weight")
                weight.copy_(0.1 * noise + float(is_norm))
    return module


def picture(seed: int, size: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, len(mode)), dtype=np.uint8)
    return Image.fromarray(pixels).resize((size, size))


def flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


@contextlib.contextmanager
def double_stays_double() -> Iterator[None]:
    """Many pipelines compute in float32 whatever their type is: here float64 is not cast down."""
    to, to_float = torch.Tensor.to, torch.Tensor.float

    def kept(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        down = tensor.dtype == torch.float64 and args == (torch.float32,)
        return tensor if down else to(tensor, *args, **options)

    def kept_float(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    with (
        mock.patch.object(torch.Tensor, "to", kept),
        mock.patch.object(torch.Tensor, "float", kept_float),
    ):
        yield


# -- tokenizers


@functools.cache
def _trained(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=1, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 3, trainer)
    return tokenizer.to_str()


def _fast(tokenizer: Tokenizer, side: str = "right", **names: Any) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.padding_side = side
    return fast


def clip_tokenizer() -> PreTrainedTokenizerFast:
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokenizer = Tokenizer.from_str(_trained((start, end)))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
    )
    return _fast(tokenizer, bos_token=start, eos_token=end, pad_token=end, unk_token=end,
                 model_max_length=77)  # fmt: skip


def t5_tokenizer(longest: int = 512) -> PreTrainedTokenizerFast:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0)]
    pieces += [("\u2581" + word, -3.0) for word in _WORDS]
    pieces += [("\u2581", -6.0)] + [(char, -7.0) for char in map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return _fast(tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
                 model_max_length=longest)  # fmt: skip


def decoder_tokenizer(
    extra: tuple[str, ...] = (), *, side: str = "right", bos: bool = True
) -> PreTrainedTokenizerFast:
    """As Gemma and Llama have them."""
    tokenizer = Tokenizer.from_str(_trained(("<pad>", "<eos>", "<bos>", "<unk>", *extra)))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    return _fast(tokenizer, side, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>",
                 unk_token="<unk>", model_max_length=512)  # fmt: skip


_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
         "<|image_pad|>", "<|video_pad|>", "<think>", "</think>")  # fmt: skip
_QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(_trained(_QWEN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    fast = _fast(tokenizer, side, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                 unk_token="<|endoftext|>", model_max_length=2048,
                 extra_special_tokens=names)  # fmt: skip
    fast.chat_template = _QWEN_CHAT
    return fast


# -- text encoders


def clip_encoder(cls: Any = transformers.CLIPTextModel, hidden: int = 32, longest: int = 77) -> Any:
    torch.manual_seed(0)
    return cls(
        transformers.CLIPTextConfig(
            bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=hidden, vocab_size=700,
            intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, projection_dim=32,
            max_position_embeddings=longest,
        )
    )  # fmt: skip


def pooled_clip_encoder(**config: Any) -> Any:
    return clip_encoder(transformers.CLIPTextModelWithProjection, **config)


def t5_encoder() -> Any:
    torch.manual_seed(0)
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=700, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def gemma_encoder() -> Any:
    torch.manual_seed(0)
    return transformers.Gemma2Model(
        transformers.Gemma2Config(
            head_dim=8, hidden_size=8, intermediate_size=16, num_attention_heads=2,
            num_hidden_layers=2, num_key_value_heads=2, vocab_size=700, sliding_window=64,
            max_position_embeddings=1024, attn_implementation="eager",
        )
    )  # fmt: skip


def qwen3_encoder(cls: Any = transformers.Qwen3Model, layers: int = 3) -> Any:
    torch.manual_seed(0)
    return cls(
        transformers.Qwen3Config(
            hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
            num_key_value_heads=2, head_dim=8, vocab_size=700, max_position_embeddings=1024,
            bos_token_id=0, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def small_vae(channels: int = 4, blocks: tuple[int, ...] = (8, 16), **config: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=blocks, latent_channels=channels, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks), **config,
    )  # fmt: skip


def plain_vae(channels: int = 4, blocks: tuple[int, ...] = (8, 16)) -> Any:
    """Without quantisation convolutions, as flow-matching models have them."""
    return small_vae(channels, blocks, use_quant_conv=False, use_post_quant_conv=False,
                     shift_factor=0.0609, scaling_factor=1.5035)  # fmt: skip
