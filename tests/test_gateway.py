"""The HTTP gateway as a process: starts, comes back, ends with its engine, keeps its keys."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from conftest import PATTERN
from fastapi import FastAPI
from fastapi.testclient import TestClient
from http_server import COMMAND, HttpServer, http_server
from waiting import wait_for

from omni_engine import OmniClient
from omni_engine.engine.gateway import guards
from omni_engine.engine.gateway.errors import from_engine
from omni_engine.protocol.errors import LimitExceededError, UnsupportedOptionError
from omni_engine.stages.config import ConfigFileError, HttpArgs
from omni_engine.stages.settings import load_settings

ENGINE = ("--pipeline", PATTERN, "--name", "pattern", "--max-num-seqs", "4")
KEY, ADMIN_KEY = "a-key-for-tests", "an-admin-key-for-tests"


def call(url: str, method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    sent = {
        "Content-Type": "application/json",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    request = urllib.request.Request(url, data=data, headers=sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def gateway_of(server: HttpServer) -> psutil.Process:
    def running() -> list[psutil.Process]:
        children = psutil.Process(server.process.pid).children()
        return [c for c in children if any("gateway.process" in part for part in c.cmdline())]

    return wait_for(running)[0]


def private_directory_of(gateway: psutil.Process) -> Path:
    found = [Path(file.path) for file in gateway.open_files()]
    return next(path.parent for path in found if path.name == "alive")


def encoding_s(gateway: psutil.Process) -> float:
    """Processor time of the gateway's busiest thread beside the event loop's."""
    return max(t.user_time for t in gateway.threads() if t.id != gateway.pid)


def draw(server: HttpServer, **fields: Any) -> tuple[int, Any]:
    body = {"prompt": "a prompt", **fields}
    return call(f"{server.url}/v1/images/generations", "POST", body)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    environment = {"OMNI_ENGINE_API_KEY": KEY, "OMNI_ENGINE_ADMIN_KEY": ADMIN_KEY}
    options = ("--cors-origins", "https://allowed.example", "--max-body-bytes", "20000")
    with http_server(*ENGINE, *options, environment=environment) as server:
        yield server


@pytest.mark.parametrize("key", [None, "wrong", KEY + "x", ""])
def test_without_the_right_key_nothing_is_served(server: HttpServer, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    status, body = call(f"{server.url}/v1/models", **headers)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    status, body = call(f"{server.url}/v1/images/generations", "POST", {"prompt": "x"}, **headers)
    assert (status, body["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("key", [KEY, ADMIN_KEY])
def test_both_keys_let_requests_in(server: HttpServer, key: str) -> None:
    status, models = call(f"{server.url}/v1/models", Authorization=f"Bearer {key}")
    assert (status, [model["id"] for model in models["data"]]) == (200, ["pattern"])


def test_the_official_client_knows_a_wrong_key_from_a_right_one(server: HttpServer) -> None:
    address = f"{server.url}/v1"
    with openai.OpenAI(base_url=address, api_key="not the key", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as known:
        assert known.models.list().data


def test_health_and_readiness_need_no_key_and_tell_little(server: HttpServer) -> None:
    status, health = call(f"{server.url}/health")
    assert (status, health) == (
        200, {"status": "ok", "reason": None, "models": {"pattern": "healthy"}}
    )  # fmt: skip
    status, ready = call(f"{server.url}/ready")
    assert (status, ready) == (200, {"ready": True, "models": {"pattern": "ready"}})


def test_keys_are_in_nobodys_command_line(server: HttpServer) -> None:
    for process in psutil.Process(server.process.pid).children(recursive=True):
        line = " ".join(process.cmdline())
        assert KEY not in line
        assert ADMIN_KEY not in line


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nowhere", None, 404, "unknown_url"),
        ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", None, 404, "unknown_model"),
        ("GET", "/v1/files/nothing.png", None, 404, "unknown_file"),
        ("POST", "/v1/images/generations", {"prompt": "x" * 30_000}, 413, "message_too_large"),
    ],
)
def test_errors_have_openais_shape(
    server: HttpServer, method: str, path: str, body: Any, status: int, code: str
) -> None:
    found, answer = call(server.url + path, method, body, Authorization=f"Bearer {KEY}")
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code


def test_another_content_type_is_refused(server: HttpServer) -> None:
    found, answer = call(
        f"{server.url}/v1/images/generations", "POST", {"prompt": "x"},
        Authorization=f"Bearer {KEY}", Content_Type="text/plain",
    )  # fmt: skip
    assert (found, answer["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_whose_length_is_not_told_is_limited_too(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = (
            "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        )
        connection.sendall(head.encode() + b"5000\r\n" + b" " * 0x5000 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_only_allowed_origins_may_call(server: HttpServer) -> None:
    url, key = f"{server.url}/v1/models", f"Bearer {KEY}"
    own = server.url
    for origin, status in [
        ("https://evil.example", 403), ("null", 403), ("https://allowed.example", 200), (own, 200)
    ]:  # fmt: skip
        assert call(url, Origin=origin, Authorization=key)[0] == status, origin
    preflight = urllib.request.Request(
        url,
        method="OPTIONS",
        headers={
            "Origin": "https://allowed.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        },
    )
    with urllib.request.urlopen(preflight, timeout=60) as answer:
        assert answer.headers["access-control-allow-origin"] == "https://allowed.example"
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]


def test_the_documents_load_nothing_from_elsewhere(server: HttpServer) -> None:
    with urllib.request.urlopen(f"{server.url}/docs", timeout=60) as answer:
        page, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert re.findall(r"(?:src|href)=\"(?:https?:)?//", page) == []
    nonce = re.findall(r"nonce-([\w-]+)", policy)[0]
    assert page.count(f'nonce="{nonce}"') == 2


def test_a_gateways_life() -> None:
    """Killed, it comes back; it tells how its engine does; at the end it gives its last answer."""
    with http_server(*ENGINE, "--worker-restart-backoff-s", "3") as server:
        first = gateway_of(server)
        left = private_directory_of(first)
        first.kill()
        assert draw(server, seed=1)[0] == 200  # the socket listens meanwhile
        assert gateway_of(server).pid != first.pid
        own = private_directory_of(gateway_of(server))
        assert (left.exists(), own.exists()) == (False, True)
        assert any("the HTTP gateway ended, exit code -9" in line for line in server.errors)

        server.process.send_signal(signal.SIGSTOP)
        try:
            wait_for(lambda: call(f"{server.url}/health")[0] == 503, 30)
            status, health = call(f"{server.url}/health")
            assert (status, health["status"]) == (503, "unhealthy")
        finally:
            server.process.send_signal(signal.SIGCONT)
        wait_for(lambda: call(f"{server.url}/health")[0] == 200, 30)

        os.kill(status_of(server)["stages"][0]["workers"][0]["pid"], signal.SIGKILL)
        wait_for(lambda: call(f"{server.url}/health")[0] == 503, 30)
        status, health = call(f"{server.url}/health")
        assert (status, health["models"]) == (503, {"pattern": "unhealthy"})
        assert call(f"{server.url}/ready")[0] == 503
        wait_for(lambda: call(f"{server.url}/ready")[0] == 200, 90)

        body = json.dumps({"prompt": "x", "size": "16x16", "extra_args": {"sleep_ms": 1500}})
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(
                "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n"
                "Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            wait_for(lambda: status_of(server)["stages"][0]["running"])
            server.process.send_signal(signal.SIGTERM)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert server.process.wait(60) == 0
        assert not own.exists()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"b64_json"' in answer


def test_it_warns_of_an_open_door_and_ends_with_a_killed_engine_whatever_it_does() -> None:
    def kill(server: HttpServer) -> None:
        gateway = gateway_of(server)
        own = private_directory_of(gateway)
        body = json.dumps({"prompt": "x", "size": "8192x8192", "output_format": "webp"}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(
                b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            wait_for(lambda: encoding_s(gateway) > 1, 60)  # it takes more than 20 s
            server.process.kill()
            gateway.wait(15)
            assert not own.exists()

    noise = ("--pipeline", "support_pipelines:NoisePipeline", "--name", "noise")
    large = ("--max-pixels", str(8192**2), "--max-side", "8192")
    with http_server(*noise, *large, "--host", "0.0.0.0", stop=kill) as server:
        assert len([line for line in server.errors if "without a key" in line]) == 1
        own = f"http://127.0.0.1:{server.port}"
        for host in ("evil.example", f"EVIL.example:{server.port}", "127.0.0.1.evil.example", "[x"):
            for path in ("/v1/models", "/v1/live", "/v1/videos/none/content", "/"):
                status, refusal = call(own + path, Host=host)
                assert (status, refusal["error"]["code"]) == (403, "name_refused"), (host, path)
            assert call(f"{own}/v1/models", Host=host, Origin=f"http://{host}")[0] == 403
            assert call(f"{own}/health", Host=host)[0] == 200
        for host in ("localhost", "127.0.0.1", "[::1]:80", "server:80", "models.localhost"):
            assert call(f"{own}/v1/models", Host=host, Origin=f"http://{host}")[0] == 200, host
        assert call(f"{own}/v1/models", Host="localhost", Origin="http://evil.example")[0] == 403


@pytest.mark.parametrize(
    ("http", "answered"),
    [
        ({"host": "models.example"}, {"models.example", "localhost"}),
        ({"cors_origins": ["https://site.example:8"]}, {"site.example", "localhost"}),
        ({"cors_origins": ["*"]}, {"models.example", "site.example", "evil.example", "localhost"}),
        ({"api_key": KEY}, {"models.example", "site.example", "evil.example", "localhost"}),
    ],
)
def test_configured_names_are_answered(http: dict[str, Any], answered: set[str]) -> None:
    app = FastAPI()
    guards.install(app, HttpArgs(**http))
    names = ("models.example", "site.example", "evil.example", "localhost")
    client = TestClient(app)
    found = {name: client.get("/", headers={"Host": name}).status_code for name in names}
    assert found == {name: 404 if name in answered else 403 for name in names}


def status_of(server: HttpServer) -> dict[str, Any]:
    with OmniClient(server.endpoint) as client:
        return client.status()


def refused(*args: str, **environment: str) -> str:
    done = subprocess.run(
        [COMMAND, *args], capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    return done.stdout + done.stderr


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("serve", *ENGINE, "--port", str(port))
    assert f"can't listen for HTTP at 127.0.0.1:{port}" in said
    assert "--port" in said


def test_options_without_a_port_are_refused() -> None:
    assert "--host has no effect without a port" in refused("serve", *ENGINE, "--host", "0.0.0.0")


def test_bad_keys_are_refused_and_not_shown() -> None:
    said = refused("serve", *ENGINE, "--port", "0", "--api-key", "two words")
    assert "--api-key" in said
    assert "two words" not in said
    assert "OMNI_ENGINE_API_KEY" in refused("serve", *ENGINE, OMNI_ENGINE_API_KEY="")


def test_only_serve_speaks_http(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOptionError, match="only `omni-engine serve` speaks HTTP"):
        load_settings(overrides={"port": 8091}, origin="constructor")
    file = tmp_path / "stages.yaml"
    file.write_text("http: {api_key: 123456}\nport: 1\nstage_args: []\n")
    with pytest.raises(ConfigFileError) as caught:
        load_settings(config_path=file)
    assert "http.api_key: expected a key" in str(caught.value)
    assert "it belongs under http" in str(caught.value)
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("height", "size"),
        ("sampling_params.height x width", "size"),
        ("num_outputs_per_prompt", "n"),
        ("multi_modal_data.image[3]", "image"),
        ("extra_args.oops", "extra_args.oops"),
    ],
)
def test_errors_name_the_field_of_http(field: str, param: str) -> None:
    error = from_engine(LimitExceededError("too much", field=field, expected="less"))
    assert (error.status, error.param) == (400, param)
    assert error.message == "too much. Expected: less."


def test_config_show_never_prints_keys() -> None:
    done = subprocess.run(
        [COMMAND, "config", "show", "--json", "--port", "8091", "--admin-key", ADMIN_KEY],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "OMNI_ENGINE_API_KEY": KEY},
    )  # fmt: skip
    rows = {row["path"]: row["value"] for row in json.loads(done.stdout)}
    assert (rows["http.port"], rows["http.api_key"], rows["http.admin_key"]) == (8091, "***", "***")
    assert KEY not in done.stdout
    assert ADMIN_KEY not in done.stdout


def test_an_engine_that_encrypts_serves_http(tmp_path: Any) -> None:
    keys, clients = tmp_path / "keys", tmp_path / "clients"
    subprocess.run([COMMAND, "keys", "new", "engine", "-o", str(keys)], check=True, timeout=60)
    clients.mkdir()
    secret = str(keys / "engine.key_secret")
    curve = ("--curve-secret-key", secret, "--curve-clients", str(clients))
    with http_server(*ENGINE, *curve) as server:
        assert draw(server, seed=1)[0] == 200
