"""``omni-engine serve``: an engine in this process, in the foreground."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from omni_engine.cli import interrupts
from omni_engine.cli.display import print_line
from omni_engine.cli.http_options import HttpOptions
from omni_engine.cli.option_groups import expand_options
from omni_engine.cli.options import Endpoint, EngineOptions, Model

if TYPE_CHECKING:
    from omni_engine.engine.stage_runtime import StageRuntime
    from omni_engine.stages.config import DeployConfig

_HELP = """
Serve one or more models until Ctrl-C or SIGTERM; those taken in have
10 seconds to end. With --port over HTTP, too, as OpenAI's clients speak it.

Says on standard output when clients can connect and when each model is ready;
requests that come earlier wait. Ends with exit code 1 if no model can be
loaded. Logs go to standard error.
"""

_EPILOG = """
[bold]Examples[/bold]
  omni-engine serve
  omni-engine serve --port 8091 --step-execution
  omni-engine serve Qwen/Qwen-Image --devices 0,1 --max-num-seqs 4
  omni-engine serve --config stages.yaml --endpoint tcp://127.0.0.1:5570
  omni-engine serve bundled --lora-modules sketch=adapters/sketch.safetensors

`omni-engine config show` prints the effective settings and where each comes from.
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve", help=_HELP, epilog=_EPILOG)(serve)


@expand_options
def serve(
    model: Model = None,
    endpoint: Endpoint = None,
    *,
    engine: EngineOptions,
    http: HttpOptions,
) -> None:
    """Run an engine in this process until it is told to stop."""
    from omni_engine.engine.endpoints import check_endpoint, default_endpoint
    from omni_engine.engine.server import EngineServer

    config = engine.settings(model, endpoint=endpoint, **http.overrides()).config
    _refuse_useless(config, http)
    address = config.endpoint or default_endpoint()
    check_endpoint(address, encrypted=config.curve.secret_key is not None)
    _start_logging(engine)
    names = ", ".join(stage.display_name for stage in config.stage_args)
    with contextlib.ExitStack() as gateway:
        start_gateway = _prepared_gateway(config, gateway)

        def on_listening(at: str) -> None:
            _announce(names, at, config.curve.secret_key)
            start_gateway(at)

        server = EngineServer(
            config, address, on_listening=on_listening, on_stage=_announce_state,
            end_when_unusable=True,
        )  # fmt: skip
        interrupts.release()
        code = server.run()
    raise typer.Exit(code)


def _refuse_useless(config: DeployConfig, http: HttpOptions) -> None:
    if config.http.port is None and (given := http.given()):
        from omni_engine.protocol.errors import UnsupportedOptionError

        raise UnsupportedOptionError(
            f"{given[0]} has no effect without a port for HTTP",
            field=given[0],
            hint="Give --port, too, or leave it out.",
        )


def _prepared_gateway(config: DeployConfig, stack: contextlib.ExitStack) -> Callable[[str], None]:
    """Listen for HTTP, if that is wanted, and return what starts a gateway to an endpoint.

    Args:
        config: the effective configuration.
        stack: closes the gateway, once the engine has ended.

    Raises:
        ConfigError: if the address can't be had.
    """
    if config.http.port is None:
        return lambda _: None
    from omni_engine.engine.gateway.launcher import GatewayProcess, listen, warn_if_open
    from omni_engine.engine.gateway.settings import settings_for

    listener = listen(config.http.host, config.http.port)
    stack.callback(listener.close)
    warn_if_open(config.http)
    url = _url(config.http.host, listener.getsockname()[1])

    def start(endpoint: str) -> None:
        settings = settings_for(config, endpoint)
        said = threading.Event()

        def on_started() -> None:
            if not said.is_set():
                said.set()
                _say(f"HTTP at {url} (documents at /docs)")

        stack.callback(GatewayProcess(settings, listener, on_started).close)

    return start


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _start_logging(engine: EngineOptions) -> None:
    """Log to standard error, workers included: they read the environment."""
    from omni_engine.protocol.logs import choose_logging, start_logging
    from omni_engine.protocol.stderr_writer import stderr_writer

    choose_logging(engine.log_level, engine.log_format)
    start_logging("engine", "INFO", stderr_writer())


_saying = threading.Lock()


def _say(line: str) -> None:
    """Print a line if anybody reads it: an engine does not depend on its standard output."""
    with _saying:
        try:
            print_line(line)
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _announce_state(stage: StageRuntime) -> None:
    reason = f": {stage.error}" if stage.error is not None else ""
    _say(f"{stage.name} is {stage.state}{reason}")


def _announce(names: str, address: str, secret_key: str | None) -> None:
    _say(
        f"serving {names} at {address} - try: "
        f'omni-engine generate "a red circle on a white background" -o pictures '
        f"--connect {_reachable(address)}{_key_options(secret_key)}"
    )


def _reachable(address: str) -> str:
    """Return what clients give as ``--connect``; HOST is theirs to fill in where any would do."""
    from omni_engine.engine.endpoints import default_endpoint

    host, _, port = address.rpartition(":")
    if host in ("tcp://0.0.0.0", "tcp://[::]"):
        return f"tcp://HOST:{port}"
    return "auto" if address == default_endpoint() else address


def _key_options(secret_key: str | None) -> str:
    """Return the options that a client of an engine with this secret key file needs."""
    from omni_engine.stages.key_files import PUBLIC_SUFFIX, SECRET_SUFFIX

    if secret_key is None:
        return ""
    file = Path(secret_key)
    name = file.stem if file.suffix == SECRET_SUFFIX else "ENGINE"
    public = shlex.quote(f"{name}{PUBLIC_SUFFIX}")
    return f" --key YOU{SECRET_SUFFIX} --server-key {public}"
