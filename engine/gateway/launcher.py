"""The gateway as its engine sees it: a child process that is started again when it dies."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from omni_engine.engine.gateway.settings import GatewaySettings
from omni_engine.protocol import pipes
from omni_engine.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_MODULE = "omni_engine.engine.gateway.process"
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 picks a free one.

    Raises:
        ConfigError: if that address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"can't listen for HTTP at {host}:{port}: {reason}",
            field="port",
            value=port,
            hint="Choose another --port or --host, or end what listens there.",
        ) from None


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
        """Let answers under way end, and the process with them."""
        with self._starting:
            self._closing.set()
            process = self._process
        if process is not None:
            _close_input(process)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
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
            if _has_started(process):
                delay_s = _FIRST_DELAY_S
                self._on_started()
            code = process.wait()
            _close_input(process)
            if self._closing.is_set():
                return
            logger.error(
                "the HTTP gateway ended, exit code %d; it is started again in %.1f s", code, delay_s
            )
            if self._closing.wait(delay_s):
                return
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(descriptor,),
            process_group=0,  # Ctrl-C is for the engine; the pipe's end tells the gateway
        )
        assert process.stdin is not None  # PIPE was asked for
        told = self._settings.model_copy(update={"listener": descriptor})
        try:
            pipes.write_message(process.stdin.fileno(), told.model_dump(mode="json"))
        except BrokenPipeError:
            logger.error("the HTTP gateway ended before it was told what to serve")
        return process


def _has_started(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None  # PIPE was asked for
    try:
        return bool(pipes.read_message(process.stdout.fileno())["started"])
    except EOFError:
        return False


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
