"""The process of ``omni-engine parity``: ``python -m omni_engine.worker.parity_process RESULT``.

It reads ``{"spec": a WorkerSpec, "requests": a number}`` from standard input and writes messages to
the file descriptor ``RESULT``: ``{"doing": text}`` as it goes on, at last ``{"result": …}`` or
``{"error": …}``. It ends with the process that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from omni_engine.protocol import pipes
from omni_engine.protocol.errors import ModelLoadError, OmniError
from omni_engine.protocol.logs import start_logging
from omni_engine.protocol.plans import WorkerSpec

logger = logging.getLogger("omni_engine.worker.parity_process")  # run as __main__


def main() -> int:
    """Measure what standard input names; the results go to the descriptor in the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    descriptor = int(sys.argv[1])
    task = pipes.read_message(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start_logging("parity", "ERROR")
    spec = WorkerSpec.from_wire(task["spec"])

    def tell(doing: str) -> None:
        pipes.write_message(descriptor, {"doing": doing})

    try:
        message: dict[str, Any] = {"result": _measure(spec, task["requests"], tell)}
    except OmniError as error:
        message = {"error": error.to_wire()}
    except Exception as error:  # boundary: the process; whatever a model raises, the user is told
        logger.info("parity failed", exc_info=True)
        failure = ModelLoadError(
            f"the model can't be run: {type(error).__name__}: {error}",
            field="model",
            value=spec.model,
        )
        message = {"error": failure.to_wire()}
    pipes.write_message(descriptor, message)
    return 0


def _measure(spec: WorkerSpec, requests: int, tell: Callable[[str], None]) -> dict[str, Any]:
    import diffusers
    import transformers

    from omni_engine.worker.parity import measure

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()
    return measure(spec, requests, tell)


def _end_with_parent() -> None:
    """End the process when the other end of standard input is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
