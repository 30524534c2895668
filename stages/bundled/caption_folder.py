"""Folders of pictures with captions, as `train-lora` reads them; torch isn't needed for it.

A folder holds `name.png` (or jpg, jpeg, webp) with its caption in `name.txt`, or pictures and a
`metadata.jsonl` with a line `{"file_name": "name.png", "text": "its caption"}` for each of them.
Pictures may lie in subfolders; names that start with a dot are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageOps

from omni_engine.protocol.errors import ConfigError, shorten

from .pictures import IMAGE_SIZE, Picture

SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp")
METADATA: Final = "metadata.jsonl"

_OTHER_PICTURES: Final = (".avif", ".bmp", ".gif", ".heic", ".tif", ".tiff")
_SHOWN_PROBLEMS: Final = 5
_UNREADABLE: Final = "?"
"""Stands for a caption that is reported as unreadable, so that it isn't called missing, too."""


@dataclass(frozen=True)
class CaptionedPictures:
    """Pictures with captions, in the order of their names.

    Attributes:
        names: The pictures' paths within their folder.
        captions: One line of text a picture.
        pictures: uint8 arrays of shape (64, 64, 3).
    """

    names: list[str]
    captions: list[str]
    pictures: list[Picture]

    def digest(self) -> str:
        """Gives the SHA-256 of captions and pixels, in hexadecimal."""
        digest = hashlib.sha256()
        for caption, picture in zip(self.captions, self.pictures, strict=True):
            digest.update(caption.encode(errors="surrogatepass") + b"\0")
            digest.update(picture.tobytes())
        return digest.hexdigest()


def read_caption_folder(folder: Path) -> CaptionedPictures:
    """Reads a folder; pictures of another size are cropped around their middle and resized.

    Raises:
        ConfigError: There is no such folder, or no picture in it, or something in it is wrong; the
            message names the first files that are.
    """
    if not folder.is_dir():
        raise ConfigError("there is no such folder", field="data", value=str(folder))
    problems: list[str] = []
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and not _hidden(p, folder)]
    found = {p.relative_to(folder).as_posix(): p for p in files if p.suffix.lower() in SUFFIXES}
    problems += [
        f"{p.relative_to(folder).as_posix()}: pictures must be {', '.join(SUFFIXES)}"
        for p in files
        if p.suffix.lower() in _OTHER_PICTURES
    ]
    captions = _captions(folder, found, files, problems)
    problems += [f"{name} has no caption" for name in found if name not in captions]
    problems += [f"{name}: the caption is empty" for name, text in captions.items() if not text]
    read = [name for name in found if captions.get(name)]
    pictures = list(_pictures([found[name] for name in read], folder, problems))
    if not found and not problems:
        problems.append("it holds no pictures")
    if problems:
        raise _folder_error(folder, problems)
    return CaptionedPictures(read, [captions[name] for name in read], pictures)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _folder_error(folder: Path, problems: list[str]) -> ConfigError:
    named = problems[:_SHOWN_PROBLEMS]
    if further := len(problems) - len(named):
        named.append(f"and {further} more")
    return ConfigError(
        f"the folder can't be learnt from: {'; '.join(named)}",
        field="data",
        value=str(folder),
        expected=f"pictures ({', '.join(SUFFIXES)}) with a caption each, in a .txt file of the "
        f"picture's name, or all of them in {METADATA}",
    )


def _captions(
    folder: Path, found: dict[str, Path], files: list[Path], problems: list[str]
) -> dict[str, str]:
    """Gives captions by the pictures' names; each is one line, and may be empty."""
    texts = [path for path in files if path.suffix.lower() == ".txt"]
    if (folder / METADATA).is_file():
        problems += [
            f"{path.relative_to(folder).as_posix()}: captions are in {METADATA} already"
            for path in texts
        ]
        return _from_metadata(folder / METADATA, found, problems)
    by_stem = {path.with_suffix(""): path for path in texts}
    captions = {}
    for name, path in found.items():
        if text := by_stem.get(path.with_suffix("")):
            captions[name] = _text(text, folder, problems)
    stems = {path.with_suffix("") for path in found.values()}
    problems += [
        f"{text.relative_to(folder).as_posix()} belongs to no picture"
        for stem, text in by_stem.items()
        if stem not in stems
    ]
    return captions


def _text(path: Path, folder: Path, problems: list[str]) -> str:
    try:
        return _line(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.relative_to(folder).as_posix()} can't be read: {_why(error)}")
        return _UNREADABLE


def _from_metadata(path: Path, found: dict[str, Path], problems: list[str]) -> dict[str, str]:
    captions: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{METADATA} can't be read: {_why(error)}")
        return dict.fromkeys(found, _UNREADABLE)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            problems.append(f"{METADATA}:{number}: no JSON: {error}")
            continue
        fields = entry if isinstance(entry, dict) else {}
        name, text = fields.get("file_name"), fields.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            problems.append(f'{METADATA}:{number}: "file_name" and "text" must both be text')
        elif name not in found:
            problems.append(f"{METADATA}:{number}: there is no picture {shorten(name)}")
        elif name in captions:
            problems.append(f"{METADATA}:{number}: {name} has a caption already")
        else:
            captions[name] = _line(text)
    return captions


def _line(text: str) -> str:
    return " ".join(text.split())


def _pictures(paths: list[Path], folder: Path, problems: list[str]) -> Iterator[Picture]:
    for path in paths:
        try:
            yield _picture(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{path.relative_to(folder).as_posix()} can't be read: {_why(error)}")


def _picture(path: Path) -> Picture:
    with Image.open(path) as file:
        upright = ImageOps.exif_transpose(file)
        if upright.has_transparency_data:
            pixels = upright.convert("RGBA")
            white = Image.new("RGBA", pixels.size, "white")
            upright = Image.alpha_composite(white, pixels)
        fitted = ImageOps.fit(
            upright.convert("RGB"), (IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS
        )
    return np.asarray(fitted, dtype=np.uint8)


def _why(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
