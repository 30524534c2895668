"""Fetches pictures from hosts that the configuration allows, and from nowhere else."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Collection
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11

from omni_engine.engine.gateway.errors import GatewayError

_TIMEOUT_S = 15.0
_REDIRECTS = 3
_CHUNK = 64 << 10
_IN_TARGETS = "!$%&'()*+,/:;=?@[]"
"""What stands for itself in a path or query, beside letters, digits and ``_.-~``."""


async def fetch(
    url: str, param: str, hosts: Collection[str], most: int, timeout_s: float = _TIMEOUT_S
) -> bytes:
    """Return what is at a URL.

    Names must lead to public addresses; a private one must be allowed as the address that it is.
    Redirects are followed within the host only.

    Args:
        url: ``http://`` or ``https://``.
        param: the HTTP field that it came in, for errors.
        hosts: that may be asked.
        most: bytes that are read.
        timeout_s: for all of it, from looking up the name to the last byte.

    Raises:
        GatewayError: 400, if it is refused or can't be had.
    """
    host = _checked(url, param, hosts).hostname
    try:
        async with asyncio.timeout(timeout_s):
            return await _followed(url, param, hosts, most)
    except TimeoutError:
        raise _refused(f"{host} can't be asked: it took too long", param) from None


async def _followed(url: str, param: str, hosts: Collection[str], most: int) -> bytes:
    host = _checked(url, param, hosts).hostname
    for _ in range(_REDIRECTS + 1):
        parts = _checked(url, param, hosts)
        if parts.hostname != host:
            raise _refused(f"{host} leads to {parts.hostname}, another host", param)
        try:
            found, location = await _ask(parts, param, most)
            if location is None:
                return found
            url = urljoin(url, location)
        except (OSError, h11.ProtocolError, ValueError) as error:  # ValueError: malformed URLs
            raise _refused(
                f"{host} can't be asked: {error or type(error).__name__}", param
            ) from None
    raise _refused(f"{host} redirects more than {_REDIRECTS} times", param)


def _checked(url: str, param: str, hosts: Collection[str]) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise _refused("that is no URL", param) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise _refused("only plain http:// and https:// URLs are fetched", param)
    if parts.hostname not in {host.lower() for host in hosts}:
        raise GatewayError(
            400,
            f"Pictures are not fetched from {parts.hostname}. Upload the file, or have the "
            "server's administrator allow the host (http.image_hosts).",
            param,
            "host_refused",
        )
    return parts


async def _ask(parts: SplitResult, param: str, most: int) -> tuple[bytes, str | None]:
    """Return the content, or where the host sends us instead."""
    assert parts.hostname is not None  # _checked
    exchange = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", parts.netloc),
        ("Accept", "image/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    asking = exchange.send(h11.Request(method="GET", target=_target(parts), headers=headers))
    exchange.send(h11.EndOfMessage())
    reader, writer = await _connected(parts, parts.hostname, param)
    try:
        writer.write(asking or b"")
        data = bytearray()
        while True:
            event = exchange.next_event()
            if event is h11.NEED_DATA:
                exchange.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response):
                if event.status_code in (301, 302, 303, 307, 308):
                    return b"", quote(dict(event.headers).get(b"location", b""), _IN_TARGETS + "#")
                if event.status_code != 200:
                    raise _refused(
                        f"{parts.hostname} answered with status {event.status_code}", param
                    )
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > most:
                    told = f"the file has more than {most} bytes (http.max_body_bytes)"
                    raise _refused(told, param)
            elif not isinstance(event, h11.InformationalResponse):
                return bytes(data), None
    finally:
        writer.transport.abort()


def _target(parts: SplitResult) -> str:
    query = f"?{parts.query}" if parts.query else ""
    return quote((parts.path or "/") + query, _IN_TARGETS)


async def _connected(
    parts: SplitResult, host: str, param: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = await _address(host, port, param)
    if not secure:
        return await asyncio.open_connection(address, port)
    trusted = await asyncio.to_thread(_trusted)
    return await asyncio.open_connection(address, port, ssl=trusted, server_hostname=host)


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return whom to trust; reading that takes a while."""
    return ssl.create_default_context()


async def _address(host: str, port: int, param: str) -> str:
    """Return an address of the host; looked up once, so that it can't change after the check."""
    try:
        return str(ipaddress.ip_address(host))  # allowed as the address that it is
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    public = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if not public or len(public) < len(addresses):
        raise _refused(f"{host} leads to an address that is not public", param)
    return public[0]


def _refused(message: str, param: str) -> GatewayError:
    return GatewayError(
        400, f"The picture in {param!r} can't be fetched: {message}.", param, "invalid_image"
    )
