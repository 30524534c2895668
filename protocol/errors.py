"""The one error taxonomy: what went wrong, in which field, what was expected, what to do.

Every error that crosses a process boundary is an ``OmniError``. Its ``code`` is stable and part of
the protocol; messages are for people and may change.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

_MAX_VALUE_CHARS = 200
_MAX_TEXT_CHARS = 4000


class OmniError(Exception):
    """Base of all errors a user of omni-engine can meet.

    Args:
        message: what happened, one sentence.
        field: dotted name of the offending field, if there is one.
        value: the offending value; shown shortened, sent as text.
        expected: what is allowed there.
        hint: what the reader can do about it.
        retry_after_ms: set where waiting helps: milliseconds after which to try again.
    """

    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        expected: str | None = None,
        hint: str | None = None,
        retry_after_ms: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = None if value is None else shorten(value)
        self.expected = expected
        self.hint = hint
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        parts = [self.message]
        if self.field is not None:
            shown = f"{self.field} = {self.value}" if self.value is not None else self.field
            parts.append(f"[{shown}]")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}.")
        if self.hint is not None:
            if not parts[-1].endswith((".", "!", "?", ":", ";")):
                parts[-1] += "."
            parts.append(self.hint)
        return " ".join(parts)

    def to_wire(self) -> dict[str, Any]:
        """Return the error as a msgpack-able dict; fields that are not set are left out."""
        wire: dict[str, Any] = {"code": self.code}
        for name in ("message", "field", "value", "expected", "hint"):
            if (item := getattr(self, name)) is not None:
                wire[name] = shorten(item, _MAX_TEXT_CHARS)
        if self.retry_after_ms is not None:
            wire["retry_after_ms"] = float(self.retry_after_ms)
        return wire


class ConfigError(OmniError):
    """A stage config, command line or constructor argument is wrong."""

    code = "config_error"


class UnsupportedOptionError(ConfigError):
    """An option is known, but can't take effect here."""

    code = "unsupported_option"


class InvalidRequestError(OmniError):
    """A request's field is missing, of the wrong type or out of range."""

    code = "invalid_request"


class UnknownFieldError(InvalidRequestError):
    """A request, message or ``extra_args`` names a field that doesn't exist."""

    code = "unknown_field"


class UnknownModelError(InvalidRequestError):
    """A request names a model that no stage serves."""

    code = "unknown_model"


class UnknownAdapterError(InvalidRequestError):
    """A request names a LoRA adapter that isn't registered."""

    code = "unknown_adapter"


class DuplicateRequestError(InvalidRequestError):
    """A request id is in use already."""

    code = "duplicate_request_id"


class LimitExceededError(InvalidRequestError):
    """A request asks for more than the engine's limits allow."""

    code = "limit_exceeded"


class UnknownRequestError(InvalidRequestError):
    """An operation names a request that the engine doesn't know (any more)."""

    code = "unknown_request"


class MalformedMessageError(OmniError):
    """A message can't be decoded: random bytes, bad UTF-8, wrong frame count, wrong buffer size."""

    code = "malformed_message"


class MessageTooLargeError(MalformedMessageError):
    """A message is larger than the receiver accepts."""

    code = "message_too_large"


class ProtocolVersionError(OmniError):
    """The two sides speak different protocol versions."""

    code = "protocol_version_mismatch"


class QueueFullError(OmniError):
    """The engine holds as many waiting requests as it may; try later."""

    code = "queue_full"


class RequestAbortedError(OmniError):
    """The request was aborted by its client or by shutdown."""

    code = "aborted"


class ModelError(OmniError):
    """The pipeline raised while it ran this request."""

    code = "model_error"


class OutOfMemoryError(ModelError):
    """A request does not fit into the device's memory, not even alone."""

    code = "out_of_memory"


class PipelineContractError(OmniError):
    """A pipeline class or its result breaks the contract it declares."""

    code = "pipeline_contract"


class ModelLoadError(OmniError):
    """A model, pipeline class or adapter can't be loaded."""

    code = "model_load_failed"


class AdapterError(ModelLoadError):
    """An adapter's file can't be used with the model, or can't be had any more."""

    code = "adapter_unusable"


class WorkerLostError(OmniError):
    """The worker process that ran the request died."""

    code = "worker_lost"


class WorkerDiedRepeatedlyError(WorkerLostError):
    """Two worker processes died while they ran the request: it isn't run again."""

    code = "worker_died_repeatedly"


class StageUnavailableError(OmniError):
    """No worker of the request's stage can run it."""

    code = "stage_unavailable"


class EngineClosedError(OmniError):
    """The engine is shutting down or gone."""

    code = "engine_closed"


class RequestTimeoutError(OmniError):
    """No answer came within the time the caller allowed."""

    code = "timeout"


def _subclasses(cls: type[OmniError]) -> list[type[OmniError]]:
    return [cls] + [found for sub in cls.__subclasses__() for found in _subclasses(sub)]


ERRORS_BY_CODE: dict[str, type[OmniError]] = {cls.code: cls for cls in _subclasses(OmniError)}


class _BoundedRepr(reprlib.Repr):
    """``repr`` that costs the same for any value: a hostile one may be huge or deeply nested."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 50
        self.maxstring = self.maxother = self.maxlong = _MAX_VALUE_CHARS

    def repr_int(self, value: int, level: int) -> str:
        bits = value.bit_length()
        return repr(value) if bits <= 512 else f"an integer of {bits} bits"

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:_MAX_VALUE_CHARS])

    def repr_ndarray(self, value: Any, level: int) -> str:
        return f"array of shape {value.shape}, dtype {value.dtype}"

    def repr_TensorData(self, value: Any, level: int) -> str:  # noqa: N802 (dispatch by type name)
        return self.repr_ndarray(value, level)


_bounded = _BoundedRepr()


def shorten(value: object, max_chars: int = _MAX_VALUE_CHARS) -> str:
    """Return a text as it is and anything else as its ``repr``, cut to ``max_chars`` characters.

    Never raises and never takes long, whatever the value.
    """
    text = value if isinstance(value, str) else _bounded.repr(value)
    if len(text) > max_chars:
        text = text[: max_chars - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates can't be sent


def nearest(
    name: str, known: list[str] | tuple[str, ...] | set[str] | frozenset[str]
) -> str | None:
    """Return the known name closest to ``name``, or None if none is close."""
    from difflib import get_close_matches

    if len(name) > _MAX_VALUE_CHARS:
        return None
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    whole_words = [other for other in sorted(known) if name in other.split("_")]
    return next(iter([*found, *whole_words]), None)


def error_from_wire(wire: Mapping[str, Any]) -> OmniError:
    """Rebuild an error from ``to_wire``'s dict; an unknown code becomes a plain ``OmniError``."""
    cls = ERRORS_BY_CODE.get(str(wire.get("code")), OmniError)
    retry = wire.get("retry_after_ms")
    return cls(
        str(wire.get("message", "")),
        field=wire.get("field"),
        value=wire.get("value"),
        expected=wire.get("expected"),
        hint=wire.get("hint"),
        retry_after_ms=float(retry) if retry is not None else None,
    )
