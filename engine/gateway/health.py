"""``/health`` and ``/ready``: for load balancers and orchestrators; no key is needed."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response

from omni_engine.engine.gateway.state import Gateway, gateway_of

router = APIRouter(tags=["operations"])


@router.get("/health", responses={503: {"description": "The engine does not work."}})
async def health(
    response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> dict[str, Any]:
    """Tell whether the engine lives: its loop turns, and every model has or is getting a worker."""
    metrics = await gateway.client.metrics()
    down = [stage["name"] for stage in metrics["stages"] if stage["state"] == "down"]
    response.status_code = 503 if down else 200
    return {"status": "unhealthy" if down else "ok", "down": down}


@router.get("/ready", responses={503: {"description": "Not every model is ready."}})
async def ready(
    response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]
) -> dict[str, Any]:
    """Tell whether every model is loaded and has a worker."""
    metrics = await gateway.client.metrics()
    states = {stage["name"]: stage["state"] for stage in metrics["stages"]}
    is_ready = all(state in ("ready", "degraded") for state in states.values())
    response.status_code = 200 if is_ready else 503
    return {"ready": is_ready, "models": states}
