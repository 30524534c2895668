"""The thread that reads, checks and places adapters, so that forwards don't wait for any of it."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from omni_engine.protocol.adapters import ADAPTER_CHECKED, Adapter, AdapterReport
from omni_engine.protocol.errors import AdapterError, OmniError
from omni_engine.worker.adapter_bank import AdapterBank, Urgency
from omni_engine.worker.adapter_placement import AdapterPlacer
from omni_engine.worker.adapter_weights import AdapterWeights
from omni_engine.worker.failures import bare
from omni_engine.worker.progress import main_thread

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.2
"""Least time between two reports of counters; a load is reported at once."""


class Library(Protocol):
    """Where adapters come from; called by the loader thread only."""

    def check(self, name: str, path: str) -> AdapterReport:
        """Return what a file holds; raises ``OmniError`` if it can't be used."""

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        """Return an adapter's weights; raises ``OmniError`` if they can't be had."""


@dataclass(slots=True, eq=False)
class Load:
    """An adapter on its way to the device.

    Attributes:
        adapter: which one.
        urgency: for the most urgent of those who asked.
        others: the same content, as others who asked named it; their files may still be there.
        parked: whether it waits for room on the device.
        done: whether it ended: the adapter is on the device, or at least in host memory; or there
            is an error; or nobody needs it any more.
        error: why it failed.
    """

    adapter: Adapter
    urgency: Urgency
    others: list[Adapter] = field(default_factory=list)
    parked: bool = False
    done: bool = False
    error: OmniError | None = None


class AdapterLoader:
    """Loads adapters in the order of their urgency, then checks files.

    A load that is asked for twice runs once.

    Args:
        library: where adapters come from.
        bank: where they go.
        placer: how they get onto the device.
        send: takes messages for the engine; called from the loader thread.
        on_loaded: called from the loader thread after each load, those included that failed or
            found no room.
    """

    def __init__(
        self,
        library: Library,
        bank: AdapterBank,
        placer: AdapterPlacer,
        send: Callable[[dict[str, Any]], None],
        on_loaded: Callable[[], None],
    ) -> None:
        self._library, self._bank, self._placer = library, bank, placer
        self._send, self._on_loaded = send, on_loaded
        self._changed = bank.changed
        self._loads: dict[str, Load] = {}
        self._queue: list[tuple[Urgency, int, Load]] = []
        self._parked: list[Load] = []
        self._checks: deque[tuple[int, str, str]] = deque()
        self._order = itertools.count()
        self._reported_at = 0.0
        self._job_since: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    # -- from any thread

    def load(self, adapter: Adapter, urgency: Urgency) -> Load:
        """Have an adapter loaded; returns at once."""
        with self._changed:
            load = self._loads.get(adapter.digest)
            if load is None:
                load = Load(adapter, urgency)
                if self._closed:
                    self._finish(load, AdapterError("the worker closes"))
                    return load
                if self._bank.touch(adapter.digest):
                    load.done = True
                    return load
                self._loads[adapter.digest] = load
                self._enqueue(load)
                return load
            if adapter not in (load.adapter, *load.others):
                load.others.append(adapter)
            if urgency < load.urgency:
                load.urgency = urgency
                self._unpark(load)
                self._enqueue(load)
            return load

    def check(self, check_id: int, name: str, path: str) -> None:
        """Have a file checked; the result is sent as an ``ADAPTER_CHECKED`` message."""
        with self._changed:
            self._checks.append((check_id, name, path))
            self._changed.notify_all()

    def make_use_of_room(self) -> None:
        """Try again what had no room on the device."""
        if not self._parked:
            return
        with self._changed:
            has_room = self._bank.has_room(Urgency.NEEDED)
            for load in list(self._parked):
                if self._is_outdated(load):
                    self._finish(load, None)
                elif has_room:
                    self._unpark(load)
                    self._enqueue(load)

    def loading_ms(self) -> float:
        """Return for how long the thread has been at its present file; 0 while it waits."""
        since = self._job_since
        return 0.0 if since is None else (time.monotonic() - since) * 1000

    def wait(self, loads: Iterable[Load]) -> None:
        """Wait until all of them ended, or one failed; from the main thread only."""
        loads = list(loads)
        with main_thread.waiting(), self._changed:
            self._changed.wait_for(
                lambda: any(load.error for load in loads) or all(load.done for load in loads)
            )

    def close(self) -> None:
        """Stop the thread after what it does now; what waits fails."""
        with self._changed:
            self._closed = True
            for load in list(self._loads.values()):
                self._finish(load, AdapterError("the worker closes"))
            self._changed.notify_all()
        self._thread.join()

    def _unpark(self, load: Load) -> None:
        if load.parked:
            load.parked = False
            self._parked.remove(load)

    def _enqueue(self, load: Load) -> None:
        heapq.heappush(self._queue, (load.urgency, next(self._order), load))
        self._changed.notify_all()

    # -- the thread

    def _run(self) -> None:
        with torch.no_grad():  # grad mode is a thread's own
            while (job := self._next_job()) is not None:
                self._job_since = time.monotonic()
                try:
                    job()
                except Exception:  # boundary: one job; the thread must go on
                    logger.exception("the adapter loader failed")
                self._job_since = None

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for something to do; None when closed."""
        with self._changed:
            while not self._closed:
                if (load := self._pop()) is not None:
                    return partial(self._load, load)
                if self._checks:
                    return partial(self._check, *self._checks.popleft())
                due = None
                if self._bank.unreported:
                    due = self._reported_at + _REPORT_EVERY_S - time.monotonic()
                    if due <= 0:
                        return self._report
                self._changed.wait(due)
            return None

    def _pop(self) -> Load | None:
        while self._queue:
            urgency, _, load = heapq.heappop(self._queue)
            if urgency != load.urgency or load.done or load.parked:
                continue  # it was enqueued anew, or isn't wanted
            if not self._is_outdated(load):
                return load
            self._finish(load, None)
        return None

    def _is_outdated(self, load: Load) -> bool:
        """Whether the requests that needed an adapter have ended."""
        is_needed = load.urgency is Urgency.NEEDED
        return is_needed and not self._bank.is_assigned(load.adapter.digest)

    def _load(self, load: Load) -> None:
        try:
            is_over = self._to_device(load, self._in_host(load))
            error = None
        except OmniError as raised:
            is_over, error = True, raised
        except Exception as raised:  # boundary: one adapter; what reading may raise is not known
            logger.exception("adapter %s could not be loaded", load.adapter.name)
            is_over, error = True, _wrapped(raised, load.adapter.name, "loaded")
        if error is not None:
            logger.warning("adapter %s is not loaded: %s", load.adapter.name, error)
        if is_over:
            self._finish(load, error)
            self._report()
        self._on_loaded()

    def _in_host(self, load: Load) -> AdapterWeights:
        """Return an adapter's weights, from disk if host memory doesn't hold them."""
        weights = self._bank.host(load.adapter.digest)
        if weights is None:
            started = time.perf_counter()
            weights = self._fetch(load)
            self._bank.count_load(time.perf_counter() - started)
            self._bank.put_in_host(weights)
        return weights

    def _fetch(self, load: Load) -> AdapterWeights:
        try:
            return self._library.fetch(load.adapter)
        except OmniError:
            for other in load.others:
                try:
                    return self._library.fetch(other)
                except OmniError as error:
                    logger.info("adapter %s: %s", other.name, error)
            raise

    def _to_device(self, load: Load, weights: AdapterWeights) -> bool:
        """Put an adapter on the device if there's room; returns whether the load is over."""
        with self._changed:
            if not self._bank.has_room(load.urgency):
                return self._without_room(load)
        placed = self._placer.place(weights)
        with self._changed:
            return self._bank.put_on_device(placed, load.urgency) or self._without_room(load)

    def _without_room(self, load: Load) -> bool:
        if load.urgency is Urgency.WAITED_FOR:
            raise AdapterError(
                f"there is no room on the device for adapter {load.adapter.name!r}",
                expected="room beside pinned adapters and those of the forward that runs",
            )
        if load.urgency is Urgency.NEEDED:
            load.parked = True
            self._parked.append(load)
            return False
        self._finish(load, None)  # before the lock is free, or somebody could wait for it in vain
        return True

    def _finish(self, load: Load, error: OmniError | None) -> None:
        with self._changed:
            if not load.done:
                load.error, load.done = error and bare(error), True
                self._loads.pop(load.adapter.digest, None)
                self._unpark(load)
                self._changed.notify_all()

    def _check(self, check_id: int, name: str, path: str) -> None:
        report, error = None, None
        try:
            found = self._library.check(name, path)
            self._bank.learn(found.digest, found.layers)
            report = found.to_wire()
        except OmniError as raised:
            error = raised
        except Exception as raised:  # boundary: one file; what reading it may raise is not known
            logger.exception("adapter %s could not be checked", name)
            error = _wrapped(raised, name, "checked")
        self._send(
            {
                "type": ADAPTER_CHECKED,
                "check_id": check_id,
                "report": report,
                "error": None if error is None else error.to_wire(),
            }
        )

    def _report(self) -> None:
        if self._bank.take_unreported():
            self._reported_at = time.monotonic()
            self._send(self._bank.held().to_wire())


def _wrapped(error: Exception, name: str, done: str) -> AdapterError:
    return AdapterError(f"adapter {name!r} could not be {done}: {type(error).__name__}: {error}")
