"""Encrypts an engine's client socket, and lets in only clients whose keys are known.

A thread answers the questions that ZeroMQ asks about every connection (ZAP, 27/ZAP in ZeroMQ's
RFCs), and counts those that fail. While it does not answer, nobody gets in.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket as sockets
import threading
import time
from collections.abc import Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from omni_engine.engine.allowed_clients import AllowedClients
from omni_engine.engine.curve import load_pair, put_pair_on
from omni_engine.stages.config import CurveArgs

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = "omni-engine-clients"
_LOG_INTERVAL_S = 10.0


class Doorkeeper:
    """A thread that lets clients in or not.

    Args:
        context: of the socket that it keeps.
        allowed: who may connect.
        own_key: the engine's public key; who has its secret half owns the engine and may connect.
        failures: tells of connections that failed before ZeroMQ knew whose they are.

    Attributes:
        refused: connections that were not let in: unknown keys, no keys, or keys for another
            engine. A client without keys that hangs up first isn't counted.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: AllowedClients,
        own_key: str,
        failures: zmq.Socket[bytes],
    ) -> None:
        self.refused = 0
        self._allowed = allowed
        self._own_key = own_key
        self._failures = failures
        self._logged_at: dict[str, float] = {}
        self._questions = context.socket(zmq.REP)
        self._questions.bind(_ZAP_ENDPOINT)
        self._stop_reader, self._stop_writer = sockets.socketpair()
        self._thread = threading.Thread(target=self._run, name="omni-doorkeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._stop_writer.close()
        self._thread.join()
        self._stop_reader.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._questions, self._failures, self._stop_reader):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_reader.fileno() in ready:
                break
            if self._questions in ready:
                self._answer()
            if self._failures in ready:
                recv_monitor_message(self._failures)
                self._refuse("a client had no keys, or not this engine's public key", "handshake")
        self._questions.close(linger=0)
        self._failures.close(linger=0)

    def _answer(self) -> None:
        version, request_id, *question = self._questions.recv_multipart()
        try:
            code, text, user = self._judge(question)
        except Exception:  # boundary: one client; its connection fails, it may try again
            logger.exception("a client's key could not be checked")
            code, text, user = "300", "try again", ""
        answer = (code.encode(), text.encode(), user.encode(), b"")
        self._questions.send_multipart([version, request_id, *answer])

    def _judge(self, question: list[bytes]) -> tuple[str, str, str]:
        """Return the answer to one of ZeroMQ's questions: code, reason and the client's name.

        Args:
            question: domain, address, routing id, mechanism, and for CURVE the key.
        """
        domain, address, _, mechanism, *credentials = question
        if domain == _DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0]).decode()
            name = "owner" if key == self._own_key else self._allowed.name_of(key)
            if name is not None:
                logger.debug("client %s connects from %s", name, address.decode())
                return "200", "OK", name
            at = address.decode()
            why = f"the public key {key} of a client at {at} is not known"
            self._refuse(why, "unknown_key", key, at)
        return "400", "this key may not connect", ""

    def _refuse(
        self, why: str, reason: str, key: str | None = None, address: str | None = None
    ) -> None:
        """Count a refused connection, and log it unless one with this reason was just logged."""
        self.refused += 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -math.inf) < _LOG_INTERVAL_S:
            return
        self._logged_at[reason] = now
        logger.warning(
            "refused a connection: %s (refused connections in all so far: %d)", why, self.refused,
            extra={
                "event": "connection_refused", "reason": reason, "key": key, "address": address,
                "count": self.refused,
            },
        )  # fmt: skip


@contextlib.contextmanager
def curve_server(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], curve: CurveArgs
) -> Iterator[Doorkeeper | None]:
    """Keep a socket's door for as long as the context lasts; enter it before the socket is bound.

    Args:
        context: of the socket; no other socket of it may be encrypted.
        socket: the engine's, for clients.
        curve: the keys; without them everything stays open, and None is yielded.

    Raises:
        ConfigError: if a key file can't be used.
    """
    if curve.secret_key is None or curve.clients is None:
        yield None
        return
    pair = load_pair(curve.secret_key, "curve.secret_key")
    allowed = AllowedClients(curve.clients)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    put_pair_on(socket, pair)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in
    failures = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    doorkeeper = Doorkeeper(context, allowed, pair.public, failures)
    try:
        yield doorkeeper
    finally:
        socket.disable_monitor()
        doorkeeper.close()
