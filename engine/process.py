"""An engine in a process of its own: its entry point and the handle its owner keeps.

The owner writes the configuration to the engine's standard input and keeps the pipe open; when the
pipe ends, because the owner closed it or died, the engine stops and takes its workers with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from typing import Any

from omni_engine.protocol import pipes
from omni_engine.protocol.errors import ConfigError, EngineClosedError, OmniError, error_from_wire
from omni_engine.protocol.logs import start_logging
from omni_engine.protocol.stderr_writer import stderr_writer
from omni_engine.stages.config import DeployConfig

ENGINE_MODULE = "omni_engine.engine.process"
_STDIN, _STDOUT = 0, 1


class EngineProcess:
    """An engine process owned by this one.

    Args:
        config: the effective configuration; without an ``endpoint`` the engine makes a private one.

    Raises:
        ConfigError: if the engine refuses the configuration.
    """

    def __init__(self, config: DeployConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", ENGINE_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            bufsize=0,
            process_group=0,  # Ctrl-C is for the owner; the pipe's end tells the engine
        )
        _started_here.add(self)
        weakref.finalize(self, self._stdin.close)  # Popen keeps a forgotten process's pipes open
        try:
            pipes.write_message(self._stdin.fileno(), config.model_dump(mode="json"))
            self.endpoint = self._await_start()
        except BaseException:  # whatever it is: clean up, then pass it on
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process.poll() is None

    def close(self, timeout_s: float = 15.0) -> None:
        """Stop the engine and its workers; returns when they are gone."""
        self._stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def let_go(self) -> None:
        """Leave the engine to the process that this one was forked from."""
        self._stdin.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _await_start(self) -> str:
        """Wait for the engine's report: where it listens, or why it can't."""
        assert self._process.stdout is not None  # PIPE was asked for
        try:
            report = pipes.read_message(self._process.stdout.fileno())
        except EOFError:
            code = self._process.wait()
            raise EngineClosedError(f"the engine ended at its start, exit code {code}") from None
        if report["error"] is not None:
            raise error_from_wire(report["error"])
        return str(report["endpoint"])


_started_here: weakref.WeakSet[EngineProcess] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """A forked child that kept the pipes open would keep the engines alive, too."""
    for engine in _started_here:
        engine.let_go()


os.register_at_fork(after_in_child=_let_go_after_fork)


def main() -> int:
    """Run the engine that the owner described on standard input."""
    from omni_engine.engine.server import EngineServer

    try:
        config = DeployConfig.model_validate(pipes.read_message(_STDIN))
        start_logging("engine", "WARNING", stderr_writer())
        server = EngineServer(
            config,
            config.endpoint,
            parent_fd=_STDIN,
            on_listening=lambda endpoint: _report(endpoint, None),
        )
        return server.run()
    except ConfigError as error:
        _report(None, error)
        return 1
    except EOFError:  # the owner left before it said what to serve
        return 1


def _report(endpoint: str | None, error: OmniError | None) -> None:
    report = {"endpoint": endpoint, "error": None if error is None else error.to_wire()}
    pipes.write_message(_STDOUT, report)


if __name__ == "__main__":
    sys.exit(main())
