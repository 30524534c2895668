"""``/metrics``: the engine's figures and the gateway's own, for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry, disable_created_metrics, exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from omni_engine.engine.gateway.busy_ratios import BusyRatios
from omni_engine.engine.gateway.http_figures import HttpFigures, HttpMeter
from omni_engine.engine.gateway.metric_families import families_of
from omni_engine.engine.gateway.state import Gateway, gateway_of
from omni_engine.protocol.errors import OmniError

_ENGINE_TIMEOUT_S = 3.0
"""How long the engine may take to answer a scrape, which has 10 s by default."""

_OPENMETRICS = "application/openmetrics-text"
_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["operations"])


def install(app: FastAPI) -> None:
    """Count the requests that reach an application; everything else is inside."""
    # Times of creation would double the series, and nobody asks for them.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    app.state.http_figures = HttpFigures()
    app.state.busy_ratios = BusyRatios()
    app.add_middleware(HttpMeter, figures=app.state.http_figures)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
async def metrics(request: Request, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """Tell figures as text, in Prometheus' format or OpenMetrics', as is accepted. Needs no key."""
    state = request.app.state
    told = await _figures_of_engine(gateway)
    ratios = {} if told is None else state.busy_ratios.note(told, time.monotonic())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_EngineCollector(told, ratios))
    for collector in state.http_figures.collectors():
        registry.register(collector)
    if _OPENMETRICS in request.headers.get("accept", ""):
        text = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return Response(text, headers={"Content-Type": openmetrics.CONTENT_TYPE_LATEST})
    text = exposition.generate_latest(registry)
    return Response(text, headers={"Content-Type": _PROMETHEUS_TEXT})


async def _figures_of_engine(gateway: Gateway) -> dict[str, Any] | None:
    """Return the engine's figures; None if it does not answer."""
    try:
        return await asyncio.wait_for(gateway.client.metrics(), _ENGINE_TIMEOUT_S)
    except (OmniError, TimeoutError):
        return None


class _EngineCollector(Collector):
    def __init__(
        self, told: dict[str, Any] | None, ratios: Mapping[tuple[str, str], float]
    ) -> None:
        self._told, self._ratios = told, ratios

    def collect(self) -> Iterable[Metric]:
        return families_of(self._told, self._ratios)
