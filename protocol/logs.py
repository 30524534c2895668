"""Logging of every process of the engine: to standard error, in one format, from one level on.

A record is one line that only logging can begin: what names, prompts and exceptions bring along is
escaped, and the lines of a traceback are indented (console) or inside the object (json).
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import threading
import time
from types import TracebackType

from omni_engine.protocol.errors import ConfigError
from omni_engine.protocol.stderr_writer import StderrWriter

LEVEL_VARIABLE = "OMNI_ENGINE_LOG_LEVEL"
"""Environment variable with the least level that is logged; children inherit it."""

FORMAT_VARIABLE = "OMNI_ENGINE_LOG_FORMAT"
"""Environment variable with the lines' format, one of ``FORMATS``; children inherit it."""

FORMATS = ("console", "json")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Attributes that every record has; any other was given as ``extra``."""

_OWN_FIELDS = ("ts", "level", "process", "logger", "message", "exception")
"""Fields of a JSON line that no ``extra`` replaces."""


def start_logging(process: str, default_level: str, writer: StderrWriter | None = None) -> None:
    """Start logging to standard error; warnings and uncaught exceptions are logged, too.

    Args:
        process: name shown in every line, such as "engine" or a worker's id.
        default_level: used, and handed to children, when the variable is not set.
        writer: takes the lines where nobody may wait for who reads them; None writes directly.

    Raises:
        ConfigError: if a variable names no level or no format.
    """
    level = os.environ.setdefault(LEVEL_VARIABLE, default_level).upper()
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ConfigError(
            "there is no such log level",
            field=LEVEL_VARIABLE,
            value=level,
            expected="one of " + ", ".join(name for name in levels if name != "NOTSET"),
        )
    form = os.environ.setdefault(FORMAT_VARIABLE, "console")
    if form not in FORMATS:
        raise ConfigError(
            "there is no such log format",
            field=FORMAT_VARIABLE,
            value=form,
            expected="one of " + ", ".join(FORMATS),
        )
    handler = logging.StreamHandler(sys.stderr) if writer is None else _ToWriter(writer)
    handler.setFormatter(_JsonLine(process) if form == "json" else _ConsoleLine(process))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def choose_logging(level: str | None, form: str | None) -> None:
    """Set the level and the format, where given, for ``start_logging`` here and in children."""
    for variable, value in ((LEVEL_VARIABLE, level), (FORMAT_VARIABLE, form)):
        if value is not None:
            os.environ[variable] = value


def passed_on(process: str, line: bytes) -> bytes:
    """Return a line that a child process wrote, as it goes into this one's standard error.

    In JSON, what isn't a record of the child's logging becomes one: what a library prints, the
    report of a crash.
    """
    if os.environ.get(FORMAT_VARIABLE) != "json" or line.startswith(b'{"ts": "'):
        return line
    text = line.decode("utf-8", "replace").rstrip()
    fields = {"ts": _timestamp(time.time()), "level": "WARNING", "process": process}
    return (json.dumps(fields | {"logger": "stderr", "message": text}) + "\n").encode()


class _ToWriter(logging.Handler):
    """Hands records to a writer that never waits."""

    def __init__(self, writer: StderrWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write((self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001  # boundary: logging's own way with a record it can't format
            self.handleError(record)


class _ConsoleLine(logging.Formatter):
    """Lines for people; what isn't printable becomes an escape."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        lines = [self.formatMessage(record)]
        lines += [f"  {line}" for line in _trace(record).splitlines()]
        return "\n".join(map(_printable, lines))


class _JsonLine(logging.Formatter):
    """One JSON object a line, in ASCII: the record's own fields, then those given as ``extra``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "ts": _timestamp(record.created),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = (item for item in vars(record).items() if item[0] not in _STANDARD_FIELDS)
        fields |= {name: value for name, value in extra if name not in _OWN_FIELDS}
        if trace := _trace(record):
            fields["exception"] = trace
        try:
            return json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError):  # not a number, infinite, or an object within itself
            return json.dumps({name: _as_text(value) for name, value in fields.items()})


def _timestamp(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(record: logging.LogRecord) -> str:
    """Return a record's traceback and stack, or ""."""
    formatter = logging.Formatter()
    # Never record.exc_text: what another handler's formatter put there is not escaped.
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(parts)


def _as_text(value: object) -> object:
    return value if isinstance(value, str | int | None) else str(value)


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = "a thread" if args.thread is None else f"thread {args.thread.name}"
    trace = (args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger(__name__).critical("uncaught exception in %s", name, exc_info=trace)
