"""What ``/v1/images`` answers: OpenAI's fields, and ours."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from omni_engine.engine.gateway.picture_encoding import FormatName


class TokenDetails(BaseModel):
    """Tokens by kind; nothing here is counted in tokens."""

    image_tokens: int = 0
    text_tokens: int = 0


class Usage(BaseModel):
    """OpenAI's count of tokens, which its clients expect; all zero."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: TokenDetails = TokenDetails()
    output_tokens_details: TokenDetails = TokenDetails()


class AppliedLora(BaseModel):
    """An adapter that was active; its digest is that of its content."""

    name: str
    digest: str
    scale: float


class Metrics(BaseModel):
    """How the request was run."""

    queue_ms: float
    run_ms: float
    num_steps: int
    num_forwards: int
    mean_batch_size: float
    max_batch_size: int
    worker: str


class Ran(BaseModel):
    """What became of a request, whatever it made."""

    request_id: str
    model: str
    seed: int | None
    applied_loras: list[AppliedLora]
    metrics: Metrics


class ImageItem(BaseModel):
    """One of the pictures."""

    b64_json: str | None = None
    url: str | None = None
    seed: int | None = None


class ImagesAnswer(Ran):
    """The pictures and how they were made."""

    created: int
    data: list[ImageItem]
    background: Literal["opaque", "transparent"]
    output_format: FormatName
    quality: str
    size: str
    usage: Usage = Usage()
