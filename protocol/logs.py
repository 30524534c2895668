"""Logging of every process of the engine: one format on standard error, one level for all."""

from __future__ import annotations

import logging
import os
import sys

from omni_engine.protocol.errors import ConfigError

LEVEL_VARIABLE = "OMNI_ENGINE_LOG_LEVEL"
"""Environment variable with the least level that is logged; children inherit it."""


def start_logging(process: str, default_level: str) -> None:
    """Start logging to standard error.

    Args:
        process: name shown in every line, such as "engine" or a worker's id.
        default_level: used, and handed to children, when the variable is not set.

    Raises:
        ConfigError: if the variable names no level.
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _OneLine(logging.Formatter):
    """Writes what isn't printable as escapes: clients choose names that messages quote."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        text = super().formatMessage(record)
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
