"""A video, made or in the making."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from omni_engine.engine.gateway.disk_file import DiskFile
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.video_requests import VideoPlan
from omni_engine.engine.gateway.video_schemas import VideoStatus
from omni_engine.protocol.outputs import DiffusionOutput

_BYTES_BESIDE = 2048
"""What a job takes beside its prompt and files, roughly."""


@dataclass(eq=False)
class VideoJob:
    """A video, made or in the making.

    Attributes:
        video_id: its name.
        number: in order of creation.
        request_id: of the engine's request.
        model: that makes it.
        prompt: of the request.
        plan: what was asked for.
        created_at: unix seconds, like all times.
        status: in OpenAI's words.
        progress: 0 to 100.
        completed_at: when it ended well.
        expires_at: when it is forgotten.
        error: why it failed.
        output: what the engine told of it, without its frames.
        size: height and width of the file, as far as known.
        num_frames: as far as known.
        file: once completed.
        thumbnail: once completed: WebP.
        unwanted: set when nobody wants it any more.
    """

    video_id: str
    number: int
    request_id: str
    model: str
    prompt: str
    plan: VideoPlan
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: VideoStatus = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: int | None = None
    error: GatewayError | None = None
    output: DiffusionOutput | None = None
    size: tuple[int, int] | None = None
    num_frames: int | None = None
    file: DiskFile | None = None
    thumbnail: bytes = b""
    unwanted: threading.Event = field(default_factory=threading.Event)

    @property
    def kept_bytes(self) -> int:
        """What it takes."""
        file = 0 if self.file is None else self.file.size
        return file + len(self.thumbnail) + len(self.prompt) + _BYTES_BESIDE
