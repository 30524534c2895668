"""The bundled model's tokenizer: a byte-level BPE in which each word of the grammar is a token."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from . import pictures

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity,"
    " text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
TEMPLATE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE_PREFIX_TOKENS = 34
"""QwenImagePipeline drops this many leading tokens, so the prefix must have exactly as many."""

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tokenizer() -> Any:
    """Trains the tokenizer on the grammar's words and the pipeline's template.

    Raises:
        ValueError: The template's prefix does not tokenize to 34 tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(_corpus(), trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        eos_token="<|im_end|>",
        additional_special_tokens=list(_SPECIALS[1:]),
        padding_side="right",
    )
    if (count := len(tokenizer(TEMPLATE_PREFIX).input_ids)) != TEMPLATE_PREFIX_TOKENS:
        raise ValueError(f"the template's prefix has {count} tokens, not {TEMPLATE_PREFIX_TOKENS}")
    return tokenizer


def in_template(sentence: str) -> str:
    """Wraps a sentence as QwenImagePipeline does before it tokenizes."""
    return f"{TEMPLATE_PREFIX}{sentence}{TEMPLATE_SUFFIX}"


def _corpus() -> Iterator[str]:
    template = TEMPLATE_PREFIX + TEMPLATE_SUFFIX
    for special in _SPECIALS:
        template = template.replace(special, "\0")
    yield from template.split("\0")
    colours = {*pictures.COLOURS, *pictures.BACKGROUNDS}
    words = itertools.chain(colours, pictures.SHAPES, filter(None, pictures.SIZES))
    for word in sorted({*words, "a", "an", "on", "of", "left", "right", "above", "below"}):
        yield word
        yield f" {word}"
