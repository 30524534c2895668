"""A worker's adapters: in memory in time, and active in exactly the forwards they belong to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from omni_engine.protocol import adapters as wire
from omni_engine.protocol.adapters import (
    Adapter,
    AdapterActivation,
    AdapterIdentity,
    AdaptersHeld,
)
from omni_engine.protocol.errors import AdapterError
from omni_engine.protocol.outputs import AppliedLoRA
from omni_engine.worker.adapter_bank import AdapterBank, Urgency
from omni_engine.worker.adapter_bindings import Calls
from omni_engine.worker.adapter_component import BASE, AdaptedPipeline
from omni_engine.worker.adapter_loader import AdapterLoader, Library
from omni_engine.worker.adapter_placement import AdapterPlacer
from omni_engine.worker.adapter_requests import AdaptedRequest, adapters_of
from omni_engine.worker.lora_layers import MixedRowsError


class AdapterRuntime:
    """Keeps adapters in memory and makes them active, for each request its own.

    A loader thread reads, checks and places them; forwards wait for their own adapters only.

    Args:
        pipe: a diffusers pipeline. Nothing is changed in it but that layers which adapters change
            get a hook, once such an adapter is on the device.
        library: where adapters come from; used by the loader thread only.
        max_loras: most adapters on the device, >= 1. While one is put in another's place there is
            memory for one more.
        max_cpu_loras: most adapters in host memory.
        exact_rows: has each call's rows computed by themselves, so that results don't depend by a
            bit on the calls that share a forward.
        merge: uses merged copies of weights for an identity that has a component to itself.
        send: takes messages for the engine: what checks found, and what is held. Called from the
            loader thread.
        on_loaded: called from the loader thread after each load, those included that failed or
            found no room.
    """

    def __init__(
        self,
        pipe: Any,
        library: Library,
        *,
        max_loras: int,
        max_cpu_loras: int,
        exact_rows: bool = False,
        merge: bool = False,
        send: Callable[[dict[str, Any]], None] | None = None,
        on_loaded: Callable[[], None] | None = None,
    ) -> None:
        self._pipeline = AdaptedPipeline(pipe, lambda d: self._bank.device(d), exact_rows, merge)
        self._bank = AdapterBank(max_loras, max_cpu_loras, on_evicted=self._pipeline.forget)
        self._requests: dict[str, AdaptedRequest] = {}
        self._loader = AdapterLoader(
            library,
            self._bank,
            AdapterPlacer(self._pipeline.modules),
            send or _ignore_message,
            on_loaded or _do_nothing,
        )

    # -- from any thread

    def on_message(self, message: Mapping[str, Any]) -> bool:
        """Handle a message of the engine without waiting for anything.

        Returns:
            False for a message that isn't about adapters.
        """
        match message.get("type"):
            case wire.ADAPTER_CHECK:
                self._loader.check(message["check_id"], message["name"], message["path"])
            case wire.ADAPTER_PREFETCH:
                for adapter in message["adapters"]:
                    self._loader.load(Adapter.from_wire(adapter), Urgency.PREFETCHED)
            case wire.ADAPTER_PIN:
                self._bank.pin(message["digests"])
                self._loader.make_use_of_room()
            case wire.ADAPTER_DROP:
                self._bank.drop(message["digests"])
                self._loader.make_use_of_room()
            case _:
                return False
        return True

    def expect(self, activations: Iterable[AdapterActivation | None]) -> None:
        """Load the adapters of a plan that arrived, before prefetched ones."""
        for activation in activations:
            for adapter in () if activation is None else activation.adapters:
                self._loader.load(adapter, Urgency.EXPECTED)

    def loading_ms(self) -> float:
        """Return for how long the loader thread has been at its present file; 0 while it waits."""
        return self._loader.loading_ms()

    def held(self) -> AdaptersHeld:
        """Return what is in memory, and what adapters cost so far."""
        return self._bank.held()

    # -- from the main thread

    def assign(self, request_id: str, activation: AdapterActivation | None) -> None:
        """Let a request run under these adapters until it is released, and load them."""
        self.release([request_id])
        request = self._requests[request_id] = AdaptedRequest(activation)
        self._bank.assign(() if activation is None else activation.digests)
        self._load_missing(request)

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended; unknown ones don't matter."""
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is not None and request.activation is not None:
                self._bank.unassign(request.activation.digests)
                self._loader.make_use_of_room()

    def is_ready(self, request_id: str) -> bool:
        """Whether a request needn't wait: its adapters are on the device, or running it raises.

        One whose adapters find no room beside those of other requests becomes ready when these are
        released; ``wait_ready`` and ``rows`` make room at once.
        """
        request = self._request(request_id)
        activation = request.activation
        if activation is None or self._bank.on_device(activation.digests):
            return True
        if not self._bank.fits(activation.digests):
            return True
        self._load_missing(request)
        return any(load.error is not None for load in request.loads.values())

    def lacks_room(self, request_id: str) -> bool:
        """Whether a request waits for nothing but room that other requests' adapters take."""
        waiting = [load for load in self._request(request_id).loads.values() if not load.done]
        return bool(waiting) and all(load.parked for load in waiting)

    def wait_ready(self, request_id: str) -> None:
        """Wait until a request's adapters are on the device.

        Raises:
            AdapterError: if one can't be loaded, or they don't fit on the device together.
        """
        request = self._request(request_id)
        with self._on_device(adapters_of([request]), [request]):
            pass

    def applied(self, request_id: str) -> list[AppliedLoRA]:
        """Return what a request runs under, for its output to report."""
        activation = self._request(request_id).activation
        if activation is None:
            return []
        return [
            AppliedLoRA(adapter.name, adapter.digest, scale)
            for adapter, scale in zip(activation.adapters, activation.scales, strict=True)
        ]

    def identity(self, request_id: str | None, component: str | None) -> Hashable:
        """Return what a component's outputs depend on beside its inputs; None: the bare model.

        Args:
            request_id: None for what belongs to no request.
            component: None asks for all components at once.
        """
        return self._part(request_id, component) or None

    @contextlib.contextmanager
    def rows(
        self, component: str | None, owners: Sequence[tuple[str | None, int]]
    ) -> Iterator[None]:
        """Run one forward in which each row is under its own request's adapters.

        Loads what is missing, which the forward waits for.

        Args:
            component: whose forward it is; None if that isn't known.
            owners: the requests whose rows make up the first dimension of the inputs, None for the
                bare model, and how many rows of each, in order, copies for padding included.

        Raises:
            AdapterError: if an adapter can't be loaded.
            MixedRowsError: if the requests can't share a forward, though each could run alone;
                also raised by the forward, if a layer's input doesn't consist of these rows.
        """
        known = self._pipeline.modules
        names = list(known) if component is None else [component] * (component in known)
        calls = {
            name: tuple((self._part(owner, name), rows) for owner, rows in owners if rows)
            for name in names
        }
        requests = [
            self._request(owner)
            for owner in dict.fromkeys(owner for owner, rows in owners if rows)
            if owner is not None and any(self._part(owner, name) for name in names)
        ]
        used = {digest for each in calls.values() for part, _ in each for digest, _ in part}
        needed = {d: adapter for d, adapter in adapters_of(requests).items() if d in used}
        with self._on_device(needed, requests), self._running(calls):
            yield

    @contextlib.contextmanager
    def everywhere(self, activation: AdapterActivation | None) -> Iterator[None]:
        """Run forwards of all components under one request's adapters; ``rows`` goes before it.

        Raises:
            AdapterError: if an adapter can't be loaded.
        """
        request = AdaptedRequest(activation)
        with self._on_device(adapters_of([request]), []):
            calls = {
                name: ((request.part(name, self._bank.components), 1),)
                for name in self._pipeline.modules
            }
            with self._running(calls):
                yield

    def close(self) -> None:
        """Stop the loader thread and restore the pipeline's layers."""
        self._loader.close()
        self._pipeline.clear()

    # -- parts

    @contextlib.contextmanager
    def _running(self, calls: Mapping[str, Calls]) -> Iterator[None]:
        started = time.perf_counter()
        with self._pipeline.bound(calls) as is_switch:
            if is_switch:
                self._bank.count_activation(time.perf_counter() - started)
            yield

    @contextlib.contextmanager
    def _on_device(
        self, needed: Mapping[str, Adapter], requests: Sequence[AdaptedRequest]
    ) -> Iterator[None]:
        """Have adapters on the device, for requests of whose loads none has failed."""
        if not needed:
            yield
            return
        try:
            if not self._bank.hold(needed):
                self._wait_for(needed, requests)
            yield
        finally:
            self._bank.let_go(needed)
            self._loader.make_use_of_room()

    def _wait_for(self, needed: Mapping[str, Adapter], requests: Sequence[AdaptedRequest]) -> None:
        for load in (load for request in requests for load in request.loads.values()):
            if load.error is not None:
                raise load.error
        if not self._bank.fits(needed):
            text = f"{len(needed)} adapters don't fit on the device beside those that must stay"
            if len(requests) > 1:
                raise MixedRowsError(text)
            raise AdapterError(text, hint="Raise max_loras, or pin fewer adapters.")
        started = time.perf_counter()
        loads = [self._loader.load(one, Urgency.WAITED_FOR) for one in needed.values()]
        self._loader.wait(loads)
        self._bank.count_wait(time.perf_counter() - started)
        for load in loads:
            if load.error is not None:
                raise load.error

    def _load_missing(self, request: AdaptedRequest) -> None:
        for adapter in () if request.activation is None else request.activation.adapters:
            load = request.loads.get(adapter.digest)
            if load is not None and (load.error is not None or not load.done):
                continue
            if not self._bank.touch(adapter.digest):
                request.loads[adapter.digest] = self._loader.load(adapter, Urgency.NEEDED)

    def _request(self, request_id: str) -> AdaptedRequest:
        found = self._requests.get(request_id)
        if found is None:
            raise KeyError(f"request {request_id!r} was not assigned what it runs under")
        return found

    def _part(self, request_id: str | None, component: str | None) -> AdapterIdentity:
        return (
            BASE
            if request_id is None
            else self._request(request_id).part(component, self._bank.components)
        )


def _ignore_message(message: dict[str, Any]) -> None:
    """Without an engine there's nobody to tell."""


def _do_nothing() -> None:
    """Nobody wants to know."""
