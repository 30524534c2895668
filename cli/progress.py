"""Shows how far requests are, on standard error."""

from __future__ import annotations

from collections import Counter

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from omni_engine.cli.display import clean, console
from omni_engine.engine.handles import RequestEvent

_SHOWN_STATES = ("running", "waiting", "submitted")
_PROMPT_CHARS = 32
_MOST_BARS = 16
"""Bars of requests that are shown at once; all others are in the counts."""


class RequestProgress:
    """A bar for all pictures with the requests' states, and one per running request for its steps.

    Where standard error is no terminal it is one line that says that the requests were submitted.

    Args:
        pictures: how many pictures are wanted in all.
    """

    def __init__(self, pictures: int) -> None:
        self._console = output = console(stderr=True)
        columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn(), TextColumn("{task.description}"))  # fmt: skip
        self._progress = Progress(*columns, console=output, disable=not output.is_terminal,
                                  transient=True, redirect_stdout=False)  # fmt: skip
        self._task = self._progress.add_task("", total=pictures, what="pictures")
        self._states: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> RequestProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def submitted(self, requests: int) -> None:
        """Say that requests are on their way."""
        if not self._console.is_terminal:
            self._console.print(f"submitted {requests} request{'s' if requests != 1 else ''}")

    def note(self, event: RequestEvent, prompt: str) -> None:
        """Show a request's new state, or its steps."""
        if event.step is not None:
            self._show_steps(event, prompt)
            return
        self._states[event.request_id] = event.status
        counts = Counter(self._states.values())
        shown = [f"{counts[state]} {state}" for state in _SHOWN_STATES if counts[state]]
        self._progress.update(self._task, description=", ".join(shown))
        bar = self._bars.pop(event.request_id, None)
        if bar is not None:
            self._progress.remove_task(bar)

    def advance(self, pictures: int) -> None:
        """Show that more pictures are finished."""
        self._progress.advance(self._task, pictures)

    def refresh(self) -> None:
        """Draw what has changed, now."""
        self._progress.refresh()

    def _show_steps(self, event: RequestEvent, prompt: str) -> None:
        bar = self._bars.get(event.request_id)
        if bar is None:
            if len(self._bars) >= _MOST_BARS:
                return
            bar = self._progress.add_task(_shortened(prompt), total=None, what="steps")
            self._bars[event.request_id] = bar
        self._progress.update(bar, completed=event.step, total=event.num_steps)


def _shortened(prompt: str) -> str:
    text = clean(prompt.replace("\n", " "))
    return text if len(text) <= _PROMPT_CHARS else text[: _PROMPT_CHARS - 1] + "…"
