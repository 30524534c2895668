"""Who may call: bearer keys, compared in constant time."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.engine.gateway.state import gateway_of

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


Sent = HTTPAuthorizationCredentials | None
_key = HTTPBearer(scheme_name="key", description="The API key, if one is set.", auto_error=False)
_admin_key = HTTPBearer(scheme_name="admin key", description="For adapters.", auto_error=False)


def require_key(request: Request, _: Annotated[Sent, Security(_key)] = None) -> None:
    """Let a request pass that has the API key or the admin key, or if none is needed.

    Raises:
        GatewayError: 401 otherwise.
    """
    http = gateway_of(request).http
    keys = [key for key in (http.api_key, http.admin_key) if key is not None]
    if http.api_key is not None and not _matches(request, keys):
        raise _unauthorized(request, "an API key")


def require_admin_key(request: Request, _: Annotated[Sent, Security(_admin_key)] = None) -> None:
    """Let a request pass that has the admin key.

    Raises:
        GatewayError: 401 without the right key, 403 if none is configured.
    """
    http = gateway_of(request).http
    if http.admin_key is None:
        raise GatewayError(
            403,
            "Managing adapters over HTTP is off. Start the server with --admin-key "
            "(or OMNI_ENGINE_ADMIN_KEY) to allow it.",
            code="management_off",
        )
    if not _matches(request, [http.admin_key]):
        raise _unauthorized(request, "the admin key")


def _matches(request: Request, keys: list[str]) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    found = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
    return scheme.lower() == "bearer" and any(found)


def _unauthorized(request: Request, what: str) -> GatewayError:
    given = "That is not the right key" if "authorization" in request.headers else "No key was sent"
    return GatewayError(
        401,
        f"{given}: this needs {what}, as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers=_CHALLENGE,
    )
