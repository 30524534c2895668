"""Fetches pictures from hosts that the configuration allows, and from nowhere else."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Collection
from urllib.parse import SplitResult, urljoin, urlsplit

from omni_engine.engine.gateway.errors import GatewayError

_TIMEOUT_S = 15.0
_REDIRECTS = 3
_CHUNK = 64 << 10


def fetch(
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
        timeout_s: for all of it.

    Raises:
        GatewayError: 400, if it is refused or can't be had.
    """
    until = time.monotonic() + timeout_s
    host = _checked(url, param, hosts).hostname
    for _ in range(_REDIRECTS + 1):
        parts = _checked(url, param, hosts)
        if parts.hostname != host:
            raise _refused(f"{host} leads to {parts.hostname}, another host", param)
        try:
            found, location = _ask(parts, param, most, until)
        except (OSError, http.client.HTTPException) as error:
            reason = "it took too long" if isinstance(error, TimeoutError) else str(error)
            raise _refused(
                f"{host} can't be asked: {reason or type(error).__name__}", param
            ) from None
        if location is None:
            return found
        url = urljoin(url, location)
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


def _ask(parts: SplitResult, param: str, most: int, until: float) -> tuple[bytes, str | None]:
    """Return the content, or where the host sends us instead."""
    assert parts.hostname is not None  # _checked
    connection = _connected(parts, parts.hostname, param, until)
    try:
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        connection.request(
            "GET", path, headers={"Accept": "image/*", "Accept-Encoding": "identity"}
        )
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return b"", answer.headers.get("location", "")
        if answer.status != 200:
            raise _refused(f"{parts.hostname} answered with status {answer.status}", param)
        return _read(connection, answer, param, most, until), None
    finally:
        connection.close()


def _connected(
    parts: SplitResult, host: str, param: str, until: float
) -> http.client.HTTPConnection:
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = _address(host, port, param)
    connection = http.client.HTTPConnection(host, port)
    raw = socket.create_connection((address, port), timeout=_left(until))
    connection.sock = raw
    if secure:
        try:
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(raw, server_hostname=host)
        except BaseException:  # whatever it is: clean up, then pass it on
            raw.close()
            raise
    return connection


def _address(host: str, port: int, param: str) -> str:
    """Return an address of the host; looked up once, so that it can't change after the check."""
    try:
        return str(ipaddress.ip_address(host))  # allowed as the address that it is
    except ValueError:
        pass
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    public = [address for address in addresses if ipaddress.ip_address(address).is_global]
    if not public or len(public) < len(addresses):
        raise _refused(f"{host} leads to an address that is not public", param)
    return public[0]


def _read(
    connection: http.client.HTTPConnection,
    answer: http.client.HTTPResponse,
    param: str,
    most: int,
    until: float,
) -> bytes:
    data = bytearray()
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(until))
        elif time.monotonic() > until:
            raise TimeoutError
        chunk = answer.read1(_CHUNK)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > most:
            raise _refused(f"the file has more than {most} bytes (http.max_body_bytes)", param)


def _left(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _refused(message: str, param: str) -> GatewayError:
    return GatewayError(
        400, f"The picture in {param!r} can't be fetched: {message}.", param, "invalid_image"
    )
