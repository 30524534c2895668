"""Runs the requests of ``generate``: all submitted at once, files written as each ends."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from omni_engine.cli.display import console
from omni_engine.cli.pictures import PictureFolder
from omni_engine.engine.connection import Connection
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.prompts import build_requests
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams

_SHOWN_STATES = ("running", "waiting", "submitted")


@dataclass
class Item:
    """One prompt and what became of it.

    Attributes:
        number: counted from 1, in the order given.
        prompt: as given.
        output: the engine's answer; None before it came.
        files: one per picture.
        error: why there are no pictures, or not all.
    """

    number: int
    prompt: str
    output: DiffusionOutput | None = None
    files: list[Path] = field(default_factory=list)
    error: OmniError | None = None


class RequestProgress:
    """A bar on standard error: finished pictures of all, and how many requests are in which state.

    Where standard error is no terminal it is one line that says that the requests were submitted.

    Args:
        pictures: how many pictures are wanted in all.
    """

    def __init__(self, pictures: int) -> None:
        self._console = output = console(stderr=True)
        columns = (TextColumn("pictures"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("{task.description}"))  # fmt: skip
        self._progress = Progress(*columns, console=output, disable=not output.is_terminal,
                                  transient=True, redirect_stdout=False)  # fmt: skip
        self._task = self._progress.add_task("", total=pictures)
        self._states: dict[str, str] = {}

    def __enter__(self) -> RequestProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def submitted(self, requests: int) -> None:
        """Say that requests are on their way."""
        if not self._console.is_terminal:
            self._console.print(f"submitted {requests} request{'s' if requests != 1 else ''}")

    def note(self, request_id: str, state: str) -> None:
        """Show a request's new state."""
        self._states[request_id] = state
        counts = Counter(self._states.values())
        shown = [f"{counts[state]} {state}" for state in _SHOWN_STATES if counts[state]]
        self._progress.update(self._task, description=", ".join(shown))

    def advance(self, pictures: int) -> None:
        """Show that more pictures are finished."""
        self._progress.advance(self._task, pictures)


def generate_files(
    endpoint: str,
    prompts: Sequence[str],
    params: OmniDiffusionSamplingParams,
    model: str | None,
    folder: PictureFolder,
) -> list[Item]:
    """Submit one request per prompt, write every picture as it comes, and return all items.

    Args:
        endpoint: where the engine listens.
        prompts: one request each.
        params: for all of them.
        model: a served model's name; None for the engine's first.
        folder: takes the pictures.

    Raises:
        OmniError: if no engine answers.
    """
    items = [Item(number, prompt) for number, prompt in enumerate(prompts, 1)]
    each = params.num_outputs_per_prompt or 1
    live: dict[str, tuple[Item, DiffusionRequest]] = {}
    for item, request in zip(items, build_requests(prompts, params, model=model), strict=True):
        if isinstance(request, OmniError):
            item.error = request
        else:
            live[request.request_id] = (item, request)
    # Leaving the connection says goodbye, on which the engine aborts what has not ended.
    with (
        closing(Connection(endpoint)) as connection,
        RequestProgress(each * len(items)) as progress,
    ):
        progress.advance(each * (len(items) - len(live)))
        _follow(connection, live, folder, progress, each)
    return items


def _follow(
    connection: Connection,
    live: dict[str, tuple[Item, DiffusionRequest]],
    folder: PictureFolder,
    progress: RequestProgress,
    each: int,
) -> None:
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    handles = connection.submit([request for _, request in live.values()], events.put)
    progress.submitted(len(handles))
    open_handles = {handle.request_id: handle for handle in handles}
    while open_handles:
        event = events.get()
        progress.note(event.request_id, event.status)
        if event.status.startswith("finished_"):
            _settle(live[event.request_id][0], open_handles.pop(event.request_id), folder)
            progress.advance(each)


def _settle(item: Item, handle: RequestHandle, folder: PictureFolder) -> None:
    item.output = output = handle.result(0)
    item.error = output.error
    if item.error is None:
        try:
            item.files = folder.write(item.number, item.prompt, output)
        except OmniError as error:
            item.error = error
