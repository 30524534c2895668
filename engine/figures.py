"""What a stage and its workers have done since the engine's start, in numbers.

Pure: the time is passed in. Every event costs a few additions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omni_engine.engine.histograms import REQUESTS, Histogram
from omni_engine.engine.live_request import LiveRequest
from omni_engine.protocol.adapters import AdaptersHeld
from omni_engine.protocol.outputs import DiffusionOutput

OUTCOMES = ("received", "completed", "failed", "aborted")


@dataclass(slots=True)
class Traffic:
    """Bytes that crossed the engine's sockets: all frames of all messages."""

    from_clients: int = 0
    to_clients: int = 0
    from_workers: int = 0
    to_workers: int = 0


class StageFigures:
    """Counts the requests of one stage, what they took and what they gave.

    Attributes:
        counters: requests by what became of them; see ``OUTCOMES``.
        batch_sizes: batches, or ticks, by their number of requests.
        errors: failed requests by their error's code; aborted ones are none.
        outputs: pictures, clips, sounds or latents of requests that completed.
        steps: denoising steps that requests have done, those done again included.
    """

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.outputs = self.steps = 0
        self._queue_s, self._run_s, self._total_s = Histogram(), Histogram(), Histogram()
        self._waiting: dict[str, float] = {}  # in order of arrival
        self._waiting_again: dict[str, float] = {}

    def received(self, live: LiveRequest) -> None:
        """Note that a request was taken in, and waits."""
        self.counters["received"] += 1
        self._waiting[live.request_id] = live.arrival

    def started(self, live: LiveRequest) -> None:
        """Note that a request waits no more."""
        if self._waiting.pop(live.request_id, None) is None:
            self._waiting_again.pop(live.request_id, None)

    def waits_again(self, live: LiveRequest) -> None:
        """Note that a request lost its worker, and waits from its arrival on."""
        self._waiting_again[live.request_id] = live.arrival

    def advance(self, live: LiveRequest, step_index: int, num_steps: int) -> None:
        """Note how far a running request is, and count its steps."""
        self.steps += max(0, step_index - live.run_steps)
        live.advance(step_index, num_steps)

    def ended(self, live: LiveRequest, output: DiffusionOutput, now: float) -> None:
        """Note what became of a request, and how long that took.

        One that never ran waited until now.
        """
        self.started(live)
        waited_until = now if live.started is None else live.started
        self._queue_s.add(waited_until - live.arrival)
        self._total_s.add(now - live.arrival)
        if live.started is not None:
            self._run_s.add(now - live.started)
        error = output.error
        kind = "aborted" if output.aborted else "failed" if error else "completed"
        self.counters[kind] += 1
        if error is None:
            self.outputs += num_made(output)
            # A pipeline that reports no progress tells its steps at the end.
            self.steps += max(0, output.metrics.num_steps - live.run_steps)
        elif kind == "failed":
            self.errors[error.code] += 1

    def oldest_waiting_s(self, now: float) -> float:
        """Return the age of the request that has waited longest; 0 if none waits."""
        firsts = [next(iter(self._waiting.values()), now), *self._waiting_again.values()]
        return max(0.0, now - min(firsts))

    def describe(self, now: float) -> dict[str, Any]:
        """Return the figures for metrics."""
        batch_size = Histogram.of(self.batch_sizes.items(), REQUESTS)
        return {
            "oldest_waiting_s": self.oldest_waiting_s(now),
            "requests": {name: self.counters[name] for name in OUTCOMES},
            "errors": dict(self.errors),
            "outputs": self.outputs,
            "steps": self.steps,
            "histograms": {
                "queue_s": self._queue_s.describe(),
                "run_s": self._run_s.describe(),
                "total_s": self._total_s.describe(),
                "batch_size": batch_size.describe(),
            },
        }


class WorkerFigures:
    """Adds up what the processes of one worker count, each from its start.

    Attributes:
        ticks: ticks run, with step execution.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self._forwards_before = self._forwards = 0
        self._adapters_before = dict.fromkeys(_COUNTED, 0.0)
        self._told_of_adapters = False

    @property
    def forwards(self) -> int:
        """Denoiser forwards that its device ran, as far as it has told."""
        return self._forwards_before + self._forwards

    def note_forwards(self, forwards: int) -> None:
        """Note how many the present process has run since its start; what is older is no news."""
        self._forwards = max(self._forwards, forwards)

    def process_ended(self, held: AdaptersHeld | None) -> None:
        """Note that a process is gone, and what it told of its adapters last."""
        self._told_of_adapters |= held is not None
        self._forwards_before, self._forwards = self.forwards, 0
        self._adapters_before = self._adapter_counts(held)

    def describe_adapters(self, held: AdaptersHeld | None) -> dict[str, Any] | None:
        """Return what the worker's adapters cost since the engine's start, and what it holds now.

        Args:
            held: what the present process told last; None if it has not yet, or is gone.

        Returns:
            None if none of its processes has told anything.
        """
        self._told_of_adapters |= held is not None
        if not self._told_of_adapters:
            return None
        counts = self._adapter_counts(held)
        now_held = AdaptersHeld([], []) if held is None else held
        return {
            "switches": int(counts["activations"]),
            "device_hits": int(counts["device_hits"]),
            "host_hits": int(counts["host_hits"]),
            "loads": int(counts["loads"]),
            "load_s": counts["load_ms"] / 1000,
            "wait_s": counts["wait_ms"] / 1000,
            "evictions": int(counts["evictions"]),
            "on_device": len(now_held.device),
            "in_memory": len(now_held.host),
            "device_bytes": now_held.device_bytes,
            "host_bytes": now_held.host_bytes,
        }

    def _adapter_counts(self, held: AdaptersHeld | None) -> dict[str, float]:
        """Return what all processes have counted."""
        before = self._adapters_before
        if held is None:
            return before
        return {name: before[name] + getattr(held, name) for name in _COUNTED}


_COUNTED = ("activations", "device_hits", "host_hits", "loads", "load_ms", "wait_ms", "evictions")
"""Of what a process tells of its adapters, what only grows."""


def num_made(output: DiffusionOutput) -> int:
    """Return how many pictures, clips, sounds or rows of latents an output holds."""
    kinds: Iterable[Any] = (output.images, output.frames, output.audio, output.latents)
    made = next((kind for kind in kinds if kind is not None), ())
    return int(made.shape[0]) if hasattr(made, "shape") else len(made)
