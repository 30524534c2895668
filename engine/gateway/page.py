"""``/``: the page, one self-contained file joined from the parts in ``static/``."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import Response

router = APIRouter()

_SCRIPTS = ("api.js", "drawing.js", "timeline.js", "canvas.js", "card.js", "form.js", "app.js")


@dataclass(frozen=True)
class Page:
    """The page as it is sent.

    Attributes:
        content: the HTML, with its style and script inside.
        headers: what the browser must keep to, and the content's tag.
    """

    content: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """Join the parts."""
    style = _part("style.css")
    script = '"use strict";\n' + "\n".join(_part(name) for name in _SCRIPTS)
    html = _part("index.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    content = html.encode()
    headers = {
        "Content-Security-Policy": _policy(style, script),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return Page(content, headers)


def _policy(style: str, script: str) -> str:
    """Nothing from elsewhere, and of what is inline only what belongs to the page."""
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "img-src 'self' data: blob:",
            "media-src 'self' blob:",
            "connect-src 'self'",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return (resources.files(__package__) / "static" / name).read_text("utf-8")


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Send the page; it needs no key, what it asks for then does."""
    sent = page()
    if request.headers.get("if-none-match") == sent.headers["ETag"]:
        return Response(status_code=304, headers=sent.headers)
    return Response(sent.content, media_type="text/html", headers=sent.headers)
