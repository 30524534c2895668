"""A submitted request as its client sees it: follow it, wait for it, end it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

from omni_engine.protocol.errors import OmniError, RequestTimeoutError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A change in a request's life: ``waiting``, ``running`` or ``finished_*``."""

    request_id: str
    status: str


def answer_future() -> Future[Any]:
    """A future that a waiting task's cancellation can't touch: only the I/O thread settles it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class RequestHandle:
    """A submitted request: follow it, wait for it, end it.

    Args:
        request: what was submitted.
        abort: called with the id to end it.
        on_event: called from the connection's thread for every change; must not block.
    """

    def __init__(
        self,
        request: DiffusionRequest,
        abort: Callable[[Sequence[str]], None],
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.status = "submitted"
        self.future: Future[DiffusionOutput] = answer_future()
        self._seed = request.sampling_params.seed
        self._abort = abort
        self._on_event = on_event
        self._events: queue.SimpleQueue[RequestEvent | None] = queue.SimpleQueue()
        self._ending = threading.Lock()

    def __repr__(self) -> str:
        return f"RequestHandle({self.request_id!r}, {self.status})"

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> DiffusionOutput:
        """Wait for the request's end; a failed one carries its ``error``.

        Raises:
            RequestTimeoutError: if it did not end within ``timeout_s`` seconds; it goes on.
        """
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError:
            raise RequestTimeoutError(
                f"request {self.request_id} did not end within {timeout_s:g} s",
                hint="It goes on; wait again or abort it.",
            ) from None

    def events(self) -> Iterator[RequestEvent]:
        """Yield the changes of the request's life, ending with its ``finished_*`` event."""
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # whoever else asks gets the end, too

    def abort(self) -> None:
        """Ask the engine to end the request; its result tells ``aborted``."""
        self._abort([self.request_id])

    def note(self, status: str) -> None:
        """Record a change; called by the connection."""
        self.status = status
        event = RequestEvent(self.request_id, status)
        self._events.put(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # boundary: user code, called from the connection's thread
            logger.exception("on_event failed for request %s", self.request_id)

    def finish(self, output: DiffusionOutput) -> None:
        """Record the end, unless it has ended already; called by the connection or a waiter."""
        with self._ending:
            if self.future.done():
                return
            self.future.set_result(output)
        kind = "aborted" if output.aborted else "error" if output.error else "completed"
        self.note(f"finished_{kind}")
        self._events.put(None)

    def fail(self, error: OmniError) -> None:
        """Record that the request could not be served."""
        self.finish(DiffusionOutput.failed(self.request_id, error, self._seed))
