"""An engine's timeline in the trace-event format of Chrome and Perfetto.

A stage is a process, a worker a thread, a batch or tick a complete event, waiting and running
requests are counters. Times are microseconds of the engine's clock. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omni_engine.cli.strip import adapters_label


class TraceEvents:
    """Gathers events from answers to ``OmniClient.timeline``, given in order.

    Attributes:
        answers: given so far.
        boxes: batches and ticks in them.
        missed: those that the engine did not have any more.
        next: what to ask the engine for next.
    """

    def __init__(self) -> None:
        self.next = 0
        self.answers = self.boxes = self.missed = 0
        self._events: list[dict[str, Any]] = []
        self._names: list[dict[str, Any]] = []
        self._stages: dict[str, int] = {}
        self._workers: dict[tuple[str, str], int] = {}
        self._last: Mapping[str, Any] = {"now_s": 0.0, "wall_s": 0.0, "running": []}

    def add(self, timeline: Mapping[str, Any]) -> None:
        """Take in one answer of the engine."""
        self._last, self.next = timeline, timeline["next"]
        self.answers += 1
        self.missed += timeline["missed"]
        now_us = _us(timeline["now_s"])
        for stage in timeline["stages"]:
            process = self._process_of(stage["name"])
            for worker in stage["workers"]:
                self._thread_of(stage["name"], worker["worker_id"])
            counts = {"waiting": stage["waiting"], "running": stage["running"]}
            self._events.append(
                {"ph": "C", "name": "requests", "pid": process, "tid": 0, "ts": now_us,
                 "args": counts}
            )  # fmt: skip
        self._events += [self._complete(box, box["end_s"]) for box in timeline["boxes"]]
        self.boxes += len(timeline["boxes"])

    def finished(self) -> dict[str, Any]:
        """Return the whole trace; batches that still run reach to the last answer."""
        now_s = self._last["now_s"]
        unfinished = [self._complete(box, now_s) for box in self._last["running"]]
        for event in unfinished:
            event["args"]["unfinished"] = True
        return {
            "traceEvents": [*self._names, *self._events, *unfinished],
            "displayTimeUnit": "ms",
            "otherData": {
                "unix_time_of_ts_0": self._last["wall_s"] - now_s,
                "boxes": self.boxes,
                "missed": self.missed,
            },
        }

    def _complete(self, box: Mapping[str, Any], end_s: float) -> dict[str, Any]:
        stage, start_us = box["stage"], _us(box["start_s"])
        return {
            "ph": "X",
            "name": adapters_label(box["adapters"]),
            "cat": box["kind"],
            "pid": self._process_of(stage),
            "tid": self._thread_of(stage, box["worker_id"]),
            "ts": start_us,
            "dur": max(0.0, round(_us(end_s) - start_us, 3)),
            "args": {
                "kind": box["kind"],
                "requests": box["requests"],
                "request_ids": box["request_ids"],
                "adapters": [f"{one['name']}:{one['scale']:g}" for one in box["adapters"]],
                "seq": box["seq"],
            },
        }

    def _process_of(self, stage: str) -> int:
        if stage not in self._stages:
            number = self._stages[stage] = len(self._stages) + 1
            self._names.append(_metadata("process_name", number, 0, f"model {stage}"))
        return self._stages[stage]

    def _thread_of(self, stage: str, worker_id: str) -> int:
        key = (stage, worker_id)
        if key not in self._workers:
            number = self._workers[key] = len(self._workers) + 1
            self._names.append(_metadata("thread_name", self._process_of(stage), number, worker_id))
        return self._workers[key]


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
