"""Keys: made, checked, wanted beyond loopback; who has none, or a wrong one, is not let in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from conftest import PATTERN
from raw_client import RawClient
from support_pipelines import pattern
from test_cli import COMMAND, run_command

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.allowed_clients import AllowedClients
from omni_engine.engine.client_socket import connected_socket
from omni_engine.engine.curve import ClientKeys, new_pair
from omni_engine.engine.curve_server import curve_server
from omni_engine.engine.endpoints import bind_endpoint, check_endpoint
from omni_engine.engine.process import EngineProcess
from omni_engine.protocol.errors import ConfigError, EngineClosedError
from omni_engine.stages.config import CurveArgs, DeployConfig
from omni_engine.stages.key_files import read_public_key
from omni_engine.stages.settings import load_settings

WITHIN_S = 10.0
STAGE = "stage_args: [{stage_id: 0, engine_args: {model: bundled}}]\n"


@dataclass(frozen=True)
class Keys:
    """A folder with keys of an engine, of alice, who may use it, and of mallory, who may not."""

    folder: Path

    @property
    def clients(self) -> Path:
        return self.folder / "clients"

    @property
    def curve(self) -> CurveArgs:
        return CurveArgs(secret_key=str(self.secret("engine")), clients=str(self.clients))

    def secret(self, name: str) -> Path:
        return self.folder / f"{name}.key_secret"

    def of(self, name: str, server: str = "engine") -> ClientKeys:
        return ClientKeys(self.secret(name), self.folder / f"{server}.key")

    def let_in(self, name: str) -> None:
        shutil.copy(self.folder / f"{name}.key", self.clients)

    def secrets(self) -> set[str]:
        texts = [path.read_text() for path in self.folder.glob("*.key_secret")]
        return {found for text in texts for found in re.findall(r'secret-key = "(.{40})"', text)}


def make_keys(folder: Path) -> Keys:
    keys = Keys(folder)
    for name in ("engine", "alice", "mallory"):
        new_pair(folder, name)
    keys.clients.mkdir(mode=0o700)
    keys.let_in("alice")
    return keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@dataclass(frozen=True)
class Served:
    """An engine that the command line serves beyond loopback."""

    keys: Keys
    endpoint: str
    log: Path
    pid: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    keys, log = make_keys(folder / "keys"), folder / "log"
    command = [COMMAND, "serve", "--pipeline", PATTERN, "--devices", "cpu", "--name", "pattern",
               "--endpoint", "tcp://0.0.0.0:*", "--log-level", "debug",
               "--curve-secret-key", str(keys.secret("engine")),
               "--curve-clients", str(keys.clients)]  # fmt: skip
    with log.open("w") as errors:
        engine = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    try:
        assert engine.stdout is not None
        announced = engine.stdout.readline()
        found = re.search(r"tcp://0\.0\.0\.0:\d+", announced)
        assert found is not None, log.read_text()
        port = found[0].rpartition(":")[2]
        tried = f"--connect tcp://HOST:{port} --key YOU.key_secret --server-key engine.key\n"
        assert announced.endswith(tried)
        assert engine.stdout.readline() == "pattern is ready\n"
        yield Served(keys, found[0], log, engine.pid)
        os.killpg(engine.pid, signal.SIGINT)
        engine.communicate(timeout=60)
        assert engine.returncode == 0, log.read_text()
    finally:
        engine.kill()
        engine.communicate()


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- making and reading keys


def test_new_keys_are_readable_as_they_must_be(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        done = run_command("keys", "new", "alice", "-o", str(tmp_path / "new"))
    finally:
        os.umask(before)
    public, secret = tmp_path / "new" / "alice.key", tmp_path / "new" / "alice.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644
    assert stat.S_IMODE(public.parent.stat().st_mode) == 0o700
    assert done.code == 0
    for path in (public, secret):
        assert str(path) in done.out
    (secret_key,) = Keys(public.parent).secrets()
    assert secret_key not in done.out + done.err + public.read_text()


@pytest.mark.parametrize("there", ["alice.key", "alice.key_secret"])
def test_keys_are_never_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    done = run_command("keys", "new", "alice", "-o", str(tmp_path))
    assert (done.code, done.out) == (2, "")
    assert "never overwritten" in done.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {there: "precious"}


@pytest.mark.parametrize("name", ["../alice", "a/b", "", "-o", ".hidden", "a b", "x" * 101, "ä"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name of a key"):
        new_pair(tmp_path / "keys", name)
    assert list(tmp_path.iterdir()) == []


SPOILT_KEYS: dict[str, tuple[Callable[[Keys], object], str]] = {
    "missing": (lambda k: k.secret("alice").unlink(), "omni-engine keys new"),
    "for the group": (lambda k: k.secret("alice").chmod(0o640), "chmod 600 "),
    "for others": (lambda k: k.secret("alice").chmod(0o604), "chmod 600 "),
    "the public one": (
        lambda k: shutil.copy(k.folder / "alice.key", k.secret("alice")),
        "holds no secret key",
    ),
    "empty": (lambda k: k.secret("alice").write_text(""), "holds no key"),
    "no text": (lambda k: k.secret("alice").write_bytes(b"\xff" * 100), "holds no key"),
    "endless": (lambda k: k.secret("alice").write_bytes(b"#" * (1 << 20)), "holds no key"),
    "too short": (
        lambda k: k.secret("alice").write_text('public-key = "abc"\nsecret-key = "abc"'),
        "holds no key",
    ),
    "another's half": (
        lambda k: k.secret("alice").write_text(
            k.secret("alice").read_text().replace(
                Keys.secrets(k).pop(), zmq.curve_keypair()[1].decode()
            )
        ),
        "do not belong together",
    ),
    "a pipe": (lambda k: (k.secret("alice").unlink(), os.mkfifo(k.secret("alice"), 0o600)),
               "is no file"),
    "a folder": (lambda k: (k.secret("alice").unlink(), k.secret("alice").mkdir()), "directory"),
    "no server key": (lambda k: (k.folder / "engine.key").unlink(), "omni-engine keys new"),
    "a bad server key": (lambda k: (k.folder / "engine.key").write_text("x"), "holds no key"),
}  # fmt: skip


@pytest.mark.parametrize("spoilt", SPOILT_KEYS)
def test_keys_that_a_client_can_not_use_are_refused_with_the_fix(keys: Keys, spoilt: str) -> None:
    (keys.folder / "mallory.key_secret").unlink()
    (keys.folder / "engine.key_secret").unlink()
    secrets = keys.secrets()
    spoil, wanted = SPOILT_KEYS[spoilt]
    spoil(keys)
    secrets |= keys.secrets() if spoilt == "another's half" else set()
    with pytest.raises(ConfigError) as caught:
        OmniClient("tcp://127.0.0.1:9", keys=keys.of("alice"))
    assert wanted in str(caught.value)
    assert caught.value.field in ("secret_key_file", "server_key_file")
    assert not any(secret in str(caught.value) for secret in secrets)


# -- settings


def problems(folder: Path, text: str, **options: object) -> str:
    file = folder / "stages.yaml"
    file.write_text(text + STAGE)
    with pytest.raises(ConfigError) as caught:
        load_settings(config_path=file, overrides=options)
    return str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5570", "tcp://*:5570", "tcp://192.0.2.1:*", "tcp://[::]:5570",
                 "tcp://127.0.0.1;192.0.2.1:5570", "tcp://127.0.0.1.example.org:5570"]
)  # fmt: skip
def test_tcp_beyond_loopback_requires_keys(tmp_path: Path, keys: Keys, endpoint: str) -> None:
    found = problems(tmp_path, f'endpoint: "{endpoint}"\n')
    assert f"{tmp_path}/stages.yaml:1:1: endpoint: " in found
    assert "omni-engine keys new" in found
    with pytest.raises(ConfigError, match="omni-engine keys new"):
        check_endpoint(endpoint)
    options = {"curve_secret_key": keys.secret("engine"), "curve_clients": keys.clients}
    given = load_settings(config_path=tmp_path / "stages.yaml", overrides=options).config
    assert (given.endpoint, given.curve) == (endpoint, keys.curve)


def test_an_engine_does_not_listen_beyond_loopback_without_keys(keys: Keys) -> None:
    config = load_settings().config.model_dump(mode="json")
    for curve in ({}, {"secret_key": str(keys.secret("engine"))}, {"clients": str(keys.clients)}):
        unchecked = DeployConfig.model_validate(
            {**config, "endpoint": "tcp://0.0.0.0:*", "curve": curve}
        )
        with pytest.raises(ConfigError, match="omni-engine keys new"):
            EngineProcess(unchecked)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5570", "tcp://localhost:*", "ipc:///x/y"])
def test_on_this_machine_keys_are_optional(tmp_path: Path, keys: Keys, endpoint: str) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text(f"endpoint: {endpoint}\n{STAGE}")
    assert load_settings(config_path=file).config.curve == CurveArgs()
    options = {"curve_secret_key": keys.secret("engine"), "curve_clients": keys.clients}
    assert load_settings(config_path=file, overrides=options).config.curve == keys.curve


def test_wrong_settings_are_named_with_their_line_and_the_fix(tmp_path: Path, keys: Keys) -> None:
    secret, clients = f"  secret_key: {keys.secret('engine')}\n", f"  clients: {keys.clients}\n"
    for text, place, wanted in (
        (f"curve:\n{secret}", "2:3: curve.secret_key", "no effect without curve.clients"),
        (f"curve:\n{clients}", "2:3: curve.clients", "no effect without curve.secret_key"),
        (f"curve:\n{clients}  secret_key: gone\n", "3:3: curve.secret_key", f"{tmp_path}/gone"),
        (f"curve:\n{secret}  clients: gone\n", "3:3: curve.clients", f"no folder {tmp_path}/gone"),
        (f"curve:\n{secret}  client: x\n", "3:3: curve.client", "did you mean clients?"),
    ):
        found = problems(tmp_path, text)
        assert f"stages.yaml:{place}: " in found
        assert wanted in found
    keys.secret("engine").chmod(0o644)
    assert f"run: chmod 600 {keys.secret('engine')}" in problems(tmp_path, "curve:\n" + secret)


def test_paths_are_relative_to_the_file_or_the_working_directory(
    tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keys.folder / "stages.yaml"
    file.write_text("curve: {secret_key: engine.key_secret, clients: ./clients}\n" + STAGE)
    assert load_settings(config_path=file).config.curve == keys.curve
    monkeypatch.chdir(keys.folder)
    given = load_settings(
        overrides={"curve_secret_key": "engine.key_secret", "curve_clients": "clients"}
    )
    assert given.config.curve == keys.curve


# -- who is let in


def connect(served: Served, keys: ClientKeys | None) -> OmniClient:
    """Connect as another machine would, if the keys let it."""
    return OmniClient(served.endpoint.replace("0.0.0.0", "127.0.0.1"), keys=keys)


def test_a_client_with_a_known_key_makes_pictures(served: Served) -> None:
    with OmniClient(served.endpoint, keys=served.keys.of("alice")) as client:
        (output,) = client.generate("a cat", OmniDiffusionSamplingParams(seed=7))
    assert output.images is not None
    np.testing.assert_array_equal(output.images[0], pattern("a cat", 7, 16, 16))


REFUSED = {
    "an unknown key": (
        lambda keys: keys.of("mallory"), "does not know", "curve.clients folder, as NAME.key"
    ),
    "the wrong server's key": (
        lambda keys: keys.of("alice", server="mallory"), "another key, or none", "server key file"
    ),
    "no keys": (lambda keys: None, "no client without keys", "--key and --server-key"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_at_once_and_told_why(served: Served, case: str) -> None:
    chosen, message, hint = REFUSED[case]
    started = time.monotonic()
    with pytest.raises(EngineClosedError) as caught:
        connect(served, chosen(served.keys))
    assert time.monotonic() - started < WITHIN_S
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_without_keys_nothing_that_is_sent_arrives(served: Served) -> None:
    client = RawClient(served.endpoint, timeout_s=1.0)
    try:
        client.send("hello", client="raw")
        assert not client.socket.poll(1000)
    finally:
        client.socket.close(linger=0)
        client._context.destroy(linger=0)


def test_keys_for_an_engine_without_any(keys: Keys, client: OmniClient) -> None:
    with pytest.raises(EngineClosedError, match="another key, or none"):
        OmniClient(client.endpoint, keys=keys.of("alice"))


def test_no_engine_at_all(keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # connects, and says nothing
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(EngineClosedError, match="no engine answers"):
            OmniClient(endpoint, keys=keys.of("alice"), connect_timeout_s=0.5)


def test_keys_added_and_removed_later_count_from_then_on(served: Served) -> None:
    keys = served.keys
    new_pair(keys.folder, "bob")
    with pytest.raises(EngineClosedError, match="does not know"):
        connect(served, keys.of("bob"))
    keys.let_in("bob")
    with connect(served, keys.of("bob")) as client:
        (keys.clients / "bob.key").unlink()
        assert client.models()[0]["name"] == "pattern"
        with pytest.raises(EngineClosedError, match="does not know"):
            connect(served, keys.of("bob"))
    new_pair(keys.folder / "second", "bob")
    shutil.copy(keys.folder / "second" / "bob.key", keys.clients)
    with pytest.raises(EngineClosedError, match="does not know"):
        connect(served, keys.of("bob"))
    connect(served, ClientKeys(keys.folder / "second" / "bob.key_secret",
                               keys.folder / "engine.key")).close()  # fmt: skip
    (keys.clients / "bob.key").unlink()


def test_what_else_lies_in_the_folder_lets_nobody_in_and_shuts_nobody_out(served: Served) -> None:
    keys = served.keys
    odd = {
        "garbage.key": lambda path: path.write_bytes(os.urandom(5000)),
        "pipe.key": os.mkfifo,
        "gone.key": lambda path: path.symlink_to("nowhere"),
        "folder.key": Path.mkdir,
        "mallory.txt": lambda path: shutil.copy(keys.folder / "mallory.key", path),
        "mallory.key_secret": lambda path: shutil.copy(keys.secret("mallory"), path),
    }
    for name, make in odd.items():
        make(keys.clients / name)
    try:
        connect(served, keys.of("alice")).close()
        with pytest.raises(EngineClosedError, match="does not know"):
            connect(served, keys.of("mallory"))
        keys.clients.rename(keys.folder / "away")
        with pytest.raises(EngineClosedError, match="does not know"):
            connect(served, keys.of("alice"))
        (keys.folder / "away").rename(keys.clients)
        connect(served, keys.of("alice")).close()
    finally:
        for name in odd:
            path = keys.clients / name
            path.rmdir() if path.is_dir() else path.unlink()


def test_refusals_are_counted_and_the_log_is_not_flooded(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    with curve_server(context, server, keys.curve) as doorkeeper:
        assert doorkeeper is not None
        endpoint = bind_endpoint(server, "tcp://127.0.0.1:*", encrypted=True)
        for _ in range(20):
            with pytest.raises(EngineClosedError):
                connected_socket(zmq.Context(), endpoint, keys.of("mallory"), WITHIN_S)
        assert doorkeeper.refused == 20
        with pytest.raises(EngineClosedError):
            connected_socket(zmq.Context(), endpoint, keys.of("alice", server="mallory"), WITHIN_S)
        wait_for(lambda: doorkeeper.refused > 20)
        trusted: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        connected_socket(trusted, endpoint, keys.of("alice"), WITHIN_S)
        trusted.destroy(linger=0)
    context.destroy(linger=0)
    logged = [record for record in caplog.records if "refused" in record.message]
    unknown, handshake = logged  # once for each reason
    assert "in all so far: 1)" in unknown.getMessage()
    assert "127.0.0.1" in unknown.getMessage()
    public = read_public_key(keys.folder / "mallory.key")
    named = {"event": "connection_refused", "reason": "unknown_key", "count": 1}
    assert vars(unknown).items() >= (named | {"key": public, "address": "127.0.0.1"}).items()
    nameless = {"event": "connection_refused", "reason": "handshake", "count": 21}
    assert vars(handshake).items() >= (nameless | {"key": None, "address": None}).items()


def test_files_that_let_nobody_in_are_warned_of_once(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(keys.folder / "mallory.key", keys.clients / "bob.pub")
    (keys.clients / ".hidden").touch()
    mallory = read_public_key(keys.folder / "mallory.key")
    allowed = AllowedClients(str(keys.clients))
    assert [allowed.name_of(mallory) for _ in range(3)] == [None] * 3
    wanted = f"ignored in {keys.clients}: bob.pub; only files named NAME.key let clients in"
    assert [record.getMessage() for record in caplog.records] == [wanted]
    (keys.clients / "bob.pub").rename(keys.clients / "bob.key")
    for number in range(7):
        (keys.clients / f"{number}.txt").touch()
    assert [allowed.name_of(mallory) for _ in range(3)] == ["bob"] * 3
    assert len(caplog.records) == 2
    assert "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more;" in caplog.records[1].getMessage()


def test_when_nobody_answers_for_the_door_nobody_gets_in(keys: Keys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    with curve_server(context, server, keys.curve):
        endpoint = bind_endpoint(server, "tcp://127.0.0.1:*", encrypted=True)
    for name in ("alice", "mallory"):
        with pytest.raises(EngineClosedError):
            connected_socket(zmq.Context(), endpoint, keys.of(name), 2.0)
    context.destroy(linger=0)


def test_a_folder_that_others_can_write_to_is_warned_of(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.clients.chmod(0o777)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with curve_server(context, context.socket(zmq.ROUTER), keys.curve):
        pass
    context.destroy(linger=0)
    assert f"chmod go-w {keys.clients}" in caplog.text


def test_python_engines_use_their_own_key(
    start_own_engine: Callable[..., Omni], keys: Keys
) -> None:
    omni = start_own_engine(
        pipeline=PATTERN,
        lora_modules=[],
        default_sampling_params={},
        endpoint="tcp://0.0.0.0:*",
        curve_secret_key=keys.secret("engine"),
        curve_clients=keys.clients,
    )
    assert omni.generate(["a", "b"])[1].images is not None
    with OmniClient(omni.endpoint, keys=keys.of("alice")) as client:
        assert client.models()[0]["state"] == "ready"
    with pytest.raises(EngineClosedError, match="does not know"):
        OmniClient(omni.endpoint, keys=keys.of("mallory"))


def test_a_client_that_a_restarted_engine_refuses_waits_no_longer_than_it_may(
    start_own_engine: Callable[..., Omni], keys: Keys
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def start() -> Omni:
        return start_own_engine(
            pipeline=PATTERN, lora_modules=[], default_sampling_params={}, endpoint=endpoint,
            curve_secret_key=keys.secret("engine"), curve_clients=keys.clients,
        )  # fmt: skip

    first = start()
    with OmniClient(endpoint, keys=keys.of("alice"), reconnect_timeout_s=3) as client:
        assert client.models()
        first.close()
        (keys.clients / "alice.key").unlink()
        start()
        started = time.monotonic()
        with pytest.raises(EngineClosedError, match="has not answered"):
            client.models()
        (output,) = client.generate("a cat")
        assert isinstance(output.error, EngineClosedError)
        assert time.monotonic() - started < 2 * 3 + WITHIN_S
        keys.let_in("alice")
        OmniClient(endpoint, keys=keys.of("alice")).close()


# -- the command line


def test_commands_take_keys_as_options_or_from_the_environment(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, server = str(served.keys.secret("alice")), str(served.keys.folder / "engine.key")
    to = ["--connect", served.endpoint]
    both = ["--key", own, "--server-key", server]
    for command in (["status"], ["models"], ["loras"], ["status", "--check"]):
        assert run_command(*command, *to, *both).code == 0
    monkeypatch.setenv("OMNI_ENGINE_KEY", own)
    monkeypatch.setenv("OMNI_ENGINE_SERVER_KEY", server)
    out = str(tmp_path / "pictures")
    assert run_command("generate", "a cat", "-o", out, *to).code == 0
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1
    refused = run_command("models", *to, "--key", str(served.keys.secret("mallory")))
    assert (refused.code, refused.out) == (1, "")
    assert "does not know this client's key" in refused.err


def test_commands_without_keys_say_what_to_do(served: Served) -> None:
    beyond = run_command("status", "--connect", served.endpoint)
    assert beyond.code == 2
    assert "omni-engine keys new" in beyond.err
    near = run_command("status", "--connect", served.endpoint.replace("0.0.0.0", "127.0.0.1"))
    assert near.code == 1
    assert "--key and --server-key" in near.err


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("status --key alice.key_secret", "no effect without --server-key"),
        ("models --server-key engine.key", "no effect without --key"),
        ("generate a -o out --key a --server-key b", "no effect without --connect"),
        ("loras --key a --server-key b list", "stand after it"),
        ("keys new", "NAME"),
        ("keys new a/b", "name of a key"),
        ("serve --curve-clients .", "--curve-clients has no effect without --curve-secret-key"),
        ("serve --curve-clients gone/curve.clients", "/gone/curve.clients"),
        ("serve --endpoint tcp://*:5570", "set --curve-secret-key and --curve-clients"),
    ],
)
def test_wrong_usage(line: str, wanted: str) -> None:
    done = run_command(*line.split())
    assert (done.code, done.out) == (2, "")
    assert wanted in done.error_text


# -- secrets


def test_secret_keys_show_nowhere(served: Served) -> None:
    keys = served.keys
    own = ["--key", str(keys.secret("alice")), "--server-key", str(keys.folder / "engine.key")]
    connect(served, keys.of("alice")).close()
    shown = [
        served.log.read_text(),
        run_command("status", "--connect", served.endpoint, *own, "--json").out,
        run_command("config", "show", "--curve-secret-key", str(keys.secret("engine")),
                    "--curve-clients", str(keys.clients)).out,
        repr(keys.of("alice")),
    ]  # fmt: skip
    engine = psutil.Process(served.pid)
    processes = [engine, *engine.children(recursive=True)]
    assert len(processes) >= 2
    shown += [" ".join(process.cmdline()) for process in processes]
    assert str(keys.secret("engine")) in shown[2]
    assert len(keys.secrets()) >= 3
    for text in shown:
        assert not any(secret in text for secret in keys.secrets())
