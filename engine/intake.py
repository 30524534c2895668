"""Where requests come in: known ones are attached to, new ones are taken while there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from omni_engine.engine.connected_client import Client
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.outbox import Outbox
from omni_engine.engine.request_log import RefusalLog
from omni_engine.engine.results import KeptResult, ResultStore, same_content
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.throughput import Throughput
from omni_engine.protocol import messages
from omni_engine.protocol.errors import (
    DuplicateRequestError,
    EngineClosedError,
    OmniError,
    QueueFullError,
    UnknownModelError,
    nearest,
    shorten,
)
from omni_engine.protocol.requests import DiffusionRequest, presentable_id
from omni_engine.stages.config import Limits

_ENDING_RETRY_MS = 200.0
"""When to try an id again whose request was answered, but still occupies its worker."""


class Intake:
    """Takes requests of clients in, or refuses them.

    Args:
        stages: by the model name that clients use.
        limits: how many requests may wait.
        results: what has ended and was not received yet.
        outbox: sends messages to clients.

    Attributes:
        closing: set when no more requests are taken in.
        refused: requests refused since the start, by the error's code.
    """

    def __init__(
        self,
        stages: Mapping[str, StageRuntime],
        limits: Limits,
        results: ResultStore,
        outbox: Outbox,
    ) -> None:
        self._stages = stages
        self._limits = limits
        self._results = results
        self._outbox = outbox
        self._throughput = Throughput()
        self._refusals = RefusalLog()
        self.closing = False
        self.refused: Counter[str] = Counter()

    def submit(self, client: Client, message: messages.ClientMessage, now: float) -> None:
        """Take in each request of a message for itself; a bad one does not touch the others."""
        accepted: list[str] = []
        afterwards: list[Callable[[], None]] = []
        for index, wire in enumerate(message.body["requests"]):
            request_id = presentable_id(wire.get("request_id"))
            try:
                request = DiffusionRequest.from_wire(wire)
                request_id = request.request_id
                known = self._attach(client, request, now)
                if known is None:
                    self._take_in(client, request, now)
                else:
                    afterwards.append(known)
                accepted.append(request_id)
            except OmniError as error:
                self.refused[error.code] += 1
                self._refusals.refused(error, request_id, client.label, now)
                refusal = messages.error_message(error, message.id, request_id, index)
                self._outbox.send(client.identity, refusal)
        reply = messages.engine_message(messages.ACCEPTED, message.id, request_ids=accepted)
        self._outbox.send(client.identity, reply)
        for tell in afterwards:
            tell()

    def stage_for(self, model: str | None) -> StageRuntime:
        """Return the stage of a model, the first one for None.

        Raises:
            UnknownModelError: if no stage serves it.
        """
        if model is None:
            return next(iter(self._stages.values()))
        if (stage := self._stages.get(model)) is not None:
            return stage
        close = nearest(model, set(self._stages))
        raise UnknownModelError(
            f"no stage serves model {shorten(model)!r}",
            field="model",
            value=model,
            expected="one of " + ", ".join(self._stages),
            hint=f"Did you mean {close!r}?" if close else None,
        )

    def note_throughput(self, now: float) -> None:
        """Take note of how many requests have ended."""
        self._throughput.note(self._ended, now)

    def _attach(
        self, client: Client, request: DiffusionRequest, now: float
    ) -> Callable[[], None] | None:
        """Let a client follow a request that the engine knows.

        Returns:
            What tells the client how far it is; None if the request is not known.

        Raises:
            DuplicateRequestError: if the id belongs to a request of other content.
        """
        live, kept = self._live(request.request_id), self._results.get(request.request_id)
        if live is not None and not live.answered:
            _check_same(request, live.request)
            client.adopt(live)
            return lambda: client.catch_up(live)
        if kept is not None:
            _check_same(request, kept.request)
            return lambda: self._hand_out(kept, client, now)
        if live is not None:
            raise _duplicate(request, retry_after_ms=_ENDING_RETRY_MS)
        return None

    def _hand_out(self, kept: KeptResult, client: Client, now: float) -> None:
        self._results.claim(kept.request.request_id, client.identity, now)
        self._outbox.send_frames(client.identity, kept.frames)

    def _take_in(self, client: Client, request: DiffusionRequest, now: float) -> None:
        if self.closing:
            raise closing_error()
        self._check_room(client, now)
        stage = self.stage_for(request.model)
        client.asked[request.request_id] = request
        try:
            stage.submit(request, client, now)
        except BaseException:  # whatever it is: clean up, then pass it on
            client.asked.pop(request.request_id, None)
            raise

    def _check_room(self, client: Client, now: float) -> None:
        limits = self._limits
        of_all = sum(stage.num_waiting for stage in self._stages.values())
        for field, waiting, most, whose in (
            ("max_waiting_requests", of_all, limits.max_waiting_requests, "requests"),
            (
                "max_waiting_per_client",
                len(client.waiting),
                limits.max_waiting_per_client,
                "requests of this client",
            ),
        ):
            if waiting >= most:
                raise QueueFullError(
                    f"{waiting} {whose} are waiting already",
                    field=field,
                    value=waiting,
                    expected=f"at most {most} waiting {whose}",
                    hint="Try again later.",
                    retry_after_ms=self._throughput.wait_ms(waiting, self._ended, now),
                )

    def _live(self, request_id: str) -> LiveRequest | None:
        found = (stage.live(request_id) for stage in self._stages.values())
        return next((live for live in found if live is not None), None)

    @property
    def _ended(self) -> int:
        """Requests that have ended since the start."""
        return sum(
            stage.figures.counters[kind]
            for stage in self._stages.values()
            for kind in ("completed", "failed", "aborted")
        )


def closing_error() -> EngineClosedError:
    """Tell a client that the engine takes nothing in any more."""
    return EngineClosedError("the engine is shutting down", hint="Submit the request again later.")


def _check_same(request: DiffusionRequest, known: DiffusionRequest) -> None:
    if not same_content(request, known):
        raise _duplicate(request)


def _duplicate(
    request: DiffusionRequest, retry_after_ms: float | None = None
) -> DuplicateRequestError:
    return DuplicateRequestError(
        "the request id is in use",
        field="request_id",
        value=request.request_id,
        expected="an id that no live request has, or the very same request",
        retry_after_ms=retry_after_ms,
    )
