"""``/docs``: every route for people, from the OpenAPI document; nothing comes from elsewhere."""

from __future__ import annotations

import secrets
from importlib import resources

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()

_PAGE = (
    resources.files("omni_engine.engine.gateway").joinpath("static/docs.html").read_text("utf-8")
)


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    """Show every route."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(_PAGE.replace("NONCE", nonce), headers={"Content-Security-Policy": policy})
