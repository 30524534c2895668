"""A client as the engine knows it: what it asked for, and how it is told."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from omni_engine.engine.live_request import LiveRequest, Preview
from omni_engine.engine.outbox import Outbox
from omni_engine.engine.results import KeptResult, ResultStore
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.protocol import codec, messages
from omni_engine.protocol.errors import DuplicateRequestError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest


@dataclass(slots=True, eq=False)
class Client:
    """A connected client: it listens to its own requests.

    Attributes:
        identity: the socket's, drawn anew by ZeroMQ for every connection.
        outbox: sends messages to identities.
        results: keeps what was sent until it has arrived.
        last_seen: seconds, monotonic.
        session: told to the client, which sees by a change that the engine has forgotten it.
        asked: its live requests.
        waiting: those of them that have not started.
        parted: whether it said goodbye: what ends now is told, and not kept for it.
        gone: whether nothing reaches it any more.
        key: the name of the key with which it was let in; None without keys.
    """

    identity: bytes
    outbox: Outbox
    results: ResultStore
    last_seen: float
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    asked: dict[str, DiffusionRequest] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    parted: bool = False
    gone: bool = False
    key: str | None = None

    @property
    def label(self) -> str:
        """Its name in logs."""
        return self.identity.hex()

    @property
    def ending_with_it(self) -> list[str]:
        """The live requests that end when it leaves."""
        return [request_id for request_id, asked in self.asked.items() if not asked.detached]

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """Tell the client that its request began to wait or to run."""
        if status is RequestStatus.WAITING:
            self.waiting.add(request_id)
        else:
            self.waiting.discard(request_id)
        self._tell(request_id, status)

    def on_progress(
        self, request_id: str, step: int, num_steps: int, preview: Preview | None
    ) -> None:
        """Tell the client how far its request is, unless it does not read what it is sent."""
        if self.gone:
            return
        message = messages.engine_message(
            messages.PROGRESS,
            request_id=request_id,
            step=step,
            num_steps=num_steps,
            preview=preview,
        )
        self.outbox.send(self.identity, message, droppable=True)

    def on_output(self, output: DiffusionOutput) -> None:
        """Give the client its result, and keep it until that has arrived.

        Of a client that vanished only results of detached requests are kept: it asks for the
        others again when it is back.
        """
        request = self._release(output.request_id)
        keep = request is not None and (request.detached or not (self.gone or self.parted))
        if self.gone and not keep:
            return
        message = messages.engine_message(messages.OUTPUT, output=output.to_wire())
        frames = codec.encode(message)
        if request is not None and keep:
            owner = None if self.gone else self.identity
            self.results.keep(KeptResult(request, frames), owner, time.monotonic())
        if not self.gone:
            self.outbox.send_frames(self.identity, frames)

    def adopt(self, live: LiveRequest) -> None:
        """Listen to a live request from now on; who did before is told, if it is another."""
        request_id, former = live.request_id, live.listener
        if isinstance(former, Client) and former is not self:
            former.lose(request_id, told=former.identity != self.identity)
        live.listener = self
        self.asked[request_id] = live.request
        if live.started is None:
            self.waiting.add(request_id)

    def lose(self, request_id: str, *, told: bool) -> None:
        """Listen to a request no more: another client has taken it over."""
        self._release(request_id)
        if told and not self.gone:
            error = DuplicateRequestError(
                "another client submitted the same request and follows it now",
                field="request_id",
                value=request_id,
            )
            self.outbox.send(self.identity, messages.error_message(error, request_id=request_id))

    def catch_up(self, live: LiveRequest) -> None:
        """Tell the client how far a request is that it has just begun to listen to."""
        waiting = live.started is None
        self._tell(live.request_id, RequestStatus.WAITING if waiting else RequestStatus.RUNNING)
        if live.told_step:
            self.on_progress(live.request_id, live.told_step, live.num_steps, None)

    def _tell(self, request_id: str, status: RequestStatus) -> None:
        if self.gone:
            return
        event = messages.engine_message(
            messages.EVENT, request_id=request_id, status=status.name.lower()
        )
        self.outbox.send(self.identity, event)

    def _release(self, request_id: str) -> DiffusionRequest | None:
        self.waiting.discard(request_id)
        return self.asked.pop(request_id, None)
