"""``/health`` and ``/ready``: for load balancers and orchestrators; no key is needed."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from omni_engine.engine.gateway.state import Gateway, gateway_of

router = APIRouter(tags=["operations"])

Health = Literal["healthy", "starting", "unhealthy"]
State = Literal["loading", "ready", "degraded", "down"]


class HealthAnswer(BaseModel):
    """Whether the engine lives."""

    status: Literal["ok", "starting", "unhealthy"]
    reason: str | None
    models: dict[str, Health]


class ReadyAnswer(BaseModel):
    """Whether requests are served at once."""

    ready: bool
    models: dict[str, State]


@router.get(
    "/health",
    responses={503: {"model": HealthAnswer, "description": "It does not work."}},
)
async def health(
    response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> HealthAnswer:
    """Tell whether the engine lives.

    It does if it answers, and every model has a worker that makes progress, or loads for the
    first time.
    """
    found = await gateway.pulse.feel()
    response.status_code = 503 if found.verdict == "unhealthy" else 200
    return HealthAnswer.model_validate(
        {"status": found.verdict, "reason": found.reason, "models": found.health}
    )


@router.get(
    "/ready",
    responses={503: {"model": ReadyAnswer, "description": "Not every model is served yet."}},
)
async def ready(
    response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> ReadyAnswer:
    """Tell whether every model is loaded and has a worker."""
    found = await gateway.pulse.feel()
    is_ready = found.verdict == "ok"
    response.status_code = 200 if is_ready else 503
    return ReadyAnswer.model_validate({"ready": is_ready, "models": found.states})
