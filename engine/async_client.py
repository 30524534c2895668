"""The asynchronous client; the connection's thread does the I/O, futures cross into the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from omni_engine.engine.client import OnProgress, Params, progress_callback
from omni_engine.engine.connection import ENGINE_TIMEOUT_S, Connection, raise_if_down
from omni_engine.engine.curve import ClientKeys
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.lora_calls import AsyncLoRACalls
from omni_engine.engine.prompts import Prompt, as_list, build_requests
from omni_engine.engine.status_calls import AsyncStatusCalls
from omni_engine.protocol import messages
from omni_engine.protocol.errors import EngineClosedError, OmniError, RequestTimeoutError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import checked_patience
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams


class AsyncRequestHandle:
    """A submitted request in an event loop; ``await handle.result()``, ``async for`` its events."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[RequestEvent | None] = asyncio.Queue()
        self._handle: RequestHandle | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._bound.request_id

    @property
    def status(self) -> str:
        """The last status heard of."""
        return self._bound.status

    @property
    def step(self) -> int:
        """Denoising steps done, as far as was heard."""
        return self._bound.step

    @property
    def num_steps(self) -> int | None:
        """Steps in all; None while that is not known."""
        return self._bound.num_steps

    async def result(self) -> DiffusionOutput:
        """Wait for the request's end; a failed one carries its ``error``.

        Cancelling the wait, as ``asyncio.wait_for`` does when time is up, aborts the request;
        waiting for ``asyncio.shield(handle.result())`` leaves it running.
        """
        try:
            return await asyncio.wrap_future(self._bound.future)
        except asyncio.CancelledError:
            self._bound.abort()
            raise

    async def events(self) -> AsyncIterator[RequestEvent]:
        """Yield changes of the request's life and its progress, ending with ``finished_*``."""
        while (event := await self._events.get()) is not None:
            yield event
        self._events.put_nowait(None)  # whoever else asks gets the end, too

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._bound.done

    def abort(self) -> None:
        """Ask the engine to end the request."""
        self._bound.abort()

    def bind(self, handle: RequestHandle) -> None:
        """Attach the connection's handle."""
        self._handle = handle

    def notify(self, event: RequestEvent) -> None:
        """Pass an event from the connection's thread into the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, event)

    def _note(self, event: RequestEvent) -> None:
        self._events.put_nowait(event)
        if event.status.startswith("finished"):
            self._events.put_nowait(None)

    @property
    def _bound(self) -> RequestHandle:
        if self._handle is None:
            raise ValueError("the handle is not bound to a request")
        return self._handle


class AsyncOmniClient(AsyncStatusCalls, AsyncLoRACalls):
    """A client for asyncio programs.

    Use it as ``async with AsyncOmniClient(endpoint) as client``.

    Args:
        endpoint: where the engine listens; None for the default endpoint.
        connect_timeout_s: seconds within which the engine must answer.
        reconnect_timeout_s: as of ``OmniClient``.
        keys: as of ``OmniClient``.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = ENGINE_TIMEOUT_S,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._reconnect_timeout_s = reconnect_timeout_s
        self._keys = keys
        self._connected: Connection | None = None

    @property
    def endpoint(self) -> str:
        """Where the engine listens."""
        return self._connection.endpoint

    async def connect(self) -> Self:
        """Connect to the engine.

        Raises:
            ConfigError: if the endpoint is not one, or a key can't be used.
            EngineClosedError: if no engine answers, or it refuses the keys.
            ProtocolVersionError: if it speaks another protocol version.
            QueueFullError: if it has no place for another client.
        """
        if self._connected is None:
            self._connected = await asyncio.to_thread(
                Connection,
                self._endpoint,
                self._connect_timeout_s,
                self._reconnect_timeout_s,
                self._keys,
            )
        return self

    async def submit(
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
        in_thread: bool = False,
    ) -> AsyncRequestHandle:
        """Submit one request; see ``OmniClient.submit``.

        ``in_thread`` checks and packs it outside the event loop, which a request with thousands of
        values in its ``extra_args`` would hold up.

        Raises:
            EngineClosedError: if the client is closed, or its engine's process has ended.
            InvalidRequestError: if the request is wrong in itself.
        """
        handle = AsyncRequestHandle()

        def hand_in() -> None:
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
            handle.bind(self._connection.submit([request], handle.notify)[0])

        if in_thread:
            await asyncio.to_thread(hand_in)
        else:
            hand_in()
        return handle

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[DiffusionOutput]:
        """Run prompts, each as a request of its own; see ``OmniClient.generate``.

        ``on_progress`` is called in the event loop. Cancelling the call aborts what has not
        finished.
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
        on_event = _in_this_loop(progress_callback(requests, on_progress))
        handles = self._connection.submit(good, on_event, wait_for_room=True)
        futures = [asyncio.wrap_future(handle.future) for handle in handles]
        try:
            if futures:
                await asyncio.wait(futures, timeout=timeout_s)
        except asyncio.CancelledError:
            unfinished = [handle.request_id for handle in handles if not handle.done]
            self._connection.abort_own(unfinished)
            raise
        for handle in handles:
            if not handle.done:
                handle.fail(RequestTimeoutError(f"not finished within {timeout_s:g} s"))
                handle.abort()
        finished = iter(handles)
        return [
            DiffusionOutput.failed("", request)
            if isinstance(request, OmniError)
            else next(finished).result(0)
            for request in requests
        ]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        self._connection.abort(request_ids)

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until no worker is loading any more.

        Raises:
            OmniError: the reason, if a model has no worker left.
            RequestTimeoutError: if it takes longer than ``timeout_s`` seconds.
        """
        reply = await self._call(messages.WAIT_READY, timeout_s)
        raise_if_down(reply["models"])

    async def close(self) -> None:
        """Close the connection; requests that are not detached are aborted."""
        if self._connected is not None:
            await asyncio.to_thread(self._connected.close)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def engine_ended(self, error: EngineClosedError) -> None:
        """End everything that is pending, now and later: the engine's process has ended."""
        if self._connected is not None:
            self._connected.engine_ended(error)

    async def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        answer = asyncio.wrap_future(self._connection.call_soon(kind, **body))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the engine at {self.endpoint} did not answer within {timeout_s:g} s"
            ) from None

    @property
    def _connection(self) -> Connection:
        if self._connected is None:
            raise ValueError("call connect() first, or use `async with`")
        return self._connected


def _in_this_loop(
    on_event: Callable[[RequestEvent], None] | None,
) -> Callable[[RequestEvent], None] | None:
    """Return a function for the connection's thread that calls ``on_event`` in the running loop."""
    if on_event is None:
        return None
    loop = asyncio.get_running_loop()

    def pass_on(event: RequestEvent) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(on_event, event)

    return pass_on
