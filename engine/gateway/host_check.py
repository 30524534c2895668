"""Under which names a server without a key answers: those that no stranger can make lead here."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_engine.engine.gateway.errors import GatewayError
from omni_engine.stages.config import HttpArgs

_FOR_PROBES = frozenset({"/health", "/ready", "/metrics"})


class HostCheck:
    """Refuses requests under names of the internet, which anyone can make lead to this machine.

    A page at such a name may read what the server answers, since to its browser they are the same
    site (DNS rebinding). Health and figures are told under any name.

    Args:
        app: what comes next.
        http: its host and the hosts of its ``cors_origins`` are names of this server.
    """

    def __init__(self, app: ASGIApp, http: HttpArgs) -> None:
        self._app = app
        origins = {urlsplit(origin).hostname for origin in http.cors_origins}
        self._names = origins | {http.host.lower()}
        self._any_name = "*" in http.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and scope["path"] not in _FOR_PROBES:
            host = Headers(scope=scope).get("host", "")
            if not self._answers_to(host):
                refusal = GatewayError(
                    403,
                    f"This server does not answer to the name {host}. Ask it by an address, "
                    "localhost or a name without a dot, set an API key, or have the "
                    f"administrator add the origin (such as https://{host}) to http.cors_origins.",
                    code="name_refused",
                )
                return await refusal.response()(scope, receive, send)
        await self._app(scope, receive, send)

    def _answers_to(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return self._any_name or name in self._names or _is_local(name)


def _is_local(name: str) -> bool:
    """Whether no stranger can have a name lead here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith((".localhost", ".local"))
    return True
