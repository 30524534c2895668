"""Runs the requests of ``generate``: all submitted at once, files written as each ends."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from omni_engine.cli.pictures import PictureFolder
from omni_engine.cli.progress import RequestProgress
from omni_engine.engine.connection import Connection
from omni_engine.engine.curve import ClientKeys
from omni_engine.engine.handles import RequestEvent
from omni_engine.engine.prompts import build_requests
from omni_engine.protocol.errors import OmniError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams


@dataclass
class Item:
    """One prompt and what became of it.

    Attributes:
        number: counted from 1, in the order given.
        prompt: as given.
        output: the engine's answer; None before it came.
        files: one per picture.
        previews: steps and files of its previews.
        error: why there are no pictures, or not all.
    """

    number: int
    prompt: str
    output: DiffusionOutput | None = None
    files: list[Path] = field(default_factory=list)
    previews: list[tuple[int, Path]] = field(default_factory=list)
    error: OmniError | None = None


@dataclass(frozen=True)
class Previews:
    """Where pictures of unfinished requests go, and how many steps lie between two."""

    folder: PictureFolder
    every: int


def generate_files(
    endpoint: str,
    keys: ClientKeys | None,
    prompts: Sequence[str],
    params: OmniDiffusionSamplingParams,
    model: str | None,
    folder: PictureFolder,
    previews: Previews | None = None,
) -> list[Item]:
    """Submit one request per prompt, write every picture as it comes, and return all items.

    Args:
        endpoint: where the engine listens.
        keys: for an engine that encrypts.
        prompts: one request each.
        params: for all of them.
        model: a served model's name; None for the engine's first.
        folder: takes the pictures.
        previews: takes those of unfinished requests; None asks for none.

    Raises:
        OmniError: if no engine answers.
    """
    items = [Item(number, prompt) for number, prompt in enumerate(prompts, 1)]
    each = params.num_outputs_per_prompt or 1
    live: dict[str, tuple[Item, DiffusionRequest]] = {}
    every = None if previews is None else previews.every
    built = build_requests(prompts, params, model=model, preview_every=every)
    for item, request in zip(items, built, strict=True):
        if isinstance(request, OmniError):
            item.error = request
        else:
            live[request.request_id] = (item, request)
    # Leaving the connection says goodbye, on which the engine aborts what has not ended.
    with (
        closing(Connection(endpoint, keys=keys)) as connection,
        RequestProgress(each * len(items)) as progress,
    ):
        progress.advance(each * (len(items) - len(live)))
        for item in _ended(connection, live, progress, previews):
            _write(item, folder)
            if previews is not None:
                _name_previews(item, previews.folder)
            progress.advance(each)
    return items


def _ended(
    connection: Connection,
    live: dict[str, tuple[Item, DiffusionRequest]],
    progress: RequestProgress,
    previews: Previews | None,
) -> Iterator[Item]:
    """Submit the requests, show and save what is heard of them, and yield each as it ends."""
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    handles = connection.submit(
        [request for _, request in live.values()], events.put, wait_for_room=True
    )
    progress.submitted(len(handles))
    open_handles = {handle.request_id: handle for handle in handles}
    while open_handles:
        event = events.get()
        item, _ = live[event.request_id]
        progress.note(event, item.prompt)
        if previews is not None and event.preview is not None:
            _write_preview(item, event, previews.folder)
        if event.status.startswith("finished_"):
            item.output = open_handles.pop(event.request_id).result(0)
            item.error = item.output.error or item.error
            yield item


def _write(item: Item, folder: PictureFolder) -> None:
    if item.output is None or item.output.error is not None:
        return
    try:
        item.files = folder.write(item.number, item.prompt, item.output)
    except OmniError as error:
        item.error = error


def _write_preview(item: Item, event: RequestEvent, folder: PictureFolder) -> None:
    step = event.step or 0
    try:
        path = folder.write_preview(item.number, item.prompt, step, event.preview)
        item.previews.append((step, path))
    except OmniError as error:
        item.error = error  # the picture itself is written all the same


def _name_previews(item: Item, folder: PictureFolder) -> None:
    """Name the previews after the request's first picture, which is what they show."""
    if not item.files:
        return
    try:
        item.previews = [
            (step, folder.rename_preview(path, step, item.files[0])) for step, path in item.previews
        ]
    except OmniError as error:
        item.error = error
