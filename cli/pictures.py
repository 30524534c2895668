"""Writes what a request made: one file each, named after prompt and seed, nothing overwritten.

Pictures are PNG files; clips and pictures in layers are animated ones; sounds are WAV files.
"""

from __future__ import annotations

import io
import re
import unicodedata
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from omni_engine.protocol.errors import ConfigError, OmniError
from omni_engine.protocol.outputs import DiffusionOutput

_SLUG_CHARS = 80
_DEFAULT_FPS = 16.0
_DEFAULT_SAMPLE_RATE = 44_100


class OutputFileError(OmniError):
    """A picture can't be written."""

    code: ClassVar[str] = "output_file"


class PictureFolder:
    """The folder that takes the pictures.

    Args:
        path: is created where it is missing.
        fps: frames per second of videos, which are written as animated PNG files.
        flag: the option that named the folder.

    Raises:
        ConfigError: if it can't be used.
    """

    def __init__(self, path: Path, fps: float | None = None, flag: str = "--out") -> None:
        self._path = path
        self._fps = fps or _DEFAULT_FPS
        self._flag = flag
        make_folder(path, flag)

    def write(self, number: int, prompt: str, output: DiffusionOutput) -> list[Path]:
        """Write everything that a request made, one file per output.

        Args:
            number: the prompt's number, counted from 1.
            prompt: becomes a part of the names.
            output: a completed one.

        Returns:
            The files, in the order of the outputs.

        Raises:
            OutputFileError: if the operating system refuses, or there is nothing to write.
        """
        if not output.images and not output.frames and not output.audio:
            raise OutputFileError(
                "the engine returned no pictures or sounds", field="output_type",
                hint='Its default_sampling_params may say output_type "latent".',
            )  # fmt: skip
        seed = output.seed or 0
        return [
            self._write_one(f"{number:02}-{slug(prompt)}-{seed + index}", data, ending)
            for index, (data, ending) in enumerate(self._encoded(output))
        ]

    def write_preview(self, number: int, prompt: str, step: int, picture: Any) -> Path:
        """Write how a request looks after some of its steps; the seed may not be known yet.

        Args:
            number: the prompt's number, counted from 1.
            prompt: becomes a part of the name.
            step: steps done.
            picture: a uint8 array of shape (height, width, 3).

        Raises:
            OutputFileError: if the operating system refuses.
        """
        return self._write_one(f"{number:02}-{slug(prompt)}-step-{step:04}", png_bytes([picture]))

    def rename_preview(self, preview: Path, step: int, picture: Path) -> Path:
        """Name a preview after the picture that it became: PICTURE-step-STEP.png.

        Args:
            preview: a file that ``write_preview`` wrote.
            step: steps done.
            picture: the finished picture's file.

        Raises:
            OutputFileError: if the operating system refuses.
        """
        reserved = self._write_one(f"{picture.stem}-step-{step:04}", b"")
        try:
            return preview.replace(reserved)
        except OSError as error:
            raise OutputFileError(
                f"a preview can't be renamed: {error.strerror}",
                field=self._flag,
                value=str(preview),
            ) from None

    def _encoded(self, output: DiffusionOutput) -> Iterator[tuple[bytes, str]]:
        for picture in output.images or ():
            yield png_bytes([picture]), ".png"
        for frames in output.frames or ():
            yield png_bytes(frames, self._fps), ".png"
        for sound in output.audio or ():
            yield wav_bytes(sound, output.sample_rate), ".wav"

    def _write_one(self, name: str, data: bytes, ending: str = ".png") -> Path:
        for path in free_names(self._path, name, ending):
            try:
                with path.open("xb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError as error:
                raise OutputFileError(
                    f"a file can't be written: {error.strerror}",
                    field=self._flag,
                    value=str(path),
                ) from None
            return path
        raise AssertionError("names never run out")


def make_folder(path: Path, flag: str = "--out") -> None:
    """Create the folder for the pictures where it is missing.

    Args:
        path: the folder.
        flag: the option that named it.

    Raises:
        ConfigError: if that can't be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for the pictures can't be used: {error.strerror}", field=flag,
            value=str(path), expected="a folder, or a path where one can be created",
        ) from None  # fmt: skip


def free_names(folder: Path, name: str, ending: str) -> Iterator[Path]:
    """Yield ``NAME.png``, ``NAME-2.png``… for a caller that takes the first that doesn't exist."""
    yield folder / f"{name}{ending}"
    count = 2
    while True:
        yield folder / f"{name}-{count}{ending}"
        count += 1


def slug(prompt: str) -> str:
    """Return a prompt as a part of a file name: lower-case words joined by dashes."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return words[:_SLUG_CHARS].rstrip("-") or "picture"


def png_bytes(frames: Any, fps: float | None = None) -> bytes:
    """Encode uint8 arrays of shape (height, width, 3 or 4) as one PNG, animated if several."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    buffer = io.BytesIO()
    if rest:
        duration_ms = 1000 / (fps or _DEFAULT_FPS)
        first.save(buffer, "PNG", save_all=True, append_images=rest, duration=duration_ms, loop=0)
    else:
        first.save(buffer, "PNG")
    return buffer.getvalue()


def wav_bytes(sound: npt.NDArray[np.float32], sample_rate: int | None) -> bytes:
    """Encode a sound of shape (channels, samples) as a WAV file of 16 bits per sample.

    Args:
        sound: full scale is -1 to 1; what is louder is clipped.
        sample_rate: samples per second; None: 44,100.
    """
    samples = (np.nan_to_num(sound).clip(-1, 1) * 32767).round().astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(len(samples))
        file.setsampwidth(2)
        file.setframerate(sample_rate or _DEFAULT_SAMPLE_RATE)
        file.writeframes(samples.T.tobytes())
    return buffer.getvalue()
