"""The synchronous client: submit, follow, abort and query over ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from omni_engine.engine.connection import ENGINE_TIMEOUT_S, Connection, raise_if_down
from omni_engine.engine.curve import ClientKeys
from omni_engine.engine.handles import RequestEvent, RequestHandle, UserCode
from omni_engine.engine.lora_calls import LoRACalls
from omni_engine.engine.prompts import Prompt, as_list, build_requests
from omni_engine.engine.status_calls import StatusCalls
from omni_engine.protocol import messages
from omni_engine.protocol.errors import EngineClosedError, OmniError, RequestTimeoutError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest, checked_patience
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

Params = OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None
OnOutput = Callable[[DiffusionOutput], None]
OnProgress = Callable[[int, RequestEvent], None]


class OmniClient(StatusCalls, LoRACalls):
    """A client of a running engine; safe to use from several threads.

    Args:
        endpoint: where the engine listens; None for the default endpoint.
        connect_timeout_s: seconds within which the engine must answer.
        reconnect_timeout_s: seconds for which an engine that owes an answer may be silent, be it
            stuck, killed or being started again. If it is back by then, requests go on, or run
            anew with the same result if they have a seed; else all that is pending ends with
            ``EngineClosedError``. So does, at once, what an engine that is told to stop leaves
            unfinished: submit that again.
        keys: for an engine that encrypts; needed for ``tcp://`` beyond this machine.

    Raises:
        ConfigError: if the endpoint is not one, or a key can't be used.
        EngineClosedError: if no engine answers there, or it refuses the keys.
        ProtocolVersionError: if it speaks another protocol version.
        QueueFullError: if the engine has no place for another client.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = ENGINE_TIMEOUT_S,
        keys: ClientKeys | None = None,
    ) -> None:
        self._connection = Connection(endpoint, connect_timeout_s, reconnect_timeout_s, keys)

    @property
    def endpoint(self) -> str:
        """Where the engine listens."""
        return self._connection.endpoint

    def submit(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        detached: bool = False,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        timeout_s: float | None = None,
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> RequestHandle:
        """Submit one request.

        Args:
            prompt: text, or a dict with "prompt", "negative_prompt", "multi_modal_data".
            sampling_params: how to make the picture.
            request_id: unique among live requests; drawn when None. If the engine still knows a
                request with this id and the same content, that is followed and none run twice;
                who followed it before gets a ``DuplicateRequestError``. If this client follows
                one with this id already, the new handle gets that error.
            model: a served model's name; None for the engine's first.
            detached: keep running when this client goes away.
            preview_every: steps between small preview pictures, which come with the events.
            preview_max_side: longest side of previews in pixels, 16 to 4096; 256 when None.
            timeout_s: seconds after which the engine ends it with a ``RequestTimeoutError``.
            on_event: called from the connection's thread on every event; must not block.

        Raises:
            EngineClosedError: if the client is closed, or its engine's process has ended.
            InvalidRequestError: if the request is wrong in itself. What only the engine can tell
                (unknown adapter, size) is in the result's ``error``.
        """
        (request,) = build_requests(
            [prompt],
            sampling_params,
            request_ids=[request_id],
            model=model,
            detached=detached,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            timeout_s=timeout_s,
        )
        if isinstance(request, OmniError):
            raise request
        return self._connection.submit([request], on_event)[0]

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        on_output: OnOutput | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[DiffusionOutput]:
        """Run prompts, each as a request of its own, and wait for all.

        There may be more than the engine's queue holds: the rest is submitted as others end.

        Args:
            prompts: one prompt, or any number of them.
            sampling_params: one for all, or a list of the same length.
            model: a served model's name; None for the engine's first.
            timeout_s: seconds after which unfinished requests are aborted; their outputs carry a
                ``RequestTimeoutError``.
            preview_every: steps between small preview pictures, which come with the progress.
            preview_max_side: longest side of previews in pixels, 16 to 4096; 256 when None.
            on_output: called for every request that ends, in order of completion; must not block.
            on_progress: called with a prompt's place in the list and an event that tells the steps
                done; must not block.

        Returns:
            Outputs in the order given. A failed item carries its ``error``; the others are whole.

        Raises:
            InvalidRequestError: if the lists' lengths differ, or ``timeout_s`` is no number from
                0 to 30 days.
        """
        timeout_s = checked_patience(timeout_s)
        items = as_list(prompts)
        requests = build_requests(
            items,
            sampling_params,
            model=model,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
        )
        good = [request for request in requests if not isinstance(request, OmniError)]
        handles = iter(
            self._connection.submit(
                good, progress_callback(requests, on_progress), wait_for_room=True
            )
        )
        entries = [r if isinstance(r, OmniError) else next(handles) for r in requests]
        running = [entry for entry in entries if isinstance(entry, RequestHandle)]
        if on_output is not None:
            tell = output_callback(on_output)
            for handle in running:
                handle.future.add_done_callback(tell)
        self._wait(running, timeout_s)
        return [
            DiffusionOutput.failed("", entry) if isinstance(entry, OmniError) else entry.result(0)
            for entry in entries
        ]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        self._connection.abort(request_ids)

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until no worker is loading any more.

        Raises:
            OmniError: the reason, if a model has no worker left.
            RequestTimeoutError: if it takes longer than ``timeout_s`` seconds.
        """
        reply = self._connection.call(messages.WAIT_READY, timeout_s)
        raise_if_down(reply["models"])

    def close(self) -> None:
        """Close the connection; requests of this client that are not detached are aborted."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def engine_ended(self, error: EngineClosedError) -> None:
        """End everything that is pending, now and later: the engine's process has ended."""
        self._connection.engine_ended(error)

    def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        return self._connection.call(kind, timeout_s, **body)

    def _wait(self, handles: Sequence[RequestHandle], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for handle in handles:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                try:
                    handle.result(left)
                except RequestTimeoutError:
                    handle.fail(RequestTimeoutError(f"not finished within {timeout_s:g} s"))
                    handle.abort()
        except BaseException:  # whatever it is: clean up, then pass it on
            unfinished = [handle.request_id for handle in handles if not handle.done]
            self._connection.abort_own(unfinished)
            raise


def output_callback(on_output: OnOutput) -> Callable[[Future[DiffusionOutput]], None]:
    """Return what calls ``on_output`` when a request's future is done."""
    user_code = UserCode("on_output")

    def tell(future: Future[DiffusionOutput]) -> None:
        output = future.result()
        user_code.call(output.request_id, on_output, output)

    return tell


def progress_callback(
    requests: Sequence[DiffusionRequest | OmniError], on_progress: OnProgress | None
) -> Callable[[RequestEvent], None] | None:
    """Return the ``on_event`` of requests of which ``on_progress`` is to hear by their places."""
    if on_progress is None:
        return None
    user_code = UserCode("on_progress")
    places = {r.request_id: i for i, r in enumerate(requests) if not isinstance(r, OmniError)}

    def on_event(event: RequestEvent) -> None:
        if event.step is not None:
            user_code.call(event.request_id, on_progress, places[event.request_id], event)

    return on_event
