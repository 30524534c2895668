"""The gateway as its engine sees it: a child process that is started again when it dies."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from omni_engine.engine.gateway.settings import GatewaySettings
from omni_engine.protocol import pipes
from omni_engine.protocol.errors import ConfigError
from omni_engine.stages.config import HttpArgs

logger = logging.getLogger(__name__)

_MODULE = "omni_engine.engine.gateway.process"
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
BACKLOG = 2048
GOODBYE = b"."
"""What an engine that ends says to its gateway; one that was killed just closes the pipe."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 picks a free one.

    Raises:
        ConfigError: if that address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"can't listen for HTTP at {host}:{port}: {reason}",
            field="http.port",
            value=port,
            hint="Choose another --port or --host, or end what listens there.",
        ) from None


def warn_if_open(http: HttpArgs) -> None:
    """Log a warning if others than this machine may call without a key."""
    if http.api_key is None and not _is_loopback(http.host):
        logger.warning(
            "HTTP is served beyond this machine (at %s) without a key: whoever reaches it may use "
            "the models. Set OMNI_ENGINE_API_KEY, or --host 127.0.0.1.",
            http.host,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class GatewayProcess:
    """Keeps a gateway running beside an engine, until it is closed.

    Args:
        settings: what it serves.
        listener: listens already; stays open between one process and the next.
        on_started: called from a thread whenever a process answers requests.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        listener: socket.socket,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._listener, self._on_started = settings, listener, on_started
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="gateway", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The present process's id."""
        return None if self._process is None else self._process.pid

    def close(self, timeout_s: float = 15.0) -> None:
        """Let answers under way end, and the process with them; then stop listening."""
        with self._starting:
            self._closing.set()
            process = self._process
        if process is not None:
            _say_goodbye(process)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                logger.warning("the HTTP gateway did not end within %g s: it is killed", timeout_s)
                process.kill()
        self._thread.join(timeout_s)
        self._listener.close()

    def _keep_running(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            with self._starting:
                if self._closing.is_set():
                    return
                process = self._process = self._start()
            if process is not None:
                if _has_started(process):
                    delay_s = _FIRST_DELAY_S
                    self._on_started()
                code = process.wait()
                _close_pipes(process)
                if self._closing.is_set():
                    return
                logger.error("the HTTP gateway ended, exit code %d", code)
            logger.info("the HTTP gateway is started again in %.1f s", delay_s)
            if self._closing.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _start(self) -> subprocess.Popen[bytes] | None:
        """Start a process; None if the machine can't."""
        descriptor = self._listener.fileno()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(descriptor,),
                process_group=0,  # Ctrl-C is for the engine; the pipe tells the gateway
            )
        except OSError as error:
            logger.error("the HTTP gateway can't be started: %s", error)
            return None
        assert process.stdin is not None  # PIPE was asked for
        told = self._settings.model_copy(update={"listener": descriptor})
        with contextlib.suppress(BrokenPipeError):  # it ended already; its exit tells
            pipes.write_message(process.stdin.fileno(), told.model_dump(mode="json"))
        return process


def _has_started(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None  # PIPE was asked for
    try:
        return bool(pipes.read_message(process.stdout.fileno())["started"])
    except EOFError:
        return False


def _say_goodbye(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(OSError):  # it has ended
            os.write(process.stdin.fileno(), GOODBYE)
        process.stdin.close()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
