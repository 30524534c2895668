"""Server-sent events of a running request: previews, progress, and the finished pictures.

A client that reads slowly misses progress and previews; nothing piles up for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_engine.engine.async_client import AsyncRequestHandle
from omni_engine.engine.gateway.disconnects import until_disconnected, while_connected
from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.image_answers import base64_picture, described, ran, seed_of
from omni_engine.engine.gateway.image_jobs import ImageJob, pictures_of
from omni_engine.engine.gateway.mailbox import Mailbox, Partial
from omni_engine.engine.gateway.state import Gateway
from omni_engine.engine.handles import RequestEvent
from omni_engine.protocol.outputs import DiffusionOutput

_KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": keep-alive\n\n"


async def image_stream(
    request: Request, gateway: Gateway, job: ImageJob, events: str
) -> EventStream:
    """Submit a job and return its stream, once the engine has taken it in.

    Args:
        request: whose client waits; if it goes away, the job is aborted.
        gateway: that runs it.
        job: what to run.
        events: the start of the events' names.

    Raises:
        GatewayError: if the engine refuses it.
        OmniError: if it is wrong in itself.
    """
    handle = await job.submit(gateway)
    news = handle.events()
    try:
        first = await while_connected(request.receive, anext(news))
        if first.status.startswith("finished"):
            pictures_of(await handle.result(), job)  # raises what the engine refused it for
    except BaseException:  # whatever it is: end the request, then pass it on
        if not handle.done:  # one that was refused may bear the id of another
            handle.abort()
        raise
    stream = _Stream(gateway, job, events, handle)
    headers = {"x-request-id": handle.request_id}
    return EventStream(stream.messages(first, news), headers, stream.end)


def event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


async def next_or_keep_alive(mailbox: Mailbox) -> RequestEvent | Partial | bytes | None:
    """Return what is to be sent next: an item, or a keep-alive if there is none for long."""
    try:
        return await asyncio.wait_for(mailbox.take(), _KEEP_ALIVE_S)
    except TimeoutError:
        return _KEEP_ALIVE


class EventStream(Response):
    """An answer of server-sent events that ends, and ends its source, when the client goes.

    Args:
        messages: encoded events; a keep-alive is sent while there are none.
        headers: further ones.
        end: called when nothing is sent any more, also if nothing ever was.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        messages: AsyncGenerator[bytes],
        headers: dict[str, str],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        )
        del self.headers["content-length"]
        self._messages, self._end = messages, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))
        watching = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            watching.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self._end()

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._messages) as messages:
            async for message in messages:
                await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Stream:
    """One request's events."""

    def __init__(
        self, gateway: Gateway, job: ImageJob, events: str, handle: AsyncRequestHandle
    ) -> None:
        self._gateway, self._job, self._events, self._handle = gateway, job, events, handle
        self._mailbox = Mailbox(job.fields.partial_images or 0, job.fields.tells_progress)

    async def messages(
        self, first: RequestEvent, news: AsyncIterator[RequestEvent]
    ) -> AsyncGenerator[bytes]:
        """Yield the events, encoded."""
        reading = asyncio.create_task(self._read(first, news))
        try:
            while (item := await next_or_keep_alive(self._mailbox)) is not None:
                if isinstance(item, RequestEvent):
                    yield self._progress(item)
                elif isinstance(item, Partial):
                    yield await self._gateway.encoders.run(self._partial, item)
                else:
                    yield item
            await reading
            async for message in self._finished(await self._handle.result()):
                yield message
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def end(self) -> None:
        """Abort the request, if it still runs."""
        if not self._handle.done:
            self._handle.abort()

    async def _read(self, first: RequestEvent, news: AsyncIterator[RequestEvent]) -> None:
        self._mailbox.put(first)
        async for one in news:
            self._mailbox.put(one)
        self._mailbox.close()

    async def _finished(self, output: DiffusionOutput) -> AsyncIterator[bytes]:
        try:
            pictures = pictures_of(output, self._job)
        except GatewayError as error:
            yield event("error", error.body())
            return
        for index, picture in enumerate(pictures):
            yield await self._gateway.encoders.run(self._completed, output, index, picture)

    # -- in an encoder's thread

    def _partial(self, partial: Partial) -> bytes:
        name = f"{self._events}.partial_image"
        shown = described(partial.picture, self._job)
        del shown["usage"]
        data = {
            "type": name,
            "b64_json": base64_picture(partial.picture, self._job),
            "partial_image_index": partial.index,
            "created_at": int(time.time()),
            **shown,
            "step": partial.step,
            "request_id": self._handle.request_id,
        }
        return event(name, data)

    def _completed(self, output: DiffusionOutput, index: int, picture: Any) -> bytes:
        name = f"{self._events}.completed"
        data = {
            "type": name,
            "b64_json": base64_picture(picture, self._job),
            "created_at": int(time.time()),
            "index": index,
            **described(picture, self._job),
            **ran(output, self._job),
            "seed": seed_of(output, index),
        }
        return event(name, data)

    def _progress(self, news: RequestEvent) -> bytes:
        name = f"{self._events}.progress"
        data = {
            "type": name,
            "status": news.status,
            "step": news.step,
            "num_steps": news.num_steps,
            "request_id": news.request_id,
        }
        return event(name, data)
