"""A worker process: one device, one pipeline; ``python -m omni_engine.worker.process``.

The engine writes a length-prefixed ``WorkerSpec`` to standard input and keeps the pipe open: its
end tells the worker that the engine is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from omni_engine.protocol import pipes, plans
from omni_engine.protocol.errors import ModelLoadError, OmniError
from omni_engine.protocol.logs import start_logging
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.link import EngineLink
from omni_engine.worker.progress import main_thread

logger = logging.getLogger("omni_engine.worker.process")  # run as __main__

_SWITCH_INTERVAL_S = 0.0005
"""A forward takes Python's lock at every operation: converting an adapter must give it up soon."""


def main() -> int:
    """Run a worker until the engine stops it or goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when its workers end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()  # a worker that is ended for its silence tells what it was at
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file holds all of the model
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        spec = WorkerSpec.from_wire(pipes.read_message(0))
    except EOFError:  # the engine left before it said what to load
        return 1
    start_logging(spec.worker_id, "INFO")
    aborts = AbortFlags()
    link = EngineLink(spec.endpoint, spec.identity, aborts, spec.socket)
    link.start()
    try:
        with main_thread.waiting():  # loading has a limit of its own
            serve = _load(spec, link, aborts)
        serve()
    except OmniError as error:
        link.send({"type": plans.FAULT, "error": error.to_wire()})
        return 1
    finally:
        link.close()
    return 0


def _load(spec: WorkerSpec, link: EngineLink, aborts: AbortFlags) -> Callable[[], None]:
    """Load the pipeline and report ready; returns what serves plans until the engine stops."""
    started = time.perf_counter()
    try:
        import torch

        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        serve, ready = _build(spec, link, aborts)
    except OmniError:
        raise
    except (
        BaseException
    ) as error:  # boundary: the process; whatever loading raises, the engine is told
        logger.exception("loading failed")
        raise ModelLoadError(
            f"loading failed: {type(error).__name__}: {error}", field="model", value=spec.model
        ) from None
    load_ms = (time.perf_counter() - started) * 1000
    logger.info("ready in %.1f s", load_ms / 1000)
    main_thread.forwards = 0  # those of the certification served nobody
    link.send({"type": plans.READY, "load_ms": load_ms, **ready})
    return serve


def _build(
    spec: WorkerSpec, link: EngineLink, aborts: AbortFlags
) -> tuple[Callable[[], None], dict[str, Any]]:
    import diffusers
    import transformers

    from omni_engine.worker.adapter_access import NoAdapters
    from omni_engine.worker.building import build_pipeline, start_adapters
    from omni_engine.worker.loading import load_pipeline, parameter_bytes
    from omni_engine.worker.memory import MemoryCaps
    from omni_engine.worker.serving import serve_batches, serve_steps

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.disable_default_handler()  # its lines are ours: one format, nothing unescaped
        library.enable_propagation()
        if not logger.isEnabledFor(logging.INFO):
            library.set_verbosity_error()
    memory = MemoryCaps()
    link.tell_of_memory(memory)
    pipe = load_pipeline(spec)
    runtime = start_adapters(pipe, spec, link)
    pipeline, capabilities = build_pipeline(pipe, spec, aborts, runtime, memory)
    ready = {"capabilities": capabilities.to_wire(), "parameter_bytes": parameter_bytes(pipe)}
    serve = serve_steps if spec.engine_args["step_execution"] else serve_batches
    adapters = runtime or NoAdapters()
    return partial(serve, pipeline, capabilities, adapters, spec, link, aborts, memory), ready


if __name__ == "__main__":
    sys.exit(main())
