"""Clips as MP4 files: H.264 that every browser plays, and sound as AAC. For threads, not the loop.

H.264 with 4:2:0 colour needs even sides: a clip of odd height or width is made one pixel larger by
repeating its last row or column, so that nothing of it is lost.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from PIL import Image

THUMBNAIL_QUALITY = 85
_H264_OPTIONS = {"crf": "18", "preset": "fast", "threads": "1"}
_LARGEST_FRACTION = 1001
"""Denominator with which rates such as 30000/1001 are exact."""
_AUDIO_CHUNK = 1024
_AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OTHER_RATE = 48_000

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Sound:
    """What is heard with a clip.

    Attributes:
        samples: float32 of shape (channels, samples), full scale is -1 to 1. More than two
            channels are mixed into one.
        sample_rate: samples per second.
    """

    samples: npt.NDArray[np.float32]
    sample_rate: int


class EncodingCancelledError(Exception):
    """Nobody wants the clip any more."""


def even_size(height: int, width: int) -> tuple[int, int]:
    """Return the height and width of the file of a clip of that size."""
    return height + height % 2, width + width % 2


def encode_video(
    path: str,
    frames: Frames,
    fps: float,
    sound: Sound | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Write a clip; its index comes first, so that players can start before they have it all.

    Args:
        path: of the file.
        frames: uint8 of shape (frames, height, width, 3), or 4 with alpha, which is laid on white.
        fps: frames per second, > 0.
        sound: None for a silent clip.
        cancelled: asked before each frame.

    Raises:
        EncodingCancelledError: as soon as it is cancelled.
        av.FFmpegError: if the file can't be written.
    """
    height, width = even_size(*frames.shape[1:3])
    rate = Fraction(fps).limit_denominator(_LARGEST_FRACTION)
    options = {"movflags": "+faststart"}
    with av.open(path, "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate, options=_H264_OPTIONS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        _tell_colours(stream)
        track = None if sound is None else _audio_track(container, sound)
        if sound is not None and track is not None:
            _encode_sound(container, track, sound)
        for index in range(len(frames)):
            if cancelled():
                raise EncodingCancelledError
            picture = av.VideoFrame.from_ndarray(_even(_opaque(frames[index])), format="rgb24")
            picture.pts, picture.time_base = index, 1 / rate
            converted = picture.reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
            )
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))


def encode_thumbnail(frame: Frames) -> bytes:
    """Return a frame of shape (height, width, 3 or 4) as a WebP picture."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "WEBP", quality=THUMBNAIL_QUALITY)
    return buffer.getvalue()


def _tell_colours(stream: VideoStream) -> None:
    context = stream.codec_context
    context.colorspace = Colorspace.ITU709
    context.color_range = ColorRange.MPEG
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709


def _audio_track(container: OutputContainer, sound: Sound) -> AudioStream:
    rate = sound.sample_rate if sound.sample_rate in _AAC_RATES else _OTHER_RATE
    layout = "stereo" if len(sound.samples) == 2 else "mono"
    return container.add_stream("aac", rate, layout=layout)


def _encode_sound(container: OutputContainer, track: AudioStream, sound: Sound) -> None:
    """Encode all of a sound; compressed it is small beside the clip's frames."""
    layout, rate = track.layout.name, track.rate
    resampler = av.AudioResampler("fltp", layout, rate)
    for piece in _pieces(sound, layout):
        for resampled in resampler.resample(piece):
            container.mux(track.encode(resampled))
    for rest in resampler.resample(None):
        container.mux(track.encode(rest))
    container.mux(track.encode(None))


def _pieces(sound: Sound, layout: str) -> Iterator[av.AudioFrame]:
    samples = sound.samples
    if len(samples) > 2:
        samples = samples.mean(axis=0, keepdims=True, dtype=np.float32)
    for start in range(0, samples.shape[1], _AUDIO_CHUNK):
        part = np.ascontiguousarray(samples[:, start : start + _AUDIO_CHUNK])
        piece = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
        piece.sample_rate, piece.pts = sound.sample_rate, start
        piece.time_base = Fraction(1, sound.sample_rate)
        yield piece


def _opaque(frame: Frames) -> Frames:
    if frame.shape[-1] == 3:
        return frame
    colours, alpha = frame[..., :3].astype(np.uint16), frame[..., 3:].astype(np.uint16)
    return ((colours * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _even(frame: Frames) -> Frames:
    height, width = frame.shape[:2]
    if height % 2 or width % 2:
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame)
