"""The engine's log of requests: one line when a request ends, with what it took.

Prompts stay out of it, and so do texts that may quote one: what a model's code raised.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

from omni_engine.engine.live_request import LiveRequest
from omni_engine.protocol.errors import ModelError, OmniError
from omni_engine.protocol.outputs import DiffusionOutput

logger = logging.getLogger(__name__)

_REFUSALS_PER_SPAN, _SPAN_S = 10, 10.0
"""Whoever is refused all the time can't fill the log."""

_PLAIN = re.compile(r"[\w.:/@+-]+")
"""Words that need no quotes: nothing in them looks like another part of a line."""


class RequestLog:
    """Logs the life of one stage's requests: accepted and started at DEBUG, ended at INFO.

    Args:
        model: the model name that clients use.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def accepted(self, live: LiveRequest, client: str | None = None) -> None:
        """Log that a request was taken in.

        Args:
            live: the request.
            client: who sent it, in printable characters; None if that is not known.
        """
        if logger.isEnabledFor(logging.DEBUG):
            text = f"request {_word(live.request_id)} accepted: model {_word(self._model)}"
            logger.debug("%s", text, extra=self._fields("request_accepted", live, client))

    def started(self, live: LiveRequest, worker_id: str, now: float) -> None:
        """Log that a request was sent to a worker.

        Args:
            live: the request, noted as started.
            worker_id: where it runs.
            now: seconds, monotonic.
        """
        if logger.isEnabledFor(logging.DEBUG):
            queue_ms = (now - live.arrival) * 1000
            text = f"request {_word(live.request_id)} started on {worker_id}"
            fields = {"worker_id": worker_id, "queue_ms": round(queue_ms, 3), "tries": _tries(live)}
            extra = self._fields("request_started", live, None) | fields
            logger.debug("%s after %.1f ms", text, queue_ms, extra=extra)

    def ended(
        self,
        live: LiveRequest,
        output: DiffusionOutput,
        now: float,
        *,
        worker_id: str | None = None,
        client: str | None = None,
    ) -> None:
        """Log how a request ended.

        Args:
            live: the request.
            output: what it ended with.
            now: seconds, monotonic.
            worker_id: where it ran last; None: what the output says.
            client: who sent it, in printable characters; None if that is not known.
        """
        if not logger.isEnabledFor(logging.INFO):
            return
        fields = self._fields("request_ended", live, client)
        fields |= _outcome(output) | _times_ms(live, now) | _work(live, output, worker_id)
        logger.info("%s", _sentence(fields), extra=fields)

    def _fields(self, event: str, live: LiveRequest, client: str | None) -> dict[str, Any]:
        fields = {"event": event, "request_id": live.request_id, "model": self._model}
        return fields if client is None else fields | {"client": client}


class RefusalLog:
    """Logs refused requests at INFO, at most ten in ten seconds; the next line counts the rest."""

    def __init__(self) -> None:
        self._span_start = -_SPAN_S
        self._logged = self._passed_over = 0

    def refused(self, error: OmniError, request_id: str | None, client: str, now: float) -> None:
        """Log that a request was not taken in.

        Args:
            error: why.
            request_id: its id, if it had one that is acceptable.
            client: who sent it, in printable characters.
            now: seconds, monotonic.
        """
        if now - self._span_start >= _SPAN_S:
            self._span_start, self._logged = now, 0
        if self._logged >= _REFUSALS_PER_SPAN:
            self._passed_over += 1
            return
        passed_over, self._passed_over = self._passed_over, 0
        self._logged += 1
        fields = {
            "event": "request_refused",
            "request_id": request_id,
            "error": error.code,
            "error_field": error.field,
            "client": client,
            "not_logged": passed_over,
        }
        name = "without an id" if request_id is None else _word(request_id)
        about = "" if error.field is None else f", {_word(error.field)}"
        more = f"; {passed_over} more before it" if passed_over else ""
        logger.info(
            "%s", f"request {name} of client {client} refused ({error.code}{about}){more}",
            extra=fields,
        )  # fmt: skip


def _outcome(output: DiffusionOutput) -> dict[str, Any]:
    error = output.error
    if error is None:
        return {"outcome": "aborted" if output.aborted else "completed"}
    fields = {"outcome": "aborted" if output.aborted else "failed", "error": error.code}
    if error.field is not None:
        fields["error_field"] = error.field
    if not _may_quote_prompt(error):
        fields["error_message"] = error.message
    return fields


def _may_quote_prompt(error: OmniError) -> bool:
    """Whether a model's code chose the words; they are left to DEBUG."""
    chosen_by_model = isinstance(error, ModelError) or type(error) is OmniError
    return chosen_by_model and not logger.isEnabledFor(logging.DEBUG)


def _times_ms(live: LiveRequest, now: float) -> dict[str, Any]:
    """Return the request's times as the engine saw them: queue and run add up to the total."""
    started = now if live.started is None else live.started
    return {
        "queue_ms": round((started - live.arrival) * 1000, 3),
        "run_ms": round((now - started) * 1000, 3),
        "total_ms": round((now - live.arrival) * 1000, 3),
    }


def _work(live: LiveRequest, output: DiffusionOutput, worker_id: str | None) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "steps": metrics.num_steps or live.step_index,
        "mean_batch_size": round(metrics.mean_batch_size, 3),
        "worker_id": worker_id or metrics.worker or None,
        "tries": _tries(live),
        "seed": output.seed,
        "loras": [f"{lora.name}:{lora.scale:g}" for lora in output.applied_loras],
    }


def _tries(live: LiveRequest) -> int:
    """Return how often a request was started."""
    return (live.first_death is not None) + (live.started is not None)


def _sentence(fields: dict[str, Any]) -> str:
    """Return an ended request's fields as a line for people."""
    parts = [
        f"model {_word(fields['model'])}",
        f"{fields['steps']} steps",
        f"mean batch {fields['mean_batch_size']:.2f}",
        f"worker {fields['worker_id'] or '-'}",
        f"tries {fields['tries']}",
        f"seed {'-' if fields['seed'] is None else fields['seed']}",
        f"loras {','.join(map(_word, fields['loras'])) or '-'}",
        f"client {fields.get('client', '-')}",
    ]
    reason = f" ({fields['error']})" if "error" in fields else ""
    times = "queued {queue_ms:.1f}, ran {run_ms:.1f}".format_map(fields)
    head = f"request {_word(fields['request_id'])} {fields['outcome']}{reason}"
    message = f"; {fields['error_message']}" if "error_message" in fields else ""
    return f"{head} in {fields['total_ms']:.1f} ms ({times}): {', '.join(parts)}{message}"


def _word(text: str) -> str:
    """Return a text that clients choose so that its end can't be mistaken."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
