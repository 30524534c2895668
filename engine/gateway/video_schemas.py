"""What ``/v1/videos`` takes and answers: OpenAI's fields, and ours."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, JsonValue

from omni_engine.engine.gateway.image_results import AppliedLora, Metrics
from omni_engine.engine.gateway.image_schemas import Guidance, Lora, Whole, lora_request_of
from omni_engine.engine.gateway.validation import Body
from omni_engine.engine.gateway.weights import is_light
from omni_engine.protocol.sampling import MAX_NAME_CHARS, MAX_SEED, LoRARequest

_SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"
SLOWEST_FPS, FASTEST_FPS = 0.1, 1000.0

VideoStatus = Literal["queued", "in_progress", "completed", "failed"]


def _number(given: Any) -> Any:
    """Return text as the number that it is."""
    try:
        return float(given) if isinstance(given, str) else given
    except ValueError:
        return given


_Length = Annotated[float, Field(gt=0, le=3600)]
_AsText = Annotated[str, Field(pattern=r"^[0-9]+([.][0-9]+)?$")]
Seconds = Annotated[_Length, BeforeValidator(_number, json_schema_input_type=_Length | _AsText)]
"""A number, or text as OpenAI's clients send it."""


class InputReference(Body):
    """A picture to start from, as OpenAI's clients give one that they don't upload."""

    where: ClassVar[str] = "input_reference"
    refused: ClassVar[dict[str, str]] = {"file_id": "there are no stored files; upload the picture"}

    image_url: Annotated[str, Field(description="A `data:` URL, or one of an allowed host.")]


class VideoRequest(Body):
    """A video to make; what is left open takes the model's default."""

    synonyms: ClassVar[dict[str, str]] = {
        "steps": "num_inference_steps",
        "duration": "seconds",
        "image": "input_reference",
        "image_reference": "input_reference",
        "height": "size",
        "width": "size",
        "extra_params": "extra_args",
    }

    prompt: Annotated[str, Field(min_length=1, examples=["a lighthouse in a storm"])]
    model: str | None = None
    seconds: Annotated[
        Seconds | None,
        Field(description="Length; frames are this times the frames per second."),
    ] = None
    size: Annotated[
        str | None, Field(pattern=_SIZE, description="WIDTHxHEIGHT in pixels, or auto.")
    ] = None
    input_reference: Annotated[
        InputReference | str | None,
        Field(description="A picture for models that start from one: a URL, or an upload."),
    ] = None
    n: Annotated[int | None, Field(ge=1, le=1, description="One request makes one video.")] = None
    num_frames: Whole | None = None
    fps: Annotated[float | None, Field(ge=SLOWEST_FPS, le=FASTEST_FPS)] = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[Whole | None, Field(description="Denoising steps.")] = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    sampler: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    lora: Annotated[
        Lora | None,
        Field(description="A registered adapter, or a list; `[]` is the bare model."),
    ] = None
    extra_args: Annotated[
        dict[str, JsonValue] | None, Field(description="Further arguments of the pipeline.")
    ] = None

    @property
    def lora_request(self) -> LoRARequest | list[LoRARequest] | None:
        """The adapters; an empty list is the bare model, None the model's default."""
        return lora_request_of(self.lora)

    @property
    def is_light(self) -> bool:
        """Whether it is so small that it is checked and packed at once."""
        return is_light([self.prompt, self.negative_prompt, self.extra_args])

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """The size in pixels; None for the model's own."""
        if self.size is None or self.size == "auto":
            return None
        width, height = self.size.split("x")
        return int(height), int(width)


class VideoError(BaseModel):
    """Why a video could not be made."""

    code: str
    message: str
    param: str | None = None


class Video(BaseModel):
    """A video, made or in the making."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: VideoStatus
    progress: Annotated[int, Field(ge=0, le=100, description="Percent of its steps.")]
    created_at: Annotated[int, Field(description="Unix seconds, like all times here.")]
    completed_at: int | None = None
    expires_at: Annotated[int | None, Field(description="When it is forgotten.")] = None
    size: Annotated[str, Field(description="WIDTHxHEIGHT of the file; `auto` until known.")]
    seconds: Annotated[str, Field(description="Its length; `auto` until known.")]
    prompt: str
    error: VideoError | None = None
    remixed_from_video_id: None = None
    request_id: Annotated[str, Field(description="Of the engine's request, as in its log.")]
    fps: float
    num_frames: int | None = None
    seed: int | None = None
    applied_loras: list[AppliedLora] = Field(default_factory=list)
    metrics: Metrics | None = None


class VideoList(BaseModel):
    """Some of the videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    """A video is gone."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True
