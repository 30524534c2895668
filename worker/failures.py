"""What a pipeline raised, as something that can be kept, logged and sent."""

from __future__ import annotations

import logging
import traceback
from typing import TypeVar

from omni_engine.protocol.errors import ModelError, OmniError, OutOfMemoryError
from omni_engine.worker.memory import is_out_of_memory

logger = logging.getLogger(__name__)

_MOST_FRAMES = 12
"""Of a traceback that is logged; the innermost ones tell where the pipeline failed."""

Raised = TypeVar("Raised", bound=BaseException)


def bare(error: Raised) -> Raised:
    """Return an error without what keeps tensors alive: frames, errors it came from, objects.

    Where it was raised stays with it as a note, for the log.
    """
    noted = isinstance(error, OmniError) or _has_notes(error)
    if error.__traceback__ is not None and not noted:
        where = traceback.format_exception(error, limit=-_MOST_FRAMES, chain=False)
        error.__notes__ = ["".join(where)]
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if isinstance(error, AttributeError):
        error.obj = None
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            bare(inner)
    return error


def pipeline_error(error: BaseException) -> OmniError:
    """Return a typed error, bare, for whatever a pipeline raised."""
    if isinstance(error, OmniError):
        return bare(error)
    bare(error)
    made: ModelError
    if is_out_of_memory(error):
        made = OutOfMemoryError(
            f"the request does not fit into the device's memory: {text_of(error)}",
            hint="Ask for a smaller picture, fewer frames or fewer outputs.",
        )
    else:
        made = ModelError(f"the pipeline failed: {text_of(error)}")
    made.__notes__ = list(getattr(error, "__notes__", ()))
    return made


def text_of(error: BaseException) -> str:
    """Return an error's class and text; of one whose text can't be had, its class."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # boundary: a pipeline's own error class
        return type(error).__name__


def log_failure(request_id: str, error: OmniError) -> None:
    """Write the one line about a request that ended with an error, and where it was raised."""
    if error.code != "aborted":
        shown = error if _has_notes(error) else None
        logger.warning("request %s failed: %s: %s", request_id, error.code, error, exc_info=shown)


def _has_notes(error: BaseException) -> bool:
    return bool(getattr(error, "__notes__", None))
