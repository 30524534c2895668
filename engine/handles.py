"""A submitted request as its client sees it: follow it, wait for it, end it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_engine.protocol.errors import OmniError, RequestTimeoutError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """News of a request: a change in its life, or steps done while it runs.

    Attributes:
        request_id: the request.
        status: ``waiting``, ``running`` or ``finished_*``; ``running`` with progress.
        step: denoising steps done; None unless this is progress.
        num_steps: steps in all; None unless this is progress.
        preview: with ``preview_every``, every so many steps: a small picture of how it looks so
            far, a uint8 array of shape (height, width, 3); else None.
    """

    request_id: str
    status: str
    step: int | None = None
    num_steps: int | None = None
    preview: npt.NDArray[np.uint8] | None = field(default=None, repr=False, compare=False)


class UserCode:
    """Calls a user's function in a thread or loop that must go on: what it raises is logged.

    Args:
        name: of the parameter that took the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed: set[str] = set()

    def call(self, request_id: str, function: Callable[..., None], *args: Any) -> None:
        """Call the function; the first failure for each request is logged with its traceback."""
        try:
            function(*args)
        except Exception:  # boundary: user code
            if request_id not in self._failed:
                self._failed.add(request_id)
                logger.exception(
                    "%s failed for request %s; its further failures are not logged",
                    self._name,
                    request_id,
                )


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
        on_event: called from the connection's thread for every event; must not block.

    Attributes:
        status: the last status heard of.
        step: denoising steps done, as far as was heard.
        num_steps: steps in all; None while that is not known.
    """

    def __init__(
        self,
        request: DiffusionRequest,
        abort: Callable[[Sequence[str]], None],
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.status = "submitted"
        self.step = 0
        self.num_steps: int | None = None
        self.future: Future[DiffusionOutput] = answer_future()
        self._seed = request.sampling_params.seed
        self._abort = abort
        self._on_event = on_event
        self._user_code = UserCode("on_event")
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
        """Yield changes of the request's life and its progress, ending with ``finished_*``."""
        while (event := self._events.get()) is not None:
            yield event
        self._events.put(None)  # whoever else asks gets the end, too

    def abort(self) -> None:
        """Ask the engine to end the request; its result tells ``aborted``."""
        self._abort([self.request_id])

    def note(self, status: str) -> None:
        """Record a change, unless it is none; called by the connection."""
        if status == self.status:
            return
        self.status = status
        self._tell(RequestEvent(self.request_id, status))

    def note_progress(
        self, step: int, num_steps: int, preview: npt.NDArray[np.uint8] | None
    ) -> None:
        """Record steps done, unless it has ended already; called by the connection.

        What is told never goes back, not even when another engine runs the request from its start.
        """
        with self._ending:
            if self.future.done():
                return
        if step <= self.step and preview is None:
            return
        self.step, self.num_steps = max(step, self.step), num_steps
        self._tell(RequestEvent(self.request_id, "running", self.step, num_steps, preview))

    def _tell(self, event: RequestEvent) -> None:
        self._events.put(event)
        if self._on_event is not None:
            self._user_code.call(self.request_id, self._on_event, event)

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
