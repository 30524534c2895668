"""Whether an engine can do its work: its loop turns, and every stage has a worker that lives.

Pure: time and what workers said of themselves are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from omni_engine.protocol.plans import HEARTBEAT_INTERVAL_S
from omni_engine.stages.config import EngineArgs

SILENCE_S = 3 * HEARTBEAT_INTERVAL_S
"""An idle worker that was not heard of for so long does not count as answering."""

STUCK_S = 5.0
"""The loop turns several times a second; one that has not for so long is stuck."""

_WINDOW_S = 60.0


class LoopHealth:
    """What the engine's loop did: how often it turned, when last, and how long a turn took.

    Args:
        now: seconds, monotonic.
    """

    def __init__(self, now: float) -> None:
        self.turns = 0
        self._last_end = now
        self._slowest: deque[tuple[int, float]] = deque()  # (second, seconds of its slowest turn)

    def note_turn(self, started: float, ended: float) -> None:
        """Take note of a turn.

        Args:
            started: when the loop began to work, its wait for messages over: seconds, monotonic.
            ended: when it was done.
        """
        self.turns += 1
        self._last_end = ended
        second, took_s = int(ended), ended - started
        if self._slowest and self._slowest[-1][0] == second:
            took_s = max(took_s, self._slowest.pop()[1])
        self._slowest.append((second, took_s))
        while self._slowest[0][0] < second - _WINDOW_S:
            self._slowest.popleft()

    def describe(self, now: float) -> dict[str, Any]:
        """Return the figures for status; ``slowest_turn_ms`` is of the last minute."""
        recent = (took_s for second, took_s in self._slowest if second >= int(now - _WINDOW_S))
        return {
            "loop_turns": self.turns,
            "last_turn_ms_ago": (now - self._last_end) * 1000,
            "slowest_turn_ms": max(recent, default=0.0) * 1000,
        }

    def reasons(self, now: float) -> list[str]:
        """Return why the loop is not healthy; nothing if it is."""
        stuck_s = now - self._last_end
        if stuck_s <= STUCK_S:
            return []
        return [f"the engine's loop has not turned for {stuck_s:.1f} s"]


def stage_health(
    name: str, state: str, workers: Sequence[Mapping[str, Any]], limits: EngineArgs
) -> dict[str, Any]:
    """Return whether a stage has a worker that works, or answers while it has nothing to do.

    Args:
        name: the model name that clients use.
        state: of the stage, as in status.
        workers: as in status.
        limits: the stage's settings.

    Returns:
        ``state`` ("healthy", "starting" while its model loads for the first time, or "unhealthy")
        and ``reasons``, empty for a healthy one.
    """
    lacks = [lack for worker in workers if (lack := _lack(worker, limits)) is not None]
    if len(lacks) < len(workers):
        return {"state": "healthy", "reasons": []}
    verdict = "starting" if state == "loading" else "unhealthy"
    head = "is starting" if state == "loading" else "has no worker that can work"
    return {"state": verdict, "reasons": [f"model {name} {head}: {'; '.join(lacks) or state}"]}


def describe_health(
    stages: Sequence[Mapping[str, Any]], loop: LoopHealth, now: float, *, stopping: bool = False
) -> dict[str, Any]:
    """Return the engine's health for status.

    Args:
        stages: as ``describe_stage`` returns them.
        loop: the engine's loop.
        now: seconds, monotonic.
        stopping: whether the engine takes no more requests.

    Returns:
        ``healthy``, ``reasons`` (why it is not) and the loop's figures.
    """
    reasons = ["the engine is stopping"] if stopping else []
    reasons += loop.reasons(now)
    reasons += [reason for stage in stages for reason in stage["health"]["reasons"]]
    return {"healthy": not reasons, "reasons": reasons, **loop.describe(now)}


def _lack(worker: Mapping[str, Any], limits: EngineArgs) -> str | None:
    """Return what keeps a worker from work, or None."""
    worker_id, state, error = worker["worker_id"], worker["state"], worker["error"]
    silent_s = worker["since_seen_ms"] / 1000
    why = "" if error is None else f" ({error['message']})"
    if state not in ("idle", "busy") or error is not None:
        return f"{worker_id} is {state}{_next_start(worker)}{why}"
    if state == "idle":
        return None if silent_s <= SILENCE_S else f"{worker_id} is silent for {silent_s:.1f} s"
    if silent_s > limits.worker_heartbeat_timeout_s:
        return f"{worker_id} is silent for {silent_s:.1f} s"
    working_s = silent_s + worker["working_ms"] / 1000
    if working_s > limits.worker_stall_timeout_s:
        return f"{worker_id} has made no progress for {working_s:.1f} s"
    return None


def _next_start(worker: Mapping[str, Any]) -> str:
    if worker["next_start_s"] is None:
        return ""
    return f", to be started in {worker['next_start_s']:.1f} s"
