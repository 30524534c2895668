"""Videos in the making and made: they go on without their client, and are kept for a while."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_engine.engine.async_client import AsyncRequestHandle
from omni_engine.engine.gateway.disk_file import DiskFile
from omni_engine.engine.gateway.errors import GatewayError, from_engine
from omni_engine.engine.gateway.state import Gateway
from omni_engine.engine.gateway.video_encoding import (
    Frames,
    Sound,
    encode_thumbnail,
    encode_video,
    even_size,
)
from omni_engine.engine.gateway.video_job import VideoJob
from omni_engine.engine.gateway.video_requests import VideoPlan
from omni_engine.engine.gateway.weights import is_light
from omni_engine.protocol.errors import OmniError, PipelineContractError
from omni_engine.protocol.outputs import DiffusionOutput

logger = logging.getLogger(__name__)

_ALMOST_DONE = 99
"""Percent at most before the file is there."""


class VideoJobs:
    """All videos that are known.

    Args:
        gateway: the connection, the threads and the settings.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._jobs: dict[str, VideoJob] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of those that have ended, oldest first
        self._kept_bytes = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._count = 0
        threads = gateway.http.encoder_threads
        self._turns = asyncio.Semaphore(max(1, threads - 1))  # pictures don't wait for long clips

    async def submit(
        self,
        prompt: str,
        inputs: Mapping[str, Any],
        model: str,
        plan: VideoPlan,
        request_id: str | None = None,
    ) -> VideoJob:
        """Have a video made; returns once the engine has taken it in.

        Args:
            prompt: the text.
            inputs: pictures by the engine's name of the input.
            model: a served model's name.
            plan: what to ask for.
            request_id: the engine's request gets this one; drawn if None.

        Raises:
            OmniError: why the engine refuses it.
        """
        params = plan.params
        handle = await self._gateway.client.submit(
            {"prompt": prompt, "multi_modal_data": dict(inputs)},
            params,
            model=model,
            request_id=request_id,
            in_thread=not is_light([prompt, params.negative_prompt, params.extra_args]),
        )
        async for first in handle.events():
            if first.status.startswith("finished"):
                (await handle.result()).raise_for_error()
            break
        self._count += 1
        size = None if plan.size is None else even_size(*plan.size)
        job = VideoJob(
            f"video_{uuid.uuid4().hex}", self._count, handle.request_id, model, prompt, plan,
            num_frames=plan.num_frames, size=size,
        )  # fmt: skip
        self._jobs[job.video_id] = job
        self._tasks[job.video_id] = asyncio.create_task(self._make(job, handle))
        return job

    def find(self, video_id: str) -> VideoJob:
        """Return a video.

        Raises:
            GatewayError: 404 if it is not known.
        """
        if (job := self._jobs.get(video_id)) is not None:
            return job
        raise GatewayError(
            404,
            f"There is no video {video_id!r}. Videos are kept for "
            f"{self._gateway.http.result_ttl_s:g} s after their end, fewer when room is short.",
            "video_id",
            "unknown_video",
        )

    def page(
        self, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[VideoJob], bool]:
        """Return at most ``limit`` videos, and whether there are more.

        Args:
            after: the last video of the page before.
            limit: >= 1.
            newest_first: the order.

        Raises:
            GatewayError: 404 if ``after`` is not known.
        """
        jobs = list(self._jobs.values())
        if newest_first:
            jobs.reverse()
        if after is not None:
            number = self.find(after).number
            sign = -1 if newest_first else 1
            jobs = [job for job in jobs if sign * (job.number - number) > 0]
        return jobs[:limit], len(jobs) > limit

    def delete(self, video_id: str) -> None:
        """Forget a video; one in the making is aborted.

        Raises:
            GatewayError: 404 if it is not known.
        """
        self.find(video_id).unwanted.set()
        if (task := self._tasks.pop(video_id, None)) is not None:
            task.cancel()
        self._forget(video_id)

    async def close(self) -> None:
        """End everything."""
        for job in self._jobs.values():
            job.unwanted.set()
        for timer in self._timers.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, job: VideoJob, handle: AsyncRequestHandle) -> None:
        """Follow a video to its end, which it has whatever happens."""
        try:
            await self._follow(job, handle)
            await self._encode(job, (await handle.result()).raise_for_error())
        except asyncio.CancelledError:
            handle.abort()
            raise
        except OmniError as error:
            self._fail(job, video_error(error))
        except GatewayError as error:
            self._fail(job, error)
        except Exception:  # boundary: whatever goes wrong, the job ends and tells
            logger.exception("making the file of %s failed", job.video_id)
            told = "The video was made, but not its file; the server's log tells why."
            self._fail(job, GatewayError(500, told, code="encoding_failed"))
        del self._tasks[job.video_id]
        self._keep(job)

    async def _follow(self, job: VideoJob, handle: AsyncRequestHandle) -> None:
        async for event in handle.events():
            if event.status == "running":
                job.status = "in_progress"
            if event.step is not None and event.num_steps:
                percent = 100 * event.step // event.num_steps
                job.progress = max(job.progress, min(_ALMOST_DONE, percent))

    async def _encode(self, job: VideoJob, output: DiffusionOutput) -> None:
        if not output.frames or not len(output.frames[0]):
            raise PipelineContractError("the model made no frames")
        frames, sound = output.frames[0], None
        if output.audio and output.sample_rate:
            sound = Sound(output.audio[0], output.sample_rate)
        job.output = dataclasses.replace(output, images=None, frames=None, audio=None)
        output.frames = output.audio = None  # the handle keeps the output; frames end with the file
        job.num_frames, job.size = len(frames), even_size(*frames.shape[1:3])
        run, cancelled = self._gateway.encoders.run, job.unwanted.is_set
        async with self._turns:
            job.file, job.thumbnail = await run(
                _files_of, self._gateway.directory, frames, job.plan.fps, sound, cancelled
            )
        most = self._gateway.http.max_kept_bytes
        if job.kept_bytes > most:
            told = f"The video's file is larger than {most} bytes (http.max_kept_bytes)."
            raise GatewayError(500, told, code="result_too_large")
        job.status, job.progress, job.completed_at = "completed", 100, int(time.time())

    def _fail(self, job: VideoJob, error: GatewayError) -> None:
        error.__traceback__ = None  # it would keep the frames
        job.status, job.error, job.file, job.thumbnail = "failed", error, None, b""

    def _keep(self, job: VideoJob) -> None:
        """Keep what has ended for its time, and the oldest no longer than there is room."""
        ttl_s = self._gateway.http.result_ttl_s
        job.expires_at = int(time.time() + ttl_s)
        timer = asyncio.get_running_loop().call_later(ttl_s, self._forget, job.video_id)
        self._timers[job.video_id] = timer
        self._kept_bytes += job.kept_bytes
        while self._kept_bytes > self._gateway.http.max_kept_bytes:
            self._forget(next(iter(self._timers)))

    def _forget(self, video_id: str) -> None:
        job = self._jobs.pop(video_id)
        if (timer := self._timers.pop(video_id, None)) is not None:
            timer.cancel()
            self._kept_bytes -= job.kept_bytes


def video_error(error: OmniError) -> GatewayError:
    """Return an engine's error, naming the field of ``/v1/videos``."""
    told = from_engine(error)
    if told.param is not None and told.param.startswith("image"):
        told.param = "input_reference"
    return told


def _files_of(
    directory: Path,
    frames: Frames,
    fps: float,
    sound: Sound | None,
    cancelled: Callable[[], bool],
) -> tuple[DiskFile, bytes]:
    file = DiskFile(directory)
    encode_video(file.path, frames, fps, sound, cancelled)
    return file, encode_thumbnail(frames[0])
