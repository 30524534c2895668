"""Which files clients may have registered as adapters: those below a stage's ``lora_dirs``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from omni_engine.protocol.errors import ConfigError, InvalidRequestError, shorten
from omni_engine.stages.bundled import MODEL_DIR
from omni_engine.stages.config import EngineArgs, resolve_adapter, textual

_BUNDLED = "bundled:"


def is_bundled(path: str) -> bool:
    """Whether a path names an adapter that comes with the bundled model."""
    return path.startswith(_BUNDLED)


def allowed_file(path: str, arguments: EngineArgs) -> str:
    """Return the file, all links resolved, that a client's path means.

    Args:
        path: ``bundled:NAME``, or a file or a folder that holds one, absolute or relative to any of
            the stage's ``lora_dirs``.
        arguments: the stage's settings.

    Raises:
        InvalidRequestError: if it leads out of these folders, or means no safetensors file.
    """
    try:
        if is_bundled(path):
            if arguments.resolved_model() != str(MODEL_DIR):
                reason = "the bundled adapters are for the bundled model"
                raise _refused(path, reason, arguments.lora_dirs)
            return str(resolve_adapter(path, ""))
        roots = [os.path.realpath(folder) for folder in arguments.lora_dirs]
        found = resolve_adapter(_place(path, roots), "")
        real = str(textual(Path(os.path.realpath(found))))
    except ConfigError as error:
        raise _refused(path, error.message, arguments.lora_dirs, error.hint) from None
    if not _is_inside(real, roots):  # the one file of a folder may be a link
        raise _outside(path, roots)
    return real


def _place(path: str, roots: Sequence[str]) -> str:
    """Return the first place that a path may mean and where something is.

    Nothing outside the folders is looked at but links on the way: a client learns nothing of it.
    """
    places = [os.path.join(root, path) for root in roots]  # an absolute path stays as it is
    inside = [place for place in places if _is_inside(os.path.realpath(place), roots)]
    found = next((place for place in inside if os.path.exists(place)), None)
    if found is None and len(inside) < max(1, len(places)):
        raise _outside(path, roots)
    return found or inside[0]


def _is_inside(real: str, roots: Sequence[str]) -> bool:
    return any(os.path.commonpath([root, real]) == root for root in roots)


def _outside(path: str, roots: Sequence[str]) -> InvalidRequestError:
    why = "the path leads elsewhere" if roots else "this stage has none"
    hint = None if roots else "Start the engine with lora_dirs (serve --lora-dirs DIR)."
    return _refused(path, f"adapters may be loaded from lora_dirs only, and {why}", roots, hint)


def _refused(
    path: str, reason: str, roots: Sequence[str], hint: str | None = None
) -> InvalidRequestError:
    places = ": " + shorten(", ".join(roots)) if roots else ""
    return InvalidRequestError(
        reason,
        field="path",
        value=path,
        expected=f"a safetensors file, or a folder with one, inside the stage's lora_dirs{places}",
        hint=hint,
    )
