"""The adapters of a stage at work: checked by its workers, used by its requests, managed.

No sockets here: messages to workers leave through a callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from omni_engine.engine.adapter_infos import AdapterInfos
from omni_engine.engine.adapter_prefetch import MAX_AHEAD, Prefetch, WorkerLoad
from omni_engine.engine.adapter_room import AdapterRoom
from omni_engine.engine.adapter_usage import AdapterUsage, most_at_once
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.dispatch import SchedulerLife
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.reception import Reception
from omni_engine.engine.registered_adapter import RegisteredAdapter, Settled
from omni_engine.engine.worker_handle import WorkerHandle
from omni_engine.protocol.adapters import (
    ADAPTER_DROP,
    ADAPTER_PIN,
    AdapterActivation,
    AdapterReport,
    AdaptersHeld,
)
from omni_engine.protocol.errors import (
    InvalidRequestError,
    OmniError,
    UnsupportedOptionError,
    WorkerLostError,
    error_from_wire,
)
from omni_engine.protocol.lora_info import LoRAInfo
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.stages.config import StageConfig

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.01
"""How often waiting requests are looked through for adapters to load ahead, at most."""

Loaded = Callable[[LoRAInfo | OmniError], None]
"""Told what a load came to."""


class StageAdapters:
    """Keeps a stage's workers and requests in step with its adapter registry.

    Args:
        stage: the stage's configuration.
        registry: its adapters.
        workers: its workers by id.
        live: its requests by id.
        reception: judges those of them that wait for checks.
        send: sends a message to a worker by its id.
    """

    def __init__(
        self,
        stage: StageConfig,
        registry: AdapterRegistry,
        workers: Mapping[str, WorkerHandle],
        live: Mapping[str, LiveRequest],
        reception: Reception,
        send: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.registry = registry
        self.room = AdapterRoom.of(stage.engine_args, None)
        self._prefetch = Prefetch(stage.engine_args.max_loras, send)
        self._model = stage.display_name
        self._arguments = stage.engine_args
        self._workers, self._live, self._reception = workers, live, reception
        self._send = send
        self._usage = AdapterUsage()
        self._infos = AdapterInfos(
            self._model, registry, self._usage, workers, live, reception.parking
        )
        self._loads: dict[RegisteredAdapter, Loaded] = {}
        self._retired: set[str] = set()
        self._pinned: frozenset[str] = frozenset()
        self._next_look = 0.0
        self._look_skipped = False

    # -- requests

    def note_admitted(self, activation: AdapterActivation | None, now: float) -> None:
        """Count a request in."""
        if activation is not None:
            self._usage.admit(activation, now)

    def note_ended(self, activation: AdapterActivation | None) -> None:
        """Count a request out."""
        if activation is not None:
            for digest in self._usage.end(activation):
                self._drop_unused(digest)

    # -- workers

    def suit(self, capabilities: PipelineCapabilities, now: float) -> None:
        """Take note of what the stage's pipeline can do."""
        arguments = self._arguments
        self.room = AdapterRoom.of(arguments, capabilities)
        if not capabilities.supports_lora:
            error = UnsupportedOptionError(
                f"{capabilities.pipeline} takes no adapters",
                field="lora_modules",
                expected="none for this model",
            )
            if arguments.lora_modules:
                logger.warning("stage %s: %s", self._model, error)
            self._act_on(self.registry.give_up(error), now)
        elif arguments.mixed_lora and not capabilities.mixes_adapters:
            text = "stage %s: mixed_lora has no effect: %s"
            logger.warning(text, self._model, capabilities.adapters_note)

    def welcome(self, worker: WorkerHandle, now: float) -> None:
        """Tell a worker that has become ready what to keep and what to load."""
        if self._pinned:
            self._send(worker.worker_id, _pin_message(self._pinned))
        preloaded = [entry.adapter for entry in self.registry.preloaded if entry.adapter]
        self._prefetch.tell(worker.worker_id, preloaded, now)

    def look_ahead(
        self, scheduler: SchedulerLife, loads: Callable[[], list[WorkerLoad]], now: float
    ) -> None:
        """Let workers load what the next requests need, unless that was looked at just now.

        Args:
            scheduler: keeps the waiting requests.
            loads: returns the workers that are ready, with what they run.
            now: seconds, monotonic.
        """
        wanted = self._usage.any_live and scheduler.num_waiting > 0
        self._look_skipped = wanted and now < self._next_look
        if not wanted or self._look_skipped:
            return
        self._next_look = now + LOOK_INTERVAL_S
        workers = loads()
        count = min(MAX_AHEAD, self.room.places * len(workers))
        if count and (upcoming := scheduler.upcoming(count)):
            self._prefetch.plan(upcoming, workers, self._pinned, self._usage.adapter, now)

    def next_deadline(self) -> float | None:
        """When to call ``look_ahead`` again if it was called too soon."""
        return self._next_look if self._look_skipped else None

    def give_checks(self) -> None:
        """Give workers what they may check now."""
        checks = self.registry.checks
        if len(checks):
            for worker_id, check in checks.give([w.worker_id for w in self._ready()]):
                self._send(worker_id, check.to_wire())

    def on_checked(self, worker_id: str, message: Mapping[str, Any], now: float) -> None:
        """Act on a worker's verdict."""
        check = self.registry.checks.answered(worker_id, message["check_id"])
        if check is None:
            return
        report, error = message["report"], message["error"]
        settled = self.registry.settle(
            check,
            None if report is None else AdapterReport.from_wire(report),
            None if error is None else error_from_wire(error),
        )
        if settled.error is not None:
            kept = "the old content stays in force: " if settled.entry.adapter else ""
            logger.warning("%s%s", kept, settled.error)
        self._act_on([settled], now)

    def on_held(self, worker: WorkerHandle, message: Mapping[str, Any]) -> None:
        """Take note of what a worker has in memory."""
        worker.held = AdaptersHeld.from_wire(message)
        self._prefetch.note_held(worker.worker_id, worker.held)

    def lose(self, worker: WorkerHandle, now: float) -> None:
        """Let others do the checks of a worker that died."""
        self._prefetch.forget(worker.worker_id)
        error = WorkerLostError(f"two workers died while they checked the file: {worker.error}")
        given_up = self.registry.checks.lose(worker.worker_id)
        settled = [self.registry.settle(check, None, error) for check in given_up]
        self._act_on(settled, now)

    def refuse_checks(self, error: OmniError, now: float) -> None:
        """Answer everybody who waits for a check: nobody can do it."""
        self._act_on(self.registry.refuse_checks(error), now)

    # -- management

    def load(self, entry: RegisteredAdapter, *, replace: bool, loaded: Loaded) -> None:
        """Register an adapter once a worker has found its file to be good.

        Args:
            entry: what the name is to mean.
            replace: whether the name may be in use.
            loaded: told what it came to.

        Raises:
            OmniError: if it is refused at once.
        """
        if entry.pin:
            self._check_pins(entry)
        self.registry.load(entry, replace=replace)
        self._loads[entry] = loaded

    def unload(self, name: str, now: float) -> LoRAInfo:
        """Forget a name at once; requests that were admitted with it run on.

        Returns:
            What it was, with the requests that are left.

        Raises:
            OmniError: if it is refused.
        """
        meant = self.registry.unload(name)
        info = self._infos.of_unloaded(meant[0], now)
        error = InvalidRequestError(f"adapter {name!r} was unloaded before its check ended")
        for entry in meant:
            if (loaded := self._loads.pop(entry, None)) is not None:
                loaded(error)
        self._retire(name, meant[0].digest)
        self._tell_pins()
        self._reception.release(name, None, now)
        return info

    def pin(self, name: str, pin: bool, now: float) -> LoRAInfo:
        """Let workers always keep an adapter on the device, or no longer.

        Raises:
            OmniError: if it is refused.
        """
        entry = self.registry.get(name, "name")
        if pin and not entry.pin:
            if entry.state == "broken" and entry.error is not None:
                raise entry.error.with_traceback(None)
            self._check_pins(entry)
        self.registry.pin(entry, pin)
        self._tell_pins()
        return self._infos.of([entry], now)[0]

    def describe(self, now: float) -> list[LoRAInfo]:
        """Return all adapters as management shows them."""
        return self._infos.of(self.registry.entries(), now)

    # -- inside

    def _ready(self) -> list[WorkerHandle]:
        return [worker for worker in self._workers.values() if worker.is_ready]

    def _act_on(self, settled: list[Settled], now: float) -> None:
        """Tell workers, those who asked for a load, and requests that waited for the check."""
        for entry, error, done, still_open, retired in settled:
            if not done:
                continue
            if error is None and entry.adapter is not None:
                self._retired.discard(entry.adapter.digest)
                if entry.preload:
                    for worker in self._ready():
                        self._prefetch.tell(worker.worker_id, [entry.adapter], now)
            self._retire(entry.name, retired)
            if (loaded := self._loads.pop(entry, None)) is not None:
                loaded(error or self._infos.of([entry], now)[0])
            if not still_open:
                self._reception.release(entry.name, error, now)
        self._tell_pins()

    def _tell_pins(self) -> None:
        if (pinned := self.registry.contents.pinned) != self._pinned:
            self._pinned = pinned
            for worker in self._ready():
                self._send(worker.worker_id, _pin_message(pinned))

    def _retire(self, name: str, digest: str | None) -> None:
        """Let go of a content that a name may mean no more."""
        if digest is None or self.registry.digest_of(name) == digest:
            return
        self._usage.forget(name, digest)
        if digest not in self.registry.contents:
            self._retired.add(digest)
            self._drop_unused(digest)

    def _drop_unused(self, digest: str) -> None:
        """Let workers forget a content that no name means and no request needs any more."""
        if digest in self._retired and not self._usage.is_live(digest):
            self._retired.remove(digest)
            for worker in self._ready():
                self._send(worker.worker_id, {"type": ADAPTER_DROP, "digests": [digest]})

    def _check_pins(self, entry: RegisteredAdapter) -> None:
        pinned = 1 + self.registry.num_pinned_beside(entry.name)
        in_use = most_at_once(self._live.values(), self.registry.contents.pinned)
        self.room.check_pins(entry.name, pinned, in_use)


def _pin_message(digests: frozenset[str]) -> dict[str, Any]:
    return {"type": ADAPTER_PIN, "digests": sorted(digests)}
