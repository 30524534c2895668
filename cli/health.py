"""Health for people and for probes: ``omni-engine status --check``, and what status shows of it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.connecting import KeyOptions, connected
from omni_engine.cli.display import print_json, print_line
from omni_engine.cli.tables import duration
from omni_engine.protocol.errors import QueueFullError, RequestTimeoutError

CHECK_TIMEOUT_S = 3.5
"""How long an engine may take to answer a check; the command's own start comes on top."""

_TAIL_LINES = 10


def check(address: str, keys: KeyOptions, *, as_json: bool) -> None:
    """Print whether a running engine is healthy, and why not; exit code 1 if it is not.

    Raises:
        OmniError: if no engine answers, or not in time.
    """
    try:
        health = _status_in_time(address, keys)["health"]
    except QueueFullError as error:  # it answers, and is as busy as it may be
        health = {"healthy": True, "reasons": [], "note": error.message}
    if as_json:
        print_json(health)
    else:
        for reason in health["reasons"]:
            print_line(f"unhealthy: {reason}")
        if health["healthy"]:
            print_line("healthy" + (f" ({health['note']})" if "note" in health else ""))
    raise typer.Exit(0 if health["healthy"] else 1)


def rows(health: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what status shows of an engine's health."""
    if health is None:
        return {}
    verdict = "healthy" if health["healthy"] else f"not healthy: {'; '.join(health['reasons'])}"
    slowest_ms = health["slowest_turn_ms"]
    turns = f"{health['loop_turns']} turns, the slowest of the last minute {slowest_ms:.1f} ms"
    return {"health": verdict, "loop": turns}


def tables(stage: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield title and rows, by worker id, of what there is to say of a stage's workers.

    That is how each died last and what it wrote then, and what it learnt when memory ran out.
    """
    workers, name = stage["workers"], stage["name"]
    if died := {w["worker_id"]: _last_death(w["deaths"][-1]) for w in workers if w["deaths"]}:
        yield f"last deaths of workers of {name}", died
    if caps := {w["worker_id"]: _caps(w["memory_caps"]) for w in workers if w["memory_caps"]}:
        yield f"what fits into the memory of workers of {name}", caps


def state_of(worker: Mapping[str, Any]) -> str:
    """Return a worker's state, with when it will be started again."""
    if worker["next_start_s"] is None:
        return str(worker["state"])
    return f"{worker['state']}, again in {duration(worker['next_start_s'])}"


def _last_death(death: Mapping[str, Any]) -> str:
    head = f"{duration(death['ago_s'])} ago: {death['error']['message']}"
    tail = [f"  {_for_people(line)}" for line in death["stderr_tail"][-_TAIL_LINES:]]
    return "\n".join([head, *tail])


def _for_people(line: str) -> str:
    """Return a line that a worker wrote; a record in JSON as a line for people."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(line)
        text = f"{record['level']} {record['logger']}: {record['message']}"
        *_, last = ["", *str(record.get("exception", "")).splitlines()]
        return f"{text}: {last}" if last else text
    return line


def _caps(caps: Mapping[str, int]) -> str:
    return "; ".join(f"{kind}: at most {rows} rows" for kind, rows in sorted(caps.items()))


def _status_in_time(address: str, keys: KeyOptions) -> dict[str, Any]:
    """Return the engine's status; asked in a thread, since connecting may take longer than that."""
    interrupts.release()
    answer: Future[dict[str, Any]] = Future()

    def ask() -> None:
        try:
            with connected(address, keys) as client:
                found = client.status()
            answer.set_result(found)
        except Exception as error:  # noqa: BLE001  # boundary: the thread; the main one raises it
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(CHECK_TIMEOUT_S)
    except FutureTimeoutError:
        message = f"the engine did not answer within {CHECK_TIMEOUT_S:g} s"
        raise RequestTimeoutError(message) from None
