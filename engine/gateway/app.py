"""The gateway's application: its routers, its way to the engine, its end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

import omni_engine
from omni_engine.engine.async_client import AsyncOmniClient
from omni_engine.engine.gateway import (
    docs_page,
    edits,
    errors,
    files,
    guards,
    health,
    images,
    live,
    loras,
    metrics,
    models,
    openapi,
    page,
    uploads,
    videos,
)
from omni_engine.engine.gateway.catalog import Catalog
from omni_engine.engine.gateway.encoders import EncoderPool
from omni_engine.engine.gateway.settings import GatewaySettings
from omni_engine.engine.gateway.state import Gateway
from omni_engine.engine.private_directory import private_directory

_CONNECT_S = 60.0
"""How long the engine may take to answer at first; it is busy when workers start."""

ROUTERS = (
    health.router,
    metrics.router,
    models.router,
    images.router,
    edits.router,
    files.router,
    loras.router,
    videos.router,
    live.router,
    page.router,
    docs_page.router,
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """Return the application; it connects to the engine when it starts."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        observe = app.state.http_figures.encode_seconds.observe
        with (
            private_directory() as directory,
            contextlib.closing(EncoderPool(settings.http.encoder_threads, observe)) as encoders,
        ):
            async with AsyncOmniClient(
                settings.endpoint, connect_timeout_s=_CONNECT_S, keys=settings.keys
            ) as client:
                app.state.gateway = Gateway(
                    client, Catalog(client), settings.http, settings.limits, encoders, directory
                )
                yield

    app = FastAPI(
        title="omni-engine",
        summary="Pictures and videos from diffusion models, as OpenAI's clients ask for them.",
        version=omni_engine.__version__,
        docs_url=None,  # FastAPI's own page loads from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    errors.install(app)
    openapi.install(app)
    uploads.install(app, settings.limits)
    guards.install(app, settings.http)
    metrics.install(app)
    for router in ROUTERS:
        app.include_router(router)
    return app
