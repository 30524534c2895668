"""The documents state only what was run: every command and program in them is executed here."""

from __future__ import annotations

import configparser
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from omni_engine import OmniClient
from omni_engine.cli.health import CHECK_TIMEOUT_S
from omni_engine.cli.main import app
from omni_engine.engine.connection import ENGINE_TIMEOUT_S
from omni_engine.engine.health import SILENCE_S
from omni_engine.engine.restarts import MAX_BACKOFF_S
from omni_engine.stages.config import DeployConfig, EngineArgs
from omni_engine.worker.certificates import CACHE_VARIABLE

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^```(bash|python|sh|(?:yaml|js)(?= file=))(?: file=(\S+))?\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RUN_DOCUMENTS = [
    "README.md", "docs/pipelines.md", "docs/adapters.md", "docs/train-lora.md",
    "docs/operations.md", "docs/security.md", "docs/client.md", "docs/http.md",
    "docs/migrating.md", "docs/page.md",
]  # fmt: skip


def blocks(document: str) -> list[tuple[str, str, str]]:
    """Language, file name (or "") and text of every code block, in order."""
    return BLOCK.findall((ROOT / document).read_text())


class Session:
    """Runs a document's blocks in one folder; a ``serve`` command stays in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[subprocess.Popen[str]] = []
        programs = Path(sys.executable).parent
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, language: str, name: str, text: str) -> None:
        if name:
            (self.folder / name).write_text(text)
        elif language == "python":
            self._finish([sys.executable, "-c", text])
        elif text.startswith("omni-engine serve"):
            self._serve(text)
        else:
            self._finish(["bash", "-euo", "pipefail", "-c", text])

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
            assert server.returncode == 0

    def _finish(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"

    def _serve(self, command: str) -> None:
        server = subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self.servers.append(server)
        assert server.stdout is not None
        assert "serving" in server.stdout.readline()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    yield session
    session.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", RUN_DOCUMENTS)
def test_every_command_and_program_runs(document: str, session: Session) -> None:
    runnable = [block for block in blocks(document) if block[0] != "sh"]
    assert runnable
    for block in runnable:
        session.run(*block)


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        for language, _, text in blocks(document):
            if language == "sh":
                lines = re.findall(r"^make ([a-z -]+?)(?: *#.*)?$", text, re.MULTILINE)
                named = {target for line in lines for target in line.split()}
                assert named <= targets


@pytest.mark.parametrize("document", [*RUN_DOCUMENTS, "CONTRIBUTING.md", "docs/configuration.md"])
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target


def test_the_time_that_requests_have_at_the_end_is_the_real_one() -> None:
    seconds = DeployConfig.model_fields["shutdown_timeout_s"].default
    for document in ("README.md", "docs/configuration.md", "cli/serve.py"):
        text = " ".join((ROOT / document).read_text().split())
        assert f"{seconds:g} seconds to end" in text, document


def test_the_systemd_unit_works(tmp_path: Path) -> None:
    """Its command line is right, and its times fit together."""
    (text,) = re.findall(r"^```ini\n(.*?)^```$", (ROOT / "docs/operations.md").read_text(),
                         re.MULTILINE | re.DOTALL)  # fmt: skip
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    service = unit["Service"]
    program, command, *options = shlex.split(service["ExecStart"])
    assert (Path(program).name, command, service["KillMode"]) == ("omni-engine", "serve", "mixed")
    config = options[options.index("--config") + 1]
    shipped = str(ROOT / "stages" / "bundled.yaml")
    done = subprocess.run(
        [Path(sys.executable).with_name("omni-engine"), "config", "show", "--json",
         *(shipped if option == config else option for option in options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    shown = json.loads(done.stdout)
    assert "/run/omni-engine/engine" in json.dumps(shown)
    assert service["RuntimeDirectory"] == "omni-engine"
    shutdown_s = float(options[options.index("--shutdown-timeout-s") + 1])
    assert float(service["TimeoutStopSec"]) >= shutdown_s + 10
    assert service["Environment"] == f"{CACHE_VARIABLE}=%C/{service['CacheDirectory']}"


def test_the_settings_that_operations_names_have_these_defaults() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    settings = EngineArgs(model="bundled")
    for name in ("worker_heartbeat_timeout_s", "worker_stall_timeout_s",
                 "worker_startup_timeout_s"):  # fmt: skip
        assert f"| {getattr(settings, name):g} s | `{name}` |" in text
    assert f"`worker_restart_backoff_s` ({settings.worker_restart_backoff_s:g} s)" in text
    assert f"`worker_death_window_s`\n({settings.worker_death_window_s / 60:g} min)" in text
    assert f"`max_worker_deaths` ({settings.max_worker_deaths})" in text
    assert f"doubles that, up to {MAX_BACKOFF_S:g} s" in text
    assert SILENCE_S == 3
    assert "was heard of within three seconds" in text
    assert f"waits at most {CHECK_TIMEOUT_S:g} seconds" in text
    (probe_s,) = re.findall(r"^HEALTHCHECK .*--timeout=(\d+)s", text, re.MULTILINE)
    assert float(probe_s) >= CHECK_TIMEOUT_S + 10


def test_the_times_that_the_page_for_clients_names_are_the_real_ones() -> None:
    text = (ROOT / "docs/client.md").read_text()
    defaults = inspect.signature(OmniClient).parameters
    assert f"`connect_timeout_s` ({defaults['connect_timeout_s'].default:g} s)" in text
    assert defaults["reconnect_timeout_s"].default == ENGINE_TIMEOUT_S
    assert f"`reconnect_timeout_s` ({ENGINE_TIMEOUT_S:g} s)" in text
    kept_s = DeployConfig.model_fields["result_ttl_s"].default
    assert f"`result_ttl_s` ({kept_s:g} s;" in text


@pytest.mark.parametrize("example", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=str)
def test_examples_are_shown_as_they_are(example: Path) -> None:
    shown = {name: text for _, name, text in blocks("docs/pipelines.md")}
    assert shown[example.name] == example.read_text()


def test_the_flags_that_migrating_names_exist() -> None:
    text = (ROOT / "docs/migrating.md").read_text()
    flags = text.partition("## Flags")[2].partition("## Fields")[0]
    ours = {flag for row in flags.splitlines() if row.startswith("| ")
            for flag in re.findall(r"--[a-z-]+", row.split("|")[2])}  # fmt: skip
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {name for parameter in serve.params for name in parameter.opts}
    assert ours - {"--omni"} <= known
    assert len(ours) >= 15


def test_ci_runs_what_the_readme_says() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_make_demo_draws_eight_pictures() -> None:
    out = ROOT / "demo-output"
    before = set(out.glob("*.png"))
    done = subprocess.run(
        ["make", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(set(out.glob("*.png"))) >= max(9, len(before))
    assert "batch" in done.stdout
