"""The log: one line for one event, whatever names clients choose."""

from __future__ import annotations

import os
import subprocess
import sys

_SCRIPT = """
import logging
from omni_engine.protocol.logs import start_logging
start_logging("engine", "INFO")
logging.getLogger("x").warning("adapter %s: ümlaut", "\\x1b[31mred\\n2026 ERROR engine x: made up")
try:
    raise ValueError("reason")
except ValueError:
    logging.getLogger("x").exception("failed")
"""


def test_what_is_not_printable_is_escaped_and_tracebacks_are_whole() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, env=environment, check=True
    )
    first, second, *traceback = done.stderr.decode().splitlines()
    assert first.endswith(
        r"WARNING engine x: adapter \x1b[31mred\n2026 ERROR engine x: made up: ümlaut"
    )
    assert second.endswith("ERROR engine x: failed")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "ValueError: reason"
