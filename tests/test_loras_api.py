"""Adapters over HTTP: listed for all, loaded and unloaded with the admin key, as vLLM does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_server import HttpServer, http_server

from omni_engine.stages.bundled import ADAPTER_DIR

USER, ADMIN = "a-user", "an-admin"
DRAWN = {"prompt": "a red circle on a white background", "size": "64x64", "num_inference_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder from which adapters may be loaded."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    keys = {"OMNI_ENGINE_API_KEY": USER, "OMNI_ENGINE_ADMIN_KEY": ADMIN}
    with http_server("--lora-dirs", str(folder), environment=keys) as server:
        yield server


def with_key(server: HttpServer, key: str | None) -> httpx2.Client:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=server.url, headers=headers, timeout=120)


@pytest.fixture
def user(server: HttpServer) -> Iterator[httpx2.Client]:
    with with_key(server, USER) as client:
        yield client


@pytest.fixture
def admin(server: HttpServer) -> Iterator[httpx2.Client]:
    with with_key(server, ADMIN) as client:
        yield client


def named(client: httpx2.Client, **query: str) -> dict[str, dict[str, Any]]:
    answer = client.get("/v1/loras", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "list"
    return {lora["id"]: lora for lora in answer.json()["data"]}


def load(client: httpx2.Client, **body: Any) -> httpx2.Response:
    return client.post("/v1/load_lora_adapter", json=body)


def unload(client: httpx2.Client, name: str) -> httpx2.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_an_adapter_is_loaded_used_replaced_and_unloaded(
    user: httpx2.Client, admin: httpx2.Client, folder: Path
) -> None:
    shutil.copy(ADAPTER_DIR / "night.safetensors", folder / "dusk.safetensors")
    body = {"lora_name": "dusk", "lora_path": "dusk.safetensors", "default_scale": 0.5}
    answer = load(admin, **body, pin=True)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'dusk' added successfully.",
    )
    assert answer.headers["content-type"].startswith("text/plain")
    first = named(user)["dusk"]
    assert (first["object"], first["model"], first["state"]) == ("lora", "bundled", "ready")
    assert (first["default_scale"], first["pin"], first["preload"]) == (0.5, True, False)
    assert str(folder) not in str(first)

    drawn = user.post("/v1/images/generations", json={**DRAWN, "lora": {"name": "dusk"}})
    assert drawn.status_code == 200, drawn.text
    (applied,) = drawn.json()["applied_loras"]
    assert applied == {"name": "dusk", "digest": first["digest"], "scale": 0.5}

    again = load(admin, **body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    shutil.copy(ADAPTER_DIR / "chalk.safetensors", folder / "dusk.safetensors")
    assert load(admin, **{**body, "default_scale": 1}, load_inplace=True).status_code == 200
    second = named(user)["dusk"]
    assert second["digest"] != first["digest"]
    assert (second["default_scale"], second["pin"]) == (1, False)

    answer = unload(admin, "dusk")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'dusk' removed successfully.",
    )
    assert "dusk" not in named(user)
    gone = unload(admin, "dusk")
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")


def test_adapters_are_listed_by_model(user: httpx2.Client) -> None:
    assert {"night", "outline"} <= set(named(user))
    assert named(user, model="bundled") == named(user)
    unknown = user.get("/v1/loras", params={"model": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_model")


def test_who_may_what(server: HttpServer, user: httpx2.Client, admin: httpx2.Client) -> None:
    assert admin.get("/v1/loras").status_code == 200
    calls = {
        "load": {"lora_name": "x", "lora_path": "bundled:night"},
        "unload": {"lora_name": "night"},
    }
    with with_key(server, None) as nobody, with_key(server, "a-use") as guessing:
        for client in (nobody, guessing):
            assert client.get("/v1/loras").status_code == 401
        for client in (nobody, guessing, user):
            for verb, body in calls.items():
                answer = client.post(f"/v1/{verb}_lora_adapter", json=body)
                assert answer.status_code == 401, answer.text
                assert answer.json()["error"]["type"] == "authentication_error"
    assert "night" in named(admin)
    assert "x" not in named(admin)


@pytest.mark.parametrize(
    ("body", "status", "param", "told"),
    [
        ({"lora_path": "/etc"}, 400, "lora_path", "lora_dirs"),
        ({"lora_path": "broken.safetensors"}, 422, "lora_path", "safetensors"),
        ({"lora_path": "bundled:nihgt"}, 400, "lora_path", "night"),
        ({"lora_name": "a:b"}, 400, "lora_name", "':'"),
        ({"lora_name": "night"}, 400, "lora_name", "in use"),
        ({"model": "nobody"}, 404, "model", "nobody"),
        ({"lora_nam": "x"}, 400, "lora_nam", "Did you mean 'lora_name'?"),
        ({"default_scale": 101}, 400, "default_scale", "100"),
        ({"lora_path": None}, 400, "lora_path", "string"),
    ],
)
def test_what_can_not_be_loaded_is_refused(
    admin: httpx2.Client, folder: Path, body: dict[str, Any], status: int, param: str, told: str
) -> None:
    (folder / "broken.safetensors").write_bytes(b"no tensors")
    before = set(named(admin))
    answer = load(admin, **{"lora_name": "new", "lora_path": "bundled:night", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert told in error["message"]
    assert set(named(admin)) == before
