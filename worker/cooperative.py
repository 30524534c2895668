"""Cooperative stepping: many unmodified pipeline calls under way at once, sharing forwards.

Each request runs its pipeline's ``__call__`` in a greenlet, on a view of the pipeline. The heavy
methods of the shared modules are suspension points: a call from inside a request's greenlet is
suspended with its arguments. The stepper groups suspended calls, runs one forward per group, and
resumes every greenlet with its part of the result, up to its next call or its end.

A call whose form is not understood runs alone; when a shared forward fails its members run alone,
or in halves if memory ran out, and only the culprit gets the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from omni_engine.worker.adapter_access import AdapterAccess, NoAdapters
from omni_engine.worker.call_rules import Kind
from omni_engine.worker.cooperative_call import Answer as Answer
from omni_engine.worker.cooperative_call import CooperativeCall as CooperativeCall
from omni_engine.worker.memory import MemoryCaps
from omni_engine.worker.prompt_cache import PromptCache
from omni_engine.worker.shared_forwards import SharedForwards
from omni_engine.worker.suspension import Role, SuspensionPoint
from omni_engine.worker.views import is_exclusive


class CooperativeStepper:
    """Runs pipeline calls together, one forward per group and tick.

    Args:
        pipe: a diffusers pipeline.
        denoisers: modules whose forwards are shared; they are wrapped until ``close``.
        encoders: text encoders: shared, and remembered by prompt.
        autoencoders: modules whose decodes may wait.
        max_rows: most rows of one forward.
        fused: False runs every call alone: always exact.
        pad_calls_to: with a number, every denoiser forward holds exactly so many calls, and
            encoders and decoders run alone: results don't depend on company by a single bit.
        prompt_cache_size: encoder outputs remembered.
        observed: how the arguments of a module combine, as far as probing found out.
        adapters: makes each request's adapters active in its forwards.
        mix_adapters: whether calls under different adapters share a denoiser's forwards.
        memory: remembers how many rows a forward has room for.

    Attributes:
        live: the calls under way.
        prompts: encoder outputs.
    """

    def __init__(
        self,
        pipe: Any,
        denoisers: Iterable[torch.nn.Module],
        *,
        encoders: Iterable[torch.nn.Module] = (),
        autoencoders: Iterable[torch.nn.Module] = (),
        max_rows: int = 64,
        fused: bool = True,
        pad_calls_to: int | None = None,
        prompt_cache_size: int = 0,
        observed: Mapping[torch.nn.Module, Mapping[str, Kind]] | None = None,
        adapters: AdapterAccess | None = None,
        mix_adapters: bool = False,
        memory: MemoryCaps | None = None,
    ) -> None:
        self._pipe = pipe
        self.adapters = adapters or NoAdapters()
        self.prompts = PromptCache(prompt_cache_size)
        self._shared = SharedForwards(
            fused=fused and not is_exclusive(pipe),
            max_rows=max_rows,
            pad_calls_to=pad_calls_to,
            prompts=self.prompts,
            adapters=self.adapters,
            mix_adapters=mix_adapters,
            memory=memory or MemoryCaps(),
        )
        self.live: list[CooperativeCall] = []
        self._points: list[SuspensionPoint] = []
        names = {m: n for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
        for role, modules in (
            (Role.DENOISE, denoisers),
            (Role.ENCODE, encoders),
            (Role.DECODE, autoencoders),
        ):
            for module in dict.fromkeys(modules):
                rules, name = (observed or {}).get(module), names.get(module)
                point = SuspensionPoint(module, role, component=name, observed=rules)
                self._points.append(point)

    @property
    def fused(self) -> bool:
        """Whether calls share forwards."""
        return self._shared.fused

    @property
    def forwards(self) -> int:
        """Denoiser forwards that ran."""
        return self._shared.forwards

    @property
    def rows(self) -> int:
        """Rows in the denoiser forwards that ran."""
        return self._shared.rows

    @property
    def fallbacks(self) -> int:
        """Shared forwards that failed, so that their members ran in smaller ones."""
        return self._shared.fallbacks

    @property
    def direct_forwards(self) -> int:
        """Denoiser forwards from outside of any request's greenlet."""
        return sum(p.direct_calls for p in self._points if p.role is Role.DENOISE)

    def start(
        self, arguments: dict[str, Any], seed: int, owner: str, **options: Any
    ) -> CooperativeCall:
        """Begin a call and run it to its first suspension; see ``CooperativeCall``."""
        call = CooperativeCall(self._pipe, arguments, seed, owner, **options)
        call.resume()
        if not call.done:
            self.live.append(call)
        return call

    def encode(self, calls: Iterable[CooperativeCall]) -> None:
        """Run text encoders until none of the calls waits for one."""
        waiting = list(calls)
        while waiting := [call for call in waiting if call.waits_for is Role.ENCODE]:
            remembered = {call: self._shared.remembered(call) for call in waiting}
            for call, answer in remembered.items():
                if answer is not None:
                    self.resume(call, answer)
            if not any(remembered.values()):
                self.step(self._shared.distinct(waiting))

    def step(self, calls: Iterable[CooperativeCall]) -> None:
        """Run one forward for every group of the calls' suspended calls, and resume them."""
        for call, answer in self.forward(calls).items():
            self.resume(call, answer)

    def forward(self, calls: Iterable[CooperativeCall]) -> dict[CooperativeCall, Answer]:
        """Run one forward for every group of the calls' suspended calls, without resuming them."""
        return self._shared.run(calls)

    def answer_alone(self, call: CooperativeCall) -> Answer:
        """Run a suspended call by itself, uncounted, or remember its answer."""
        return self._shared.remembered(call) or self._shared.run_alone(call)

    def resume(self, call: CooperativeCall, answer: Answer) -> None:
        """Resume a call; one that ends is forgotten."""
        call.resume(answer)
        self._forget_ended(call)

    def tick(self) -> None:
        """Encode for newcomers, run one denoiser forward per group, decode for finishers."""
        self.encode(self.live)
        self.step([call for call in self.live if call.waits_for is Role.DENOISE])
        self.step([call for call in self.live if call.waits_for is Role.DECODE])

    def abort(self, call: CooperativeCall) -> None:
        """End a call; its slot and tensors are free when this returns."""
        call.abort()
        self._forget_ended(call)

    def run(self) -> None:
        """Tick until every call has ended."""
        while self.live:
            self.tick()

    def close(self) -> None:
        """End all calls and restore the modules' methods."""
        for call in list(self.live):
            self.abort(call)
        for point in self._points:
            point.remove()
        self._points.clear()

    def _forget_ended(self, call: CooperativeCall) -> None:
        if call.done and call in self.live:
            self.live.remove(call)
