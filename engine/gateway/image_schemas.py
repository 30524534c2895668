"""What ``/v1/images`` takes: OpenAI's fields, and ours."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.picture_encoding import (
    TRANSPARENT_FORMATS,
    FormatName,
    PictureFormat,
)
from omni_engine.engine.gateway.validation import Body
from omni_engine.engine.gateway.weights import is_light
from omni_engine.protocol.sampling import (
    MAX_COMPOSED_ADAPTERS,
    MAX_NAME_CHARS,
    MAX_SCALE,
    MAX_SEED,
    LoRARequest,
)

PASSED_ON = (
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "seed",
    "sampler",
)
"""Fields of pictures and videos alike that the engine takes as they are."""

Guidance = Annotated[float, Field(ge=-1000, le=1000)]
Whole = Annotated[int, Field(ge=1, lt=1 << 31)]


class LoraChoice(Body):
    """An adapter by its registered name, and how strongly it applies."""

    where: ClassVar[str] = "lora"

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] | None = None


def _kind_of_lora(given: Any) -> str:
    return "<list>" if isinstance(given, list | tuple) else "<one>"


LoraChoices = Annotated[list[LoraChoice], Field(max_length=MAX_COMPOSED_ADAPTERS)]
Lora = Annotated[
    Annotated[LoraChoice, Tag("<one>")] | Annotated[LoraChoices, Tag("<list>")],
    Discriminator(_kind_of_lora),
]


def lora_request_of(
    lora: LoraChoice | list[LoraChoice] | None,
) -> LoRARequest | list[LoRARequest] | None:
    """Return what a choice of adapters is to the engine."""
    if lora is None:
        return None
    if isinstance(lora, LoraChoice):
        return LoRARequest(lora.name, lora.scale)
    return [LoRARequest(one.name, one.scale) for one in lora]


class StreamOptions(Body):
    """What a stream tells beside pictures."""

    where: ClassVar[str] = "stream_options"

    include_progress: Annotated[
        bool, Field(description="Also send `image_generation.progress` after steps.")
    ] = False


class ImageFields(Body):
    """What generations and edits have in common; what is left open takes the model's default."""

    synonyms: ClassVar[dict[str, str]] = {
        "height": "size",
        "width": "size",
        "steps": "num_inference_steps",
        "num_steps": "num_inference_steps",
        "num_images": "n",
        "num_outputs_per_prompt": "n",
        "batch_size": "n",
        "cfg_scale": "guidance_scale",
        "lora_request": "lora",
        "loras": "lora",
        "format": "output_format",
        "timeout": "timeout_s",
    }
    refused: ClassVar[dict[str, str]] = {
        "style": "it belongs to DALL-E 3; say it in the prompt",
        "input_fidelity": "models here have strength or guidance instead",
        "complexity": "it is for SVG",
        "svg": "models here make pixels",
        "markup": "say it in the prompt, or with a mask",
        "frame_count": "models here make single pictures; see /v1/videos",
        "frame_duration_ms": "models here make single pictures; see /v1/videos",
    }

    prompt: Annotated[
        str,
        Field(min_length=1, examples=["a red circle on a white background"]),
    ]
    model: Annotated[
        str | None, Field(description="One of `/v1/models`; the first if left out.")
    ] = None
    n: Annotated[Whole | None, Field(description="Pictures; picture i uses seed + i.")] = None
    size: Annotated[
        str | None,
        Field(
            pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$",
            description="WIDTHxHEIGHT in pixels, or `auto`: the model's own, in an edit with the "
            "picture's proportions.",
            examples=["64x64"],
        ),
    ] = None
    response_format: Annotated[
        Literal["b64_json", "url"] | None,
        Field(description="`url`: kept on the server for a while. Default: `b64_json`."),
    ] = None
    output_format: Annotated[FormatName | None, Field(description="Default: `png`.")] = None
    output_compression: Annotated[
        int | None, Field(ge=0, le=100, description="Quality of jpeg and webp. Default: 100.")
    ] = None
    background: Annotated[
        Literal["auto", "opaque", "transparent"] | None,
        Field(description="`transparent` needs a model that makes transparency, and png or webp."),
    ] = None
    quality: Annotated[
        Literal["auto", "standard"] | None,
        Field(description="No effect: num_inference_steps and size decide."),
    ] = None
    user: Annotated[str | None, Field(description="No effect.")] = None
    safety_identifier: Annotated[str | None, Field(description="No effect.")] = None
    stream: Annotated[bool | None, Field(description="Answer with server-sent events.")] = None
    partial_images: Annotated[
        int | None, Field(ge=0, le=3, description="Pictures sent before the last; needs `stream`.")
    ] = None
    stream_options: StreamOptions | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[Whole | None, Field(description="Denoising steps.")] = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    sampler: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    max_sequence_length: Annotated[Whole | None, Field(description="Tokens of the prompt.")] = None
    lora: Annotated[
        Lora | None,
        Field(description="A registered adapter, or a list; `[]` is the bare model."),
    ] = None
    extra_args: Annotated[
        dict[str, JsonValue] | None, Field(description="Further arguments of the pipeline.")
    ] = None
    timeout_s: Annotated[
        float | None,
        Field(ge=0.001, le=30 * 86_400, description="Seconds after which it is given up."),
    ] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.partial_images and not self.stream:
            raise _contradiction("partial_images needs stream: true.", "partial_images")
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options needs stream: true.", "stream_options")
        if self.stream and self.response_format == "url":
            raise _contradiction('A stream has pictures as "b64_json" only.', "response_format")
        kind = self.output_format or "png"
        if self.output_compression is not None and kind == "png":
            raise _contradiction(
                "output_compression needs output_format jpeg or webp: png loses nothing.",
                "output_compression",
            )
        if self.background == "transparent" and kind not in TRANSPARENT_FORMATS:
            raise _contradiction(f"A {kind} can't be transparent; png and webp can.", "background")
        return self

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """The size in pixels; None for the model's own."""
        if self.size is None or self.size == "auto":
            return None
        width, height = self.size.split("x")
        return int(height), int(width)

    @property
    def picture_format(self) -> PictureFormat:
        """How pictures are written."""
        quality = 100 if self.output_compression is None else self.output_compression
        return PictureFormat(self.output_format or "png", quality, self.background != "opaque")

    @property
    def is_light(self) -> bool:
        """Whether it is so small that it is checked and packed at once."""
        return is_light([self.prompt, self.negative_prompt, self.extra_args])

    @property
    def tells_progress(self) -> bool:
        """Whether the stream tells of steps."""
        return self.stream_options is not None and self.stream_options.include_progress

    @property
    def lora_request(self) -> LoRARequest | list[LoRARequest] | None:
        """The adapters; an empty list is the bare model, None the model's default."""
        return lora_request_of(self.lora)


class ImageGenerationRequest(ImageFields):
    """A picture to draw."""

    moderation: Annotated[
        Literal["auto", "low"] | None, Field(description="No effect: nothing is moderated.")
    ] = None


class ImageEditRequest(ImageFields):
    """A picture to change; the pictures themselves are the form's files."""

    strength: Annotated[
        float | None, Field(ge=0, le=1, description="How far the picture is changed.")
    ] = None


def _contradiction(message: str, param: str) -> GatewayError:
    return GatewayError(400, message, param)
