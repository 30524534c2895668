"""The registered adapters as management shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from omni_engine.engine.adapter_usage import AdapterUsage, LiveUses
from omni_engine.engine.adapters import AdapterRegistry
from omni_engine.engine.live_request import LiveRequest
from omni_engine.engine.parking import Parking
from omni_engine.engine.registered_adapter import RegisteredAdapter
from omni_engine.engine.worker_handle import WorkerHandle
from omni_engine.protocol.lora_info import LoRAHolder, LoRAInfo, LoRAUse


class AdapterInfos:
    """Puts together what is known of a stage's adapters.

    Args:
        model: the stage's name.
        registry: its adapters.
        usage: how often they were asked for.
        workers: its workers by id.
        live: its requests by id.
        parking: those of them that wait to be judged.
    """

    def __init__(
        self,
        model: str,
        registry: AdapterRegistry,
        usage: AdapterUsage,
        workers: Mapping[str, WorkerHandle],
        live: Mapping[str, LiveRequest],
        parking: Parking,
    ) -> None:
        self._model = model
        self._registry, self._usage = registry, usage
        self._workers, self._live, self._parking = workers, live, parking

    def of(self, entries: Iterable[RegisteredAdapter], now: float) -> list[LoRAInfo]:
        """Describe adapters."""
        entries = list(entries)
        if not entries:
            return []
        parked = [name for live in self._parking for name in self._asked_by(live)]
        uses, usage = LiveUses(self._live.values(), parked), self._usage
        return [
            self._info(e, e.state, uses.of(e.name, e.digest, usage.total(e.name, e.digest)), now)
            for e in entries
        ]

    def of_unloaded(self, entry: RegisteredAdapter, now: float) -> LoRAInfo:
        """Describe an adapter whose name is gone, with the requests that are left."""
        left = LiveUses(self._live.values(), ()).left(entry.name)
        return self._info(entry, "unloaded", left, now)

    def _asked_by(self, live: LiveRequest) -> set[str]:
        asked = self._registry.wanted(live.adapters_asked)
        return {one.name for one in asked}

    def _info(self, entry: RegisteredAdapter, state: str, use: LoRAUse, now: float) -> LoRAInfo:
        digest = entry.digest
        holders = [
            LoRAHolder(w.worker_id, device=digest in w.held.device, host=digest in w.held.host)
            for w in self._workers.values()
            if w.held is not None
        ]
        return LoRAInfo(
            model=self._model,
            name=entry.name,
            path=entry.path,
            state=state,
            error=entry.error,
            digest=digest,
            default_scale=entry.default_scale,
            pin=entry.pin,
            preload=entry.preload,
            report=entry.report,
            requests=use,
            last_used_s=self._usage.last_used_s(entry.name, digest, now),
            held=tuple(holder for holder in holders if holder.device or holder.host),
        )
