"""``/v1/files``: pictures that were asked for as URLs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.openapi import errors_of
from omni_engine.engine.gateway.state import Gateway, gateway_of

router = APIRouter(tags=["images"])


@router.get(
    "/v1/files/{name}",
    response_class=Response,
    responses={200: {"content": {"image/*": {}}}, **errors_of(404)},
)
async def kept_file(name: str, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Response:
    """Return a picture that was asked for as a URL. Its name is its key: no other is needed."""
    file = gateway.files.find(name)
    if file is None:
        raise GatewayError(404, "There is no such file (any more).", "name", "unknown_file")
    age = gateway.files.seconds_left(file)
    headers = {"Cache-Control": f"private, max-age={age}", "X-Content-Type-Options": "nosniff"}
    return Response(file.data, media_type=file.media_type, headers=headers)
