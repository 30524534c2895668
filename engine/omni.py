"""The Python API: an engine of one's own in a process beside, and the client to use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omni_engine.engine.async_client import AsyncOmniClient, AsyncRequestHandle
from omni_engine.engine.client import OmniClient, OnOutput, OnProgress, Params
from omni_engine.engine.curve import owner_keys
from omni_engine.engine.engine_watch import EngineWatch
from omni_engine.engine.handles import RequestEvent, RequestHandle
from omni_engine.engine.lora_calls import AsyncLoRACalls, LoRACalls
from omni_engine.engine.process import EngineProcess
from omni_engine.engine.prompts import Prompt
from omni_engine.engine.status_calls import AsyncStatusCalls, StatusCalls
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.settings import Settings, load_settings

_WATCH_ENDS_S = 5.0


def _settings(model: str | None, config: str | Path | None, options: dict[str, Any]) -> Settings:
    return load_settings(
        config_path=None if config is None else Path(config),
        model=model,
        overrides=options,
        origin="constructor",
    )


class Omni(StatusCalls, LoRACalls):
    """An engine in a process of its own, for as long as this object lives.

    Use it as a context manager, or call ``close``. If the process ends before, everything pending,
    and every later call, ends with ``EngineClosedError`` at once.

    Args:
        model: "bundled", a hub id or a local folder; the bundled model when neither ``model`` nor
            ``config`` is given.
        config: a stage configuration file.
        startup_timeout_s: seconds within which all workers must be ready.
        options: any setting of a stage: ``max_num_seqs``, ``step_execution``, ``devices``,
            ``replicas``, ``lora_modules``, ``dtype``…

    Raises:
        ConfigError: if a setting is wrong, naming it.
        ModelLoadError: if the model can't be loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        startup_timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        self.settings = _settings(model, config, options)
        self._engine = EngineProcess(self.settings.config)
        try:
            self.client = OmniClient(
                self._engine.endpoint,
                connect_timeout_s=30,
                keys=owner_keys(self.settings.config.curve),
            )
            self._watch = EngineWatch(self._engine.pid, self.client.engine_ended)
            self.client.wait_until_ready(startup_timeout_s)
        except BaseException:  # whatever it is: clean up, then pass it on
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where the engine listens; further clients may connect."""
        return self._engine.endpoint

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        on_output: OnOutput | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[DiffusionOutput]:
        """Run prompts, each as a request of its own; see ``OmniClient.generate``."""
        return self.client.generate(
            prompts,
            sampling_params,
            model=model,
            timeout_s=timeout_s,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            on_output=on_output,
            on_progress=on_progress,
        )

    def submit(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        detached: bool = False,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        timeout_s: float | None = None,
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> RequestHandle:
        """Submit one request to follow; see ``OmniClient.submit``."""
        return self.client.submit(
            prompt,
            sampling_params,
            request_id=request_id,
            model=model,
            detached=detached,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            timeout_s=timeout_s,
            on_event=on_event,
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        self.client.abort(request_ids)

    def close(self) -> None:
        """Stop the engine and its workers; returns when they are gone."""
        if hasattr(self, "client"):
            self.client.close()
        self._engine.close()
        if hasattr(self, "_watch"):
            self._watch.join(_WATCH_ENDS_S)

    def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        return self.client._call(kind, timeout_s, **body)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncOmni(AsyncStatusCalls, AsyncLoRACalls):
    """``Omni`` for asyncio programs: ``async with AsyncOmni(model) as omni``.

    Args and errors are those of ``Omni``; the engine starts on entry.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | Path | None = None,
        startup_timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        self.settings = _settings(model, config, options)
        self._startup_timeout_s = startup_timeout_s
        self._engine: EngineProcess | None = None
        self._client: AsyncOmniClient | None = None
        self._watch: EngineWatch | None = None

    @property
    def client(self) -> AsyncOmniClient:
        """The client connected to the engine.

        Raises:
            ValueError: before the engine was started.
        """
        if self._client is None:
            raise ValueError("call start() first, or use `async with`")
        return self._client

    async def start(self) -> Self:
        """Start the engine and wait until its workers are ready."""
        self._engine = await asyncio.to_thread(EngineProcess, self.settings.config)
        try:
            self._client = await AsyncOmniClient(
                self._engine.endpoint,
                connect_timeout_s=30,
                keys=owner_keys(self.settings.config.curve),
            ).connect()
            self._watch = EngineWatch(self._engine.pid, self._client.engine_ended)
            await self._client.wait_until_ready(self._startup_timeout_s)
        except BaseException:  # whatever it is: clean up, then pass it on
            await self.close()
            raise
        return self

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: OmniDiffusionSamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        detached: bool = False,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncRequestHandle:
        """Submit one request to follow; see ``AsyncOmniClient.submit``."""
        return await self.client.submit(
            prompt,
            sampling_params,
            request_id=request_id,
            model=model,
            detached=detached,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            timeout_s=timeout_s,
        )

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params = None,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        preview_every: int | None = None,
        preview_max_side: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[DiffusionOutput]:
        """Run prompts, each as a request of its own; see ``AsyncOmniClient.generate``."""
        return await self.client.generate(
            prompts,
            sampling_params,
            model=model,
            timeout_s=timeout_s,
            preview_every=preview_every,
            preview_max_side=preview_max_side,
            on_progress=on_progress,
        )

    @property
    def endpoint(self) -> str:
        """Where the engine listens; further clients may connect."""
        return self.client.endpoint

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to end requests; unknown ids are ignored."""
        await self.client.abort(request_ids)

    async def close(self) -> None:
        """Stop the engine and its workers; returns when they are gone."""
        if self._client is not None:
            await self._client.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
        if self._watch is not None:
            await asyncio.to_thread(self._watch.join, _WATCH_ENDS_S)

    async def _call(self, kind: str, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        return await self.client._call(kind, timeout_s, **body)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
