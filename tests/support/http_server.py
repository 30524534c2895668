"""Real servers for tests of HTTP: `omni-engine serve --port 0` as a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
_numbers = itertools.count()


@dataclass
class HttpServer:
    """A server that is up.

    Attributes:
        url: such as ``http://127.0.0.1:40001``.
        endpoint: of its engine, for ``OmniClient``.
        process: of the engine.
        errors: what it wrote to standard error so far, by line.
    """

    url: str
    endpoint: str
    process: subprocess.Popen[str]
    errors: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.contextmanager
def http_server(
    *args: str,
    ready: bool = True,
    environment: Mapping[str, str] | None = None,
    stop: Callable[[HttpServer], None] | None = None,
) -> Iterator[HttpServer]:
    """Run `omni-engine serve --port 0` with these arguments; it must end with exit code 0.

    Args:
        args: such as ``"--step-execution"``; on the CPU, unless they name ``--devices``.
        ready: wait until every model is ready, too.
        environment: variables beside those of this process.
        stop: ends the server, where that isn't SIGINT to the engine; it may end as it likes.
    """
    endpoint = f"ipc://{os.environ['TMPDIR']}/http-{os.getpid()}-{next(_numbers)}"
    devices = [] if "--devices" in args or "--config" in args else ["--devices", "cpu"]
    process = subprocess.Popen(
        [COMMAND, "serve", "--port", "0", "--endpoint", endpoint, *devices, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    server = HttpServer("", endpoint, process)
    reader = threading.Thread(target=_keep_lines, args=(process, server.errors), daemon=True)
    reader.start()
    try:
        server.url = _wait_until_up(server, ready)
        yield server
        if stop is not None:
            stop(server)
        elif process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        assert stop is not None or process.returncode == 0, "\n".join(server.errors)
    finally:
        process.kill()
        process.wait()
        reader.join(10)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _keep_lines(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    lines.extend(line.rstrip("\n") for line in process.stderr)


def _wait_until_up(server: HttpServer, ready: bool) -> str:
    """Return the URL, once it was announced, and every model, if that is waited for."""
    assert server.process.stdout is not None
    url, names, loaded = "", set[str](), set[str]()
    for line in server.process.stdout:
        if found := re.match(r"serving (.*) at \S+ - try", line):
            names = set(found[1].split(", "))
        elif found := re.match(r"HTTP at (\S+)", line):
            url = found[1]
        elif found := re.match(r"(.*) is ready$", line):
            loaded.add(found[1])
        if url and names and (loaded >= names or not ready):
            return url
    raise AssertionError("the server ended:\n" + "\n".join(server.errors))
