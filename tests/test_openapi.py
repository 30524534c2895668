"""The OpenAPI document against the running server: nothing that it allows breaks anything."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from conftest import PATTERN
from http_server import HttpServer, http_server
from hypothesis import HealthCheck
from schemathesis.checks import load_all_checks

from omni_engine import OmniClient

KEY = "a-key-for-tests"
ENDLESS = {"/v1/live"}
"""What answers without an end."""

load_all_checks()
SAID_SO = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("status_code_conformance", "content_type_conformance",
                 "response_schema_conformance")
]  # fmt: skip
"""The answer's status, type and shape are among those that the document tells."""


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    params = json.dumps({"num_inference_steps": 1, "height": 16, "width": 16})
    with http_server(
        "--pipeline", PATTERN, "--name", "pattern", "--default-sampling-params", params,
        "--max-pixels", "65536", "--max-outputs-per-prompt", "4", "--admin-key", KEY,
        environment={"OMNI_ENGINE_API_KEY": KEY},
    ) as server:  # fmt: skip
        yield server


def document(server: HttpServer) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=60) as answer:
        read: dict[str, Any] = json.load(answer)
        return read


def test_every_route_tells_its_errors_and_who_may_call(server: HttpServer) -> None:
    found = document(server)
    assert set(found["paths"]) >= {
        "/v1/images/generations", "/v1/images/edits", "/v1/models", "/health", "/ready",
    }  # fmt: skip
    open_to_all = {"/health", "/ready", "/metrics", "/v1/files/{name}"}
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            assert "default" in route["responses"], (path, method)
            if path.startswith("/v1/") and path not in open_to_all:
                assert route.get("security"), (path, method)
    assert "HTTPValidationError" not in json.dumps(found)


@pytest.mark.timeout(600)
def test_what_the_document_allows_breaks_nothing(server: HttpServer) -> None:
    schema = schemathesis.openapi.from_dict(document(server))
    headers = {"Authorization": f"Bearer {KEY}"}
    called: set[str] = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ENDLESS:
            continue
        called.add(operation.path)

        @hypothesis.settings(
            max_examples=25, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy())
        def call(case: Any) -> None:
            answer = case.call(base_url=server.url, headers=headers, timeout=60)
            if answer.status_code != 504:  # the case's own timeout_s was up
                assert answer.status_code < 500, answer.text
            case.validate_response(answer, checks=SAID_SO)

        call()
    assert "/v1/images/generations" in called
    with OmniClient(server.endpoint) as engine:
        assert engine.status()["health"]["healthy"]
        requests = engine.metrics()["stages"][0]["requests"]
    assert requests["completed"] > 0
    assert requests["received"] == requests["completed"] + requests["failed"] + requests["aborted"]
