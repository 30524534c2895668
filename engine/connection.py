"""A client's connection: one I/O thread with one socket, shared by the sync and the async client.

Every pending call ends: with an answer, with the engine's error, or, when the engine stays silent
for ``reconnect_timeout_s`` or its process has ended, with ``EngineClosedError``. An engine that has
forgotten this client, because it is a new one or the connection broke, is asked again for every
request that has not ended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from omni_engine.engine.client_socket import connected_socket, no_engine
from omni_engine.engine.conversation import Conversation
from omni_engine.engine.curve import ClientKeys
from omni_engine.engine.endpoints import check_endpoint, default_endpoint
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.packing import too_large
from omni_engine.engine.pending import PendingRequest
from omni_engine.protocol import messages
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    OmniError,
    RequestTimeoutError,
    error_from_wire,
)
from omni_engine.protocol.requests import DiffusionRequest

PING_INTERVAL_S = 3.0
ENGINE_TIMEOUT_S = 15.0
"""How long an engine may be silent unless the user says otherwise."""

_PINGS_PER_TIMEOUT = 4


class Connection:
    """A connection to an engine.

    Args:
        endpoint: where the engine listens; None for the default endpoint.
        connect_timeout_s: seconds within which the engine must answer.
        reconnect_timeout_s: seconds for which an engine that owes an answer may be silent, be it
            stuck, gone or being started again; then everything pending ends.
        keys: for an engine that encrypts.

    Raises:
        ConfigError: if the endpoint is not one, or a key can't be used.
        EngineClosedError: if no engine answers there, or it refuses the keys.
        ProtocolVersionError: if it speaks another version.
        QueueFullError: if it has no place for another client.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        connect_timeout_s: float = 10.0,
        reconnect_timeout_s: float = ENGINE_TIMEOUT_S,
        keys: ClientKeys | None = None,
    ) -> None:
        self.endpoint = endpoint or default_endpoint()
        check_endpoint(self.endpoint, encrypted=keys is not None)
        give_up_at = time.monotonic() + connect_timeout_s
        connect = functools.partial(
            connected_socket, endpoint=self.endpoint, keys=keys, timeout_s=connect_timeout_s
        )
        ping_interval_s = min(PING_INTERVAL_S, reconnect_timeout_s / _PINGS_PER_TIMEOUT)
        self._conversation = Conversation(
            self.endpoint, connect, ping_interval_s, reconnect_timeout_s
        )
        try:
            left_s = max(0.0, give_up_at - time.monotonic())
            self.welcome = self.call(messages.HELLO, left_s, client="omni-engine-python")
            self._conversation.max_message_bytes = self.welcome["max_message_bytes"]
        except RequestTimeoutError:
            self.close()
            raise no_engine(self.endpoint) from None
        except BaseException:  # whatever it is: clean up, then pass it on
            self.close()
            raise

    def call(self, kind: str, timeout_s: float | None = 30.0, **body: Any) -> dict[str, Any]:
        """Send a message and wait for its answer.

        Raises:
            OmniError: the engine's error, ``InvalidRequestError`` for what can't be sent,
                ``RequestTimeoutError`` or ``EngineClosedError``.
        """
        future = self.call_soon(kind, **body)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise RequestTimeoutError(
                f"the engine at {self.endpoint} did not answer within {timeout_s:g} s"
            ) from None

    def call_soon(self, kind: str, **body: Any) -> Future[dict[str, Any]]:
        """Send a message; the future holds its answer or the engine's error.

        Raises:
            InvalidRequestError: if it holds what can't be sent.
            EngineClosedError: if this connection is closed, or its engine's process has ended.
        """
        return self._conversation.call(kind, body)

    def submit(
        self,
        requests: Sequence[DiffusionRequest],
        on_event: Callable[[RequestEvent], None] | None = None,
        *,
        wait_for_room: bool = False,
    ) -> list[RequestHandle]:
        """Submit requests; those sent together reach the scheduler together.

        Args:
            requests: what to run.
            on_event: called from the connection's thread for every event; must not block.
            wait_for_room: whether those for which the engine's queue has no room are submitted
                again when it says so, instead of being refused.

        Returns:
            One handle per request, in order; a refused request's handle carries the error.

        Raises:
            EngineClosedError: if this connection is closed, or its engine's process has ended.
        """
        now = time.monotonic()
        handles = [RequestHandle(request, self.abort_own, on_event) for request in requests]
        fitting = [
            request
            for request, handle in zip(requests, handles, strict=True)
            if self._register(PendingRequest(request, handle, now, wait_for_room))
        ]
        self._conversation.submit(fitting)
        return handles

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        self._conversation.abort(request_ids)

    def abort_own(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests of this connection; another client's stay as they are."""
        self._conversation.abort(request_ids, own=True)

    def close(self) -> None:
        """Say goodbye and end the thread; what is pending ends with ``EngineClosedError``."""
        self._conversation.close()

    def engine_ended(self, error: EngineClosedError) -> None:
        """End everything that is pending, now and later: the engine's process has ended."""
        self._conversation.engine_ended(error)

    def _register(self, pending: PendingRequest) -> bool:
        """Note a request under its id; False if it failed already."""
        error: OmniError | None = too_large(pending.request, self.welcome["max_message_bytes"])
        if error is None:
            if self._conversation.add(pending):
                return True
            error = _duplicate(pending.request.request_id)
        pending.handle.fail(error)
        return False


def raise_if_down(models: Sequence[dict[str, Any]]) -> None:
    """Raise the error of the first model that has no worker left.

    Args:
        models: as in the engine's ``welcome`` and ``ready``.
    """
    for model in models:
        if model["state"] == "down" and model["error"] is not None:
            raise error_from_wire(model["error"])


def _duplicate(request_id: str) -> DuplicateRequestError:
    return DuplicateRequestError(
        "the request id is in use: this client follows it already",
        field="request_id",
        value=request_id,
        expected="an id that no live request of this client has",
        hint="The first submit() returned its handle.",
    )
