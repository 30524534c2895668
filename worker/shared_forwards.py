"""Runs what several requests wait for: one forward for every group that can share it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from omni_engine.protocol.errors import OutOfMemoryError
from omni_engine.worker.adapter_access import AdapterAccess
from omni_engine.worker.cooperative_call import Answer, CooperativeCall
from omni_engine.worker.failures import bare, text_of
from omni_engine.worker.fusion import Call, CannotSplitError, Fusion
from omni_engine.worker.memory import MemoryCaps, is_out_of_memory, release_memory
from omni_engine.worker.process_state import ProcessState
from omni_engine.worker.prompt_cache import PromptCache
from omni_engine.worker.request_kinds import kind_of_call
from omni_engine.worker.retries import SharedRun
from omni_engine.worker.step_calls import error_of, result_of
from omni_engine.worker.suspension import Role, Suspended, SuspensionPoint

logger = logging.getLogger(__name__)

_SHARED_DECODE_POSITIONS = 64 * 64
"""Most latent positions of one shared decode (512 x 512 pixels at a factor of 8): larger ones gain
little from company and cost its memory."""

_MAX_HELD = 2
"""How many ticks a newcomer waits for others to come round to its kind of forward."""

Waiting = tuple[CooperativeCall, Suspended]


class SharedForwards:
    """Groups suspended calls, runs them and hands out their parts; resumes nobody.

    Args:
        fused: False runs every call alone.
        max_rows: most rows of one forward.
        pad_calls_to: with a number, every denoiser forward holds exactly so many calls, and
            encoders and decoders run alone.
        prompts: remembers encoders' outputs.
        adapters: makes each request's adapters active in its forwards.
        mix_adapters: whether calls under different adapters share a denoiser's forwards.
        memory: remembers how many rows a forward has room for.

    Attributes:
        forwards: denoiser forwards that ran.
        rows: rows in them.
        fallbacks: shared forwards that failed, so that their members ran in smaller ones.
    """

    def __init__(
        self,
        *,
        fused: bool,
        max_rows: int,
        pad_calls_to: int | None,
        prompts: PromptCache,
        adapters: AdapterAccess,
        mix_adapters: bool,
        memory: MemoryCaps,
    ) -> None:
        self.fused = fused
        self._memory = memory
        self._max_rows, self._pad_calls_to = max_rows, pad_calls_to
        self._padded = Fusion(pad_calls_to=pad_calls_to if fused else None)
        self._plain = Fusion()
        self.prompts = prompts
        self._adapters, self._mix_adapters = adapters, mix_adapters
        self.forwards = self.rows = self.fallbacks = 0
        self._recent: deque[set[Hashable]] = deque(maxlen=_MAX_HELD)

    def run(self, calls: Iterable[CooperativeCall]) -> dict[CooperativeCall, Answer]:
        """Run one forward for every group of the calls that are suspended.

        A pipeline with guidance calls its denoiser several times a step, in turns. A newcomer whose
        first call is none that the others wait for now, but one that they made just before, has no
        answer yet: a tick later it shares theirs, and so it does from then on.
        """
        groups: dict[Hashable, list[Waiting]] = {}
        for call in calls:
            if call.pending is not None:
                key = self._key(call.owner, call.pending)
                groups.setdefault(key, []).append((call, call.pending))
        answers: dict[CooperativeCall, Answer] = {}
        for members in self._in_step(groups):
            for part in self._parts(members):
                self._run_group(part, answers)
        return answers

    def _in_step(self, groups: dict[Hashable, list[Waiting]]) -> list[list[Waiting]]:
        """Return the groups to run now: all but newcomers that should wait for the others."""
        denoising = {
            key for key, members in groups.items() if members[0][1].point.role is Role.DENOISE
        }
        seen = set().union(*self._recent)
        held = {
            key
            for key in denoising & seen
            if all(not call.counts.forwards and call.held < _MAX_HELD for call, _ in groups[key])
        }
        if held == denoising:
            held = set()
        for key in held:
            for call, _ in groups[key]:
                call.held += 1
        if denoising:
            self._recent.append(denoising - held)
        return [members for key, members in groups.items() if key not in held]

    def remembered(self, call: CooperativeCall) -> Answer | None:
        """Return the remembered answer to a suspended encoder call, or None."""
        if call.pending is None or call.pending.point.role is not Role.ENCODE:
            return None
        found = result_of(self.prompts.get, self._prompt_key(call, call.pending))
        return None if found is None or isinstance(found, BaseException) else Answer(found)

    def distinct(self, calls: Iterable[CooperativeCall]) -> list[CooperativeCall]:
        """Return one encoder call of each prompt: the others can be answered from memory then."""
        found: dict[Hashable, CooperativeCall] = {}
        for call in calls:
            if call.pending is not None:
                key = self._prompt_key(call, call.pending)
                found.setdefault(call if key is None else key, call)
        return list(found.values())

    def run_alone(self, waiting: CooperativeCall) -> Answer:
        """Run what one call is suspended in by itself, uncounted."""
        if waiting.pending is None:
            return Answer()
        (point, call), hub = waiting.pending, ProcessState.current()
        call.modes.apply()
        try:
            with self._adapters.rows(point.component, [(waiting.owner, call.rows)]):
                return Answer(point.run(*call.positional, **call.arguments))
        except BaseException as error:  # noqa: BLE001  # boundary: one request
            return Answer(error=bare(error))
        finally:
            hub.modes.apply()

    def _prompt_key(self, call: CooperativeCall, suspended: Suspended) -> Hashable | None:
        """Return what must be equal for two encoder calls to have the same output."""
        identity = self._adapters.identity(call.owner, suspended.point.component)
        try:
            return self.prompts.key(suspended.call, identity)
        except Exception as error:  # noqa: BLE001  # boundary: one call, whose arguments may be anything
            logger.warning("a call of %s can't be remembered: %s",
                           type(suspended.point.module).__name__, error)  # fmt: skip
            return None

    def _key(self, owner: str, suspended: Suspended) -> Hashable:
        """Return what must be equal for calls to share a forward."""
        point, call = suspended
        alone_always = self._pad_calls_to is not None and point.role is not Role.DENOISE
        if not self.fused or alone_always or not point.splits:
            return id(call)
        if point.role is Role.DECODE and _positions(call) > _SHARED_DECODE_POSITIONS:
            return id(call)
        try:
            mixes = self._mix_adapters and point.role is Role.DENOISE
            identity = None if mixes else self._adapters.identity(owner, point.component)
            return (id(point), identity, self._fusion_of(point).key(call))
        except Exception as error:  # noqa: BLE001  # boundary: one call, whose arguments may be anything
            logger.warning("a call of %s can't be shared: %s", type(point.module).__name__, error)
            return id(call)

    def _fusion_of(self, point: SuspensionPoint) -> Fusion:
        return self._padded if point.role is Role.DENOISE else self._plain

    def _parts(self, members: list[Waiting]) -> list[list[Waiting]]:
        """Split a group so that no forward holds more than it may."""
        most_rows, most_calls = self._limits(members[0][1])
        parts: list[list[Waiting]] = [[]]
        rows = 0
        for member in members:
            more = member[1].call.rows
            if parts[-1] and (rows + more > most_rows or len(parts[-1]) >= most_calls):
                parts.append([])
                rows = 0
            parts[-1].append(member)
            rows += more
        return parts

    def _limits(self, first: Suspended) -> tuple[float, float]:
        """Return the most rows and the most calls of one forward."""
        if first.point.role is Role.DECODE:
            return math.inf, max(1, _SHARED_DECODE_POSITIONS // max(1, _positions(first.call)))
        if self._is_padded(first.point):
            return math.inf, self._pad_calls_to or 1
        return self._max_rows, math.inf

    def _is_padded(self, point: SuspensionPoint) -> bool:
        return point.role is Role.DENOISE and self._pad_calls_to is not None

    def _run_group(
        self, members: Sequence[Waiting], answers: dict[CooperativeCall, Answer]
    ) -> None:
        """Run one forward, or smaller ones if it fails; each call gets its answer."""
        _, (point, first) = members[0]
        run = SharedRun(
            f"a forward of {type(point.module).__name__}",
            kind_of_call(first),
            self._attempt_padded if self._is_padded(point) else self._attempt,
            lambda member: member[1].call.rows,
            self._memory,
        )
        for (call, _), result in zip(members, run.run(members), strict=True):
            failed = isinstance(result, BaseException)
            answers[call] = Answer(error=result) if failed else Answer(result)

    def _attempt(self, members: Sequence[Waiting]) -> list[Any] | BaseException:
        """Run one forward; return each call's part of its output, or what it raised."""
        point = members[0][1].point
        try:
            outputs = self._forward(point, members)
        except BaseException as error:  # noqa: BLE001  # boundary: one batch
            if len(members) > 1:
                self.fallbacks += 1
                point.splits &= not isinstance(error, CannotSplitError)
            return bare(error)
        requests = len({call.owner for call, _ in members})
        if point.role is Role.DENOISE:
            for call, _ in members:
                call.counts.add(requests)
        return outputs

    def _attempt_padded(self, members: Sequence[Waiting]) -> list[Any] | BaseException:
        """Run one forward of a size that may not change: halves would be no smaller."""
        outcome = self._attempt(members)
        if not (isinstance(outcome, BaseException) and is_out_of_memory(outcome)):
            return outcome
        release_memory()
        return [
            OutOfMemoryError(
                "the forward does not fit into the device's memory, and with deterministic each "
                f"one holds {self._pad_calls_to} requests: {text_of(outcome)}",
                hint="Lower max_num_seqs, or ask for smaller pictures.",
            )
            for _ in members
        ]

    def _forward(self, point: SuspensionPoint, waiting: Sequence[Waiting]) -> list[Any]:
        fusion, hub = self._fusion_of(point), ProcessState.current()
        calls = [suspended.call for _, suspended in waiting]
        keys = [self._prompt_key(*one) for one in waiting if point.role is Role.ENCODE]
        owner_of = {id(suspended.call): call.owner for call, suspended in waiting}
        calls[0].modes.apply()
        try:
            arguments = fusion.fuse(calls)
            owners = [(owner_of[id(call)], call.rows) for call in fusion.members(calls)]
            with self._adapters.rows(point.component, owners):
                output = point.run(*calls[0].positional, **arguments)
            parts = fusion.split(output, calls, arguments)
        finally:
            hub.modes.apply()
        for key, part in zip(keys, parts, strict=False):  # none but for encoders
            if (failure := error_of(self.prompts.put, key, part)) is not None:
                logger.warning("an encoded prompt is not remembered: %s", text_of(failure))
        if point.role is Role.DENOISE:
            self.forwards += 1
            self.rows += sum(call.rows for call in calls)
        return parts


def _positions(call: Call) -> int:
    """Return the latent positions of a decode: rows x frames x height x width."""
    for value in call.arguments.values():
        if isinstance(value, torch.Tensor) and value.ndim >= 3:
            return value.numel() // value.shape[1]
    return _SHARED_DECODE_POSITIONS + 1
