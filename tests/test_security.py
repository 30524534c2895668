"""What others on the machine, clients and models can't do, and what never shows."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from adapters import random_adapter
from conftest import PATTERN
from diffusers import QwenImagePipeline
from raw_client import RawClient
from test_cli import COMMAND, run_command

from omni_engine import LoRARequest, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.endpoints import EndpointLock, bind_endpoint, default_endpoint
from omni_engine.engine.private_directory import private_directory
from omni_engine.protocol.errors import ConfigError, InvalidRequestError, OmniError
from omni_engine.stages.bundled import MODEL_DIR

ROOT = Path(__file__).parent.parent


# -- private places


def test_sockets_and_their_directories_are_for_us_only(
    start_own_engine: Callable[..., Omni], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        omni = start_own_engine(pipeline=PATTERN, lora_modules=[], default_sampling_params={})
        own = Path(omni.endpoint.removeprefix("ipc://"))
        given = start_own_engine(
            pipeline=PATTERN, lora_modules=[], default_sampling_params={},
            endpoint=f"ipc://{tmp_path}/new/engine",
        )  # fmt: skip
    finally:
        os.umask(before)
    assert given.endpoint == f"ipc://{tmp_path}/new/engine"
    names = {path.name for path in own.parent.iterdir()}
    assert names == {"alive", "clients", "clients.lock", "workers"}
    for folder in (own.parent, tmp_path / "new"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.iterdir():
            assert not path.stat().st_mode & 0o077


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_default_directory_that_others_can_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "omni-engine"
    folder.mkdir()
    folder.chmod(mode)
    done = run_command("serve", "--pipeline", PATTERN, "--devices", "cpu")
    assert (done.code, done.out) == (2, "")
    assert f"chmod 700 {folder}" in done.err
    assert list(folder.iterdir()) == []


def test_a_default_directory_that_is_a_link_or_a_strangers_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "omni-engine").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="not your own"), EndpointLock(default_endpoint()):
        pass
    if os.getuid() == 0:
        (tmp_path / "omni-engine").unlink()
        (tmp_path / "omni-engine").mkdir(mode=0o700)
        os.chown(tmp_path / "omni-engine", 12345, 12345)
        with pytest.raises(ConfigError, match="not your own"), EndpointLock(default_endpoint()):
            pass


_LOCK_AND_UNLOCK = """
import os, sys
from omni_engine.engine.endpoints import EndpointLock
from omni_engine.protocol.errors import ConfigError
endpoint, inside, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
held = 0
while held < rounds:
    try:
        with EndpointLock(endpoint):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another is inside
            os.unlink(inside)
            held += 1
    except ConfigError as error:
        assert "another engine" in error.message, error
"""


def test_never_two_engines_at_one_endpoint_and_no_lock_file_is_left(tmp_path: Path) -> None:
    arguments = [f"ipc://{tmp_path}/new/engine", str(tmp_path / "inside"), "300"]
    command = [sys.executable, "-c", _LOCK_AND_UNLOCK, *arguments]
    racers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        _, errors = racer.communicate(timeout=120)
        assert racer.returncode == 0, errors
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_lock_that_a_killed_engine_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "engine.lock").touch()
    (tmp_path / "engine").touch()
    with EndpointLock(f"ipc://{tmp_path}/engine"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_whole_killed_engine_left_is_removed_at_the_next_start(
    start_own_engine: Callable[..., Omni],
) -> None:
    def start() -> Omni:
        return start_own_engine(pipeline=PATTERN, lora_modules=[], default_sampling_params={})

    dead, alive = start(), start()
    left, used = (Path(omni.endpoint.removeprefix("ipc://")).parent for omni in (dead, alive))
    engine = psutil.Process(dead._engine.pid)
    doomed = [*engine.children(recursive=True), engine]
    for process in doomed:
        process.suspend()  # none may clean up after another
    for process in doomed:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(doomed[:-1], timeout=10)
    dead.close()
    assert (left / "alive").exists()
    unproven = left.with_name("omni-engine-unproven")
    unproven.mkdir(mode=0o700)
    try:
        start()
        assert not left.exists()
        assert (used / "clients").is_socket()
        assert unproven.exists()
        assert alive.generate("a")[0].images is not None
    finally:
        unproven.rmdir()


def test_a_link_in_the_place_of_a_private_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "alive").touch()
    link = Path(os.environ["TMPDIR"], "omni-engine-link")
    link.symlink_to(tmp_path)
    with private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()
    assert (tmp_path / "alive").exists()
    link.unlink()


def test_a_socket_is_bound_for_us_only_whatever_the_umask(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    before = os.umask(0o022)
    try:
        bind_endpoint(context.socket(zmq.ROUTER), f"ipc://{tmp_path}/socket")
        assert stat.S_IMODE((tmp_path / "socket").stat().st_mode) == 0o700
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
        context.destroy(linger=0)


# -- what the code doesn't do

PACKAGES = ("engine", "worker", "protocol", "cli", "stages", "omni_engine")
UNSAFE_MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib",
     "jsonpickle"}
)  # fmt: skip
UNSAFE_CALLS = frozenset(
    {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
     "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all", "os.system", "os.popen",
     "eval", "exec", "compile", "__import__", "send_pyobj", "recv_pyobj", "load_pickle"}
)  # fmt: skip
UNSAFE_YAML = frozenset({"Loader", "UnsafeLoader", "FullLoader", "CLoader", "CUnsafeLoader"})
UNSAFE_TRUE = frozenset({"allow_pickle", "trust_remote_code", "shell"})


def unsafe_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of what can run code that comes with data; texts may mention it."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=module, names=aliases):
                names = [module or "", *(f"{module}.{alias.name}" for alias in aliases)]
            case ast.Call(func=function):
                called = ast.unparse(function)
                found = {called, called.rpartition(".")[2]} if "pyobj" in called else {called}
                yield from ((node.lineno, name) for name in found & UNSAFE_CALLS)
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)):
                if name in UNSAFE_TRUE:
                    yield node.value.lineno, f"{name}=True"
            case ast.Attribute(value=ast.Name(id="yaml"), attr=name):
                if name in UNSAFE_YAML:
                    yield node.lineno, f"yaml.{name}"
        for name in names:
            if name.partition(".")[0] in UNSAFE_MODULES or name in UNSAFE_CALLS:
                yield node.lineno, name


def test_nothing_runs_code_that_comes_with_data() -> None:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(sources) > 150
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sources
        for line, what in unsafe_uses(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["import pickle", "import os, shelve", "from marshal import loads", "from torch import load",
     "import dill.settings", "torch.load(x)", "numpy.load(x)", "np.load(x, mmap_mode='r')",
     "f(allow_pickle=True)", "A.from_pretrained(x, trust_remote_code=True)", "eval('1')",
     "exec(code)", "yaml.load(x, Loader=L)", "yaml.unsafe_load(x)", "class A(yaml.Loader): pass",
     "subprocess.run(x, shell=True)", "os.system(x)", "socket.recv_pyobj()", "__import__(name)"]
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert list(unsafe_uses(line))


@pytest.mark.parametrize(
    "line",
    ["'''pickle, torch.load(x) and eval(x)'''  # shell=True", "model.eval()", "json.load(x)",
     "safetensors.torch.load(x)", "f(trust_remote_code=x, shell=False)", "re.compile(x)",
     "yaml.safe_load(x)"]
)  # fmt: skip
def test_the_search_finds_nothing_else(line: str) -> None:
    assert list(unsafe_uses(line)) == []


# -- what clients can't reach


@pytest.mark.parametrize(
    "change",
    [
        {"pipeline": "support_pipelines:EchoPipeline"},
        {"model": "support_pipelines:EchoPipeline"},
        {"model": "/etc"},
        {"model": "org/remote-code"},
        {"trust_remote_code": True},
        {"extra_args": {"pipeline": "os:system"}},
        {"extra_args": {"trust_remote_code": True}},
        {"extra_args": {"custom_pipeline": "org/remote-code"}},
        {"revision": "main"},
    ],
    ids=str,
)
def test_a_request_can_not_name_model_code(pattern_engine: Omni, change: dict[str, Any]) -> None:
    extra = {"sampling_params": change} if "extra_args" in change else change
    with RawClient(pattern_engine.endpoint) as raw:
        error = raw.refusal({"request_id": "r", "prompt": "a", **extra})
    assert error["code"] in ("unknown_field", "unknown_model", "invalid_request"), error
    with OmniClient(pattern_engine.endpoint) as client:
        assert [model["name"] for model in client.models()] == ["pattern"]


@pytest.mark.parametrize("kind", ["load", "load_pipeline", "stop", "drain", "plan", "batch_plan"])
def test_a_client_can_not_send_what_only_engines_send_to_workers(
    pattern_engine: Omni, kind: str
) -> None:
    with RawClient(pattern_engine.endpoint) as raw:
        answer = raw.call(kind, pipeline="os:system")
        assert answer["type"] == "error"
    assert pattern_engine.generate("still here")[0].images is not None


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters, ``good`` and ``other``, that no engine may load from."""
    folder, pipe = tmp_path_factory.mktemp("made"), QwenImagePipeline.from_pretrained(MODEL_DIR)
    for seed, name in enumerate(("good", "other")):
        random_adapter(pipe, folder / "new", seed=seed).rename(folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configured folder that is a link itself; the place that it leads to."""
    real = tmp_path_factory.mktemp("real")
    (real.parent / "linked").symlink_to(real)
    return real


@pytest.fixture(scope="module")
def omni(start_engine: Callable[..., Omni], lora_dir: Path) -> Omni:
    return start_engine(
        max_num_seqs=1, threads=1, lora_modules=[], lora_dirs=[lora_dir.parent / "linked"]
    )


def test_a_configured_folder_may_be_a_link(omni: Omni, adapters: Path, lora_dir: Path) -> None:
    shutil.copy(adapters / "good.safetensors", lora_dir / "inside.safetensors")
    linked = lora_dir.parent / "linked" / "inside.safetensors"
    for path in ("inside.safetensors", linked, lora_dir / "inside.safetensors"):
        assert omni.load_lora("inside", path, replace=True).path == str(
            lora_dir / "inside.safetensors"
        )
    omni.unload_lora("inside")


ESCAPES: dict[str, Callable[[Path, Path], str]] = {
    "above": lambda folder, outside: f"../{outside.parent.name}/{outside.name}",
    "absolute": lambda folder, outside: str(outside),
    "through a link's parent": lambda folder, outside: f"{folder.parent}/linked/../{folder.name}/x",
    "a link to a file": lambda folder, outside: _link(folder / "file.safetensors", outside),
    "a link to a folder": lambda folder, outside: (
        _link(folder / "away", outside.parent) + f"/{outside.name}"
    ),
    "a link in a folder": lambda folder, outside: str(
        Path(_link(_made(folder / "sub") / "one.safetensors", outside)).parent
    ),
    "a link to a link": lambda folder, outside: _link(
        folder / "first.safetensors", Path(_link(folder / "second.safetensors", outside))
    ),
    "a neighbour's name": lambda folder, outside: str(_made(Path(f"{folder}-2")) / outside.name),
    "a null byte": lambda folder, outside: "x\0.safetensors",
    "home": lambda folder, outside: "~/x.safetensors",
    "a device": lambda folder, outside: "/dev/stdin",
}  # fmt: skip


def _link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return str(path)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("escape", ESCAPES)
def test_adapter_paths_lead_to_configured_folders_only(
    omni: Omni, adapters: Path, lora_dir: Path, escape: str
) -> None:
    path = ESCAPES[escape](lora_dir, adapters / "good.safetensors")
    with pytest.raises(InvalidRequestError) as caught:
        omni.load_lora("escaped", path)
    assert caught.value.field == "path"
    assert omni.loras() == []


def test_a_file_that_becomes_a_link_after_its_check_is_not_followed(
    omni: Omni, adapters: Path, lora_dir: Path
) -> None:
    path = lora_dir / "swapped.safetensors"
    shutil.copy(adapters / "good.safetensors", path)
    checked = omni.load_lora("swapped", path)
    path.unlink()
    path.symlink_to(adapters / "other.safetensors")
    small = OmniDiffusionSamplingParams(
        height=32, width=32, num_inference_steps=2, lora_request=LoRARequest("swapped")
    )
    (output,) = omni.generate("a red circle on a white background", small)
    assert [lora.digest for lora in output.raise_for_error().applied_loras] == [checked.digest]
    (info,) = omni.loras()
    assert info.digest == checked.digest
    assert info.error is not None
    assert "leads elsewhere now" in info.error.message
    omni.unload_lora("swapped")


# -- secrets

TOKEN = "hf_MARKEDtokenMARKEDtokenMARKEDtoken"


class _ClosedHub(BaseHTTPRequestHandler):
    """Refuses everything, as a hub does where a token is not good enough."""

    tokens: list[str | None]

    def do_HEAD(self) -> None:  # http.server's name
        self._refuse()

    def do_GET(self) -> None:  # http.server's name
        self._refuse()

    def _refuse(self) -> None:
        self.tokens.append(self.headers["Authorization"])
        self.send_response(401)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # its name there
        pass


@contextmanager
def closed_hub() -> Iterator[tuple[str, list[str | None]]]:
    """Yield a hub's address and the authorizations that it is shown."""
    tokens: list[str | None] = []
    handler = type("Hub", (_ClosedHub,), {"tokens": tokens})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", tokens
        finally:
            server.shutdown()
            thread.join()


def test_a_token_in_the_environment_shows_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, log, endpoint = tmp_path / "stages.yaml", tmp_path / "log", f"ipc://{tmp_path}/engine"
    file.write_text(
        f"endpoint: {endpoint}\n"
        "stage_args:\n"
        "  - {stage_id: 0, name: gated, engine_args: {model: org/gated, max_worker_deaths: 1}}\n"
        f"  - {{stage_id: 1, engine_args: {{model: bundled, pipeline: '{PATTERN}'}}}}\n"
    )
    shown = [run_command("config", "show", "--config", str(file)).out]
    with closed_hub() as (hub, authorizations), log.open("w") as errors:
        for name, value in (
            ("HF_TOKEN", TOKEN), ("HF_ENDPOINT", hub), ("HF_HUB_OFFLINE", "0"),
            ("HF_HOME", str(tmp_path / "hub")), ("HF_DEBUG", "1"),
            ("OMNI_ENGINE_LOG_FORMAT", "json"),
        ):  # fmt: skip
            monkeypatch.setenv(name, value)
        engine = subprocess.Popen(
            [COMMAND, "serve", "--config", str(file), "--log-level", "debug"],
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        try:
            assert engine.stdout is not None
            shown.append(engine.stdout.readline())
            served = psutil.Process(engine.pid)
            cmdlines = [served.cmdline(), *(worker.cmdline() for worker in served.children())]
            assert len(cmdlines) == 3
            shown += [" ".join(cmdline) for cmdline in cmdlines]
            with OmniClient(endpoint) as client:
                shown.append(str(_status_once_failed(client, "gated")))
                with pytest.raises(OmniError) as caught:
                    client.generate("a", model="gated")[0].raise_for_error()
            shown.append(str(caught.value))
        finally:
            engine.terminate()
            shown.append(engine.communicate(timeout=60)[0])
    shown.append(log.read_text())
    assert f"Bearer {TOKEN}" in authorizations
    assert "org/gated" in shown[-1]
    for text in shown:
        assert TOKEN not in text
        assert TOKEN[3:15] not in text


def _status_once_failed(client: OmniClient, name: str) -> dict[str, Any]:
    """Wait until a model could not be loaded; the status that says so."""
    deadline = time.monotonic() + 120
    while True:
        status = client.status()
        if next(stage for stage in status["stages"] if stage["name"] == name)["error"]:
            return status
        assert time.monotonic() < deadline
        time.sleep(0.2)
