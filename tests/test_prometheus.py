"""`/metrics` of a real server, under load and without its engine; its documents and dashboard."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from http_server import HttpServer, http_server
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from test_docs import Session, blocks
from waiting import wait_for

from omni_engine import OmniClient, OmniDiffusionSamplingParams
from omni_engine.engine.gateway import http_figures
from omni_engine.engine.gateway.busy_ratios import LONGEST_S, SHORTEST_S, BusyRatios
from omni_engine.engine.gateway.http_figures import HttpFigures, HttpMeter
from omni_engine.engine.gateway.metric_families import WORKER_STATES, families_of
from omni_engine.engine.worker_handle import WorkerState

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "docs/grafana-dashboard.json"
STAGES = """
stage_args:
  - stage_id: 0
    name: shapes
    engine_args:
      model: bundled
      max_num_seqs: 4
      default_sampling_params: {height: 64, width: 64, num_inference_steps: 2}
      lora_modules: [{name: night, path: "bundled:night"}, {name: tiny, path: "bundled:tiny"}]
    runtime: {devices: cpu, threads: 1}
  - stage_id: 1
    name: gated
    engine_args:
      {model: bundled, pipeline: "gated_pipelines:GatedSteps", step_execution: true}
    runtime: {devices: cpu, threads: 1}
"""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    config = tmp_path_factory.mktemp("metrics") / "stages.yaml"
    config.write_text(STAGES)
    with http_server("--config", str(config)) as server:
        yield server


@pytest.fixture
def http(server: HttpServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        yield http


@pytest.fixture
def engine(server: HttpServer) -> Iterator[OmniClient]:
    with OmniClient(server.endpoint) as client:
        yield client


def scrape(http: httpx2.Client) -> Samples:
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def draw(http: httpx2.Client, **fields: Any) -> int:
    body = {"prompt": "a red circle on a white background", "model": "shapes", **fields}
    return int(http.post("/v1/images/generations", json=body).status_code)


def load(http: httpx2.Client, engine: OmniClient, gate: Path) -> list[int]:
    """Requests that end in every way that there is; returns HTTP's answers to those sent so."""
    holding = OmniDiffusionSamplingParams(extra_args={"holds": [[1, str(gate)]]})
    aborted = engine.submit("a", holding, model="gated")
    wait_for(lambda: aborted.status == "running")
    aborted.abort()
    engine.metrics()  # answered after what was said before it
    gate.touch()
    with ThreadPoolExecutor(8) as pool:
        fields: list[dict[str, Any]] = [{"seed": seed} for seed in range(5)]
        fields += [{"lora": {"name": "night"}}, {"lora": {"name": "tiny"}}]
        fields += [{"model": "gated", "extra_args": {"raise_text": "no"}}] * 2
        fields += [{"lora": {"name": "nobody"}}, {"size": "65x64"}, {"siez": "64x64"}]
        statuses = list(pool.map(lambda given: draw(http, **given), fields))
    assert aborted.result(60).aborted
    return statuses


def test_what_is_scraped_is_what_the_engine_counts(
    http: httpx2.Client, engine: OmniClient, tmp_path: Path
) -> None:
    """Every kind of end is counted once, and nothing is left when all has ended."""
    assert load(http, engine, tmp_path / "gate") == [200] * 7 + [500] * 2 + [404, 400, 400]
    wait_for(lambda: all(not s["waiting"] + s["running"] for s in engine.metrics()["stages"]))
    held = wait_for(lambda: engine.metrics()["stages"][0]["workers"][0]["adapters"])
    wait_for(lambda: engine.metrics()["stages"][0]["workers"][0]["adapters"]["on_device"] == 2)
    samples, told = scrape(http), engine.metrics()
    assert held is not None
    for stage in told["stages"]:
        model = {"model": stage["name"]}
        for kind, count in stage["requests"].items():
            assert value(samples, f"omni_requests_{kind}_total", **model) == count
        kinds = ("completed", "failed", "aborted")
        assert value(samples, "omni_requests_received_total", **model) == sum(
            value(samples, f"omni_requests_{kind}_total", **model) for kind in kinds
        )
        for name, key in (("waiting", "waiting"), ("running", "running")):
            assert value(samples, f"omni_requests_{name}", **model) == stage[key] == 0
        for name in ("outputs", "steps", "forwards"):
            assert value(samples, f"omni_{name}_total", **model) == stage[name]
        assert value(samples, "omni_oldest_waiting_seconds", **model) == 0
        assert value(samples, "omni_stage_healthy", **model) == 1
        assert value(samples, "omni_max_num_seqs", **model) == stage["max_num_seqs"]
        _check_histograms(samples, stage)
        for worker in stage["workers"]:
            _check_worker(samples, {**model, "worker": worker["worker_id"]}, worker)
        states = {
            state: value(samples, "omni_workers", **model, state=state) for state in WORKER_STATES
        }
        assert states == {**dict.fromkeys(WORKER_STATES, 0.0), "idle": 1.0}
    shapes, gated = told["stages"]
    assert value(samples, "omni_requests_completed_total", model="shapes") == 7
    assert value(samples, "omni_steps_total", model="shapes") == 14
    assert shapes["requests"]["failed"] == 0
    assert value(samples, "omni_requests_aborted_total", model="gated") == 1
    error = {"model": "gated", "code": "model_error"}
    assert value(samples, "omni_request_errors_total", **error) == gated["errors"]["model_error"]
    assert value(samples, "omni_request_errors_total", **error) == 2
    for code, count in told["refused"].items():
        assert value(samples, "omni_requests_refused_total", code=code) == count
    assert value(samples, "omni_requests_refused_total", code="unknown_adapter") == 1
    assert value(samples, "omni_engine_up") == 1
    assert value(samples, "omni_clients") == told["clients"] == 2
    for link in ("clients", "workers"):
        for direction in ("in", "out"):
            assert value(samples, "omni_bytes_total", link=link, direction=direction) > 1000


def _check_histograms(samples: Samples, stage: dict[str, Any]) -> None:
    names = {
        "queue_s": "omni_request_queue_seconds",
        "run_s": "omni_request_run_seconds",
        "total_s": "omni_request_seconds",
        "batch_size": "omni_batch_size",
    }
    for key, name in names.items():
        told = stage["histograms"][key]
        model = {"model": stage["name"]}
        assert value(samples, f"{name}_count", **model) == sum(told["counts"]) > 0
        assert value(samples, f"{name}_sum", **model) == pytest.approx(told["sum"])
        below = 0
        for bound, count in zip([*told["bounds"], "+Inf"], told["counts"], strict=True):
            below += count
            shown = bound if isinstance(bound, str) else str(float(bound))
            assert value(samples, f"{name}_bucket", **model, le=shown) == below
    assert sum(stage["histograms"]["total_s"]["counts"]) == stage["requests"]["received"]


def _check_worker(samples: Samples, labels: dict[str, str], worker: dict[str, Any]) -> None:
    for key in ("batches", "ticks", "restarts"):
        assert value(samples, f"omni_worker_{key}_total", **labels) == worker[key]
    busy = value(samples, "omni_worker_busy_seconds_total", **labels)
    assert busy == pytest.approx(worker["busy_s"])
    if (adapters := worker["adapters"]) is None:
        return
    for key in ("switches", "loads", "evictions"):
        assert value(samples, f"omni_adapter_{key}_total", **labels) == adapters[key]
    for key in ("load", "wait"):
        told = value(samples, f"omni_adapter_{key}_seconds_total", **labels)
        assert told == pytest.approx(adapters[f"{key}_s"])
    for place in ("device", "host"):
        hits = value(samples, "omni_adapter_cache_hits_total", **labels, where=place)
        assert hits == adapters[f"{place}_hits"]
        held = value(samples, "omni_adapter_bytes", **labels, where=place)
        assert held == adapters[f"{place}_bytes"]
    assert value(samples, "omni_adapters_on_device", **labels) == adapters["on_device"]
    assert value(samples, "omni_adapters_in_memory", **labels) == adapters["in_memory"]


def test_http_requests_are_counted_by_route_method_and_status(
    server: HttpServer, http: httpx2.Client, engine: OmniClient, tmp_path: Path
) -> None:
    before = scrape(http)

    def grown(now: Samples, **labels: str) -> float:
        key = "omni_http_requests_total", frozenset(labels.items())
        return now[key] - before.get(key, 0)

    assert draw(http) == 200
    http.get("/v1/models/shapes")
    http.get("/v1/models/nobody")
    http.get("/nothing/here")
    http.request("BREW", "/v1/models")
    after = scrape(http)
    route = {"route": "/v1/images/generations", "method": "POST"}
    assert grown(after, **route, status="200") == 1
    models = {"route": "/v1/models/{model:path}", "method": "GET"}
    assert grown(after, **models, status="200") == grown(after, **models, status="404") == 1
    assert grown(after, route="none", method="GET", status="404") == 1
    assert grown(after, route="/v1/models", method="other", status="405") == 1
    seconds = "omni_http_request_duration_seconds"
    count = value(after, f"{seconds}_count", **route)
    assert count == sum(
        number
        for (name, labels), number in after.items()
        if name == "omni_http_requests_total" and frozenset(route.items()) <= labels
    )
    assert value(after, "omni_http_in_flight") == 1  # the scrape itself
    encoded = "omni_encode_seconds_count"
    assert value(after, encoded) > value(before, encoded)

    gate = tmp_path / "gate"
    body = {"prompt": "a", "model": "gated", "extra_args": {"holds": [[1, str(gate)]]}}
    text = json.dumps(body)
    with socket.create_connection(("127.0.0.1", server.port)) as rude:
        head = f"POST /v1/images/generations HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        rude.sendall((head + text).encode())
        wait_for(lambda: engine.metrics()["stages"][1]["running"] == 1)
        assert value(scrape(http), "omni_http_in_flight") == 2
    wait_for(lambda: value(scrape(http), "omni_http_in_flight") == 1)
    gate.touch()
    assert grown(scrape(http), **route, status="499") == 1


def test_a_client_that_leaves_in_the_middle_of_its_upload_is_no_error(
    server: HttpServer, http: httpx2.Client
) -> None:
    kinds = {
        "/v1/images/generations": "application/json",
        "/v1/images/edits": "multipart/form-data; boundary=B",
        "/v1/videos": "application/json",
    }

    def counted(status: str) -> float:
        samples = scrape(http)
        return sum(
            samples.get(
                ("omni_http_requests_total",
                 frozenset({"route": path, "method": "POST", "status": status}.items())), 0.0)
            for path in kinds
        )  # fmt: skip

    left, failed, told = counted("499"), counted("500"), len(server.errors)
    for path, kind in kinds.items():
        with socket.create_connection(("127.0.0.1", server.port)) as rude:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
            head += f"Content-Type: {kind}\r\nContent-Length: 1000\r\n\r\n--B\r\n"
            rude.sendall(head.encode())
    wait_for(lambda: counted("499") == left + len(kinds))
    assert counted("500") == failed
    assert not [line for line in server.errors[told:] if "Traceback" in line]


def test_both_formats_parse(http: httpx2.Client) -> None:
    plain = families(http.get("/metrics").text)
    answer = http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    parsed = {
        family.name: family for family in openmetrics.text_string_to_metric_families(answer.text)
    }
    assert set(parsed) == {name.removesuffix("_total") for name in plain}
    for family in parsed.values():
        assert family.documentation.endswith("."), family.name
    assert http.get("/metrics", headers={"Accept": "*/*;q=x,application/"}).status_code == 200


def families(text: str) -> set[str]:
    """The names in a scrape, with or without samples; counters as their samples are called."""
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_the_document_and_the_dashboard_name_what_there_is(http: httpx2.Client) -> None:
    text = http.get("/metrics").text
    there = families(text)
    assert len(there) > 40
    table = re.findall(r"^\| `(omni_\w+)` \| (\w+) \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert {name for name, _, _ in table} == there
    assert {(name, kind) for name, kind, _ in table} == set(
        re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    )
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    queries += [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
    in_queries = set(re.findall(r"\bomni_\w+", " ".join(queries)))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in in_queries} == there
    in_text = set(re.findall(r"`[^`|]*?\b(omni_\w+)", DOCUMENT.read_text()))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in in_text} == there

    labels = {name: {key for key, _ in found} for (name, found) in scrape(http)}
    for name, _, told in table:
        if (found := labels.get(name, labels.get(f"{name}_sum"))) is not None:
            assert set(re.findall(r"`(\w+)`", told)) == found, name


def test_the_dashboard_can_be_imported() -> None:
    """As far as can be said without Grafana: ids are unique, places free, variables defined."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 37
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert defined == {"datasource", "model", "worker"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used == defined | {"__rate_interval"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]


@pytest.mark.timeout(600)
def test_the_documents_commands_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    session = Session(tmp_path)
    try:
        for language, name, text in blocks("docs/metrics.md"):
            session.run(language, name, text.replace("8091", str(port)))
    finally:
        session.close()
    for target in re.findall(r"\]\(([^)#]+)", DOCUMENT.read_text()):
        assert (DOCUMENT.parent / target).exists(), target


def test_managing_adapters_is_off_without_an_admin_key(http: httpx2.Client) -> None:
    body = {"lora_name": "more", "lora_path": "bundled:chalk"}
    answer = http.post("/v1/load_lora_adapter", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "management_off")
    assert "more" not in [lora["id"] for lora in http.get("/v1/loras").json()["data"]]


def test_a_scrape_while_the_engine_hangs(server: HttpServer, http: httpx2.Client) -> None:
    """The engine is down then, and the gateway's own figures go on."""
    os.kill(server.process.pid, signal.SIGSTOP)
    resume = threading.Timer(60, os.kill, (server.process.pid, signal.SIGCONT))
    resume.start()  # should this test fail
    try:
        samples = scrape(http)
    finally:
        resume.cancel()
        os.kill(server.process.pid, signal.SIGCONT)
    assert value(samples, "omni_engine_up") == 0
    assert value(samples, "omni_http_in_flight") == 1
    assert not [name for name, _ in samples if name.startswith("omni_requests_")]
    wait_for(lambda: value(scrape(http), "omni_engine_up") == 1, 60)


def test_all_families_are_there_without_an_engine() -> None:
    def worker_at(busy_s: float) -> dict[str, Any]:
        return {"stages": [{"name": "m", "workers": [{"worker_id": "w", "busy_s": busy_s}]}]}

    assert {state.value for state in WorkerState} == set(WORKER_STATES)
    assert len(list(families_of(None, {}))) > 30
    ratios = BusyRatios()
    assert ratios.note(worker_at(5.0), 100.0) == {}
    assert ratios.note(worker_at(6.0), 100.5) == {}
    assert ratios.note(worker_at(9.0), 100.0 + SHORTEST_S) == {("m", "w"): pytest.approx(0.4)}
    assert ratios.note(worker_at(30.0), 120.0) == {("m", "w"): pytest.approx(1.0)}
    assert ratios.note(worker_at(1.0), 131.0) == {}, "another engine"
    assert ratios.note(worker_at(2.0), 131.0 + LONGEST_S + 1) == {}, "too long ago"
    assert ratios.note(worker_at(3.0), 142.0 + LONGEST_S) == {("m", "w"): pytest.approx(0.1)}


def test_the_access_log_tells_every_request(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    app.add_middleware(HttpMeter, figures=HttpFigures())
    with caplog.at_level(logging.DEBUG, logger=http_figures.__name__):
        TestClient(app, client=("192.0.2.7", 1)).get("/nothing?secret=1")
    (record,) = [one for one in caplog.records if one.name == http_figures.__name__]
    assert re.fullmatch(r"GET /nothing from 192\.0\.2\.7: 404, \d+\.\d ms", record.getMessage())
    told = vars(record)
    assert (told["event"], told["status"], told["path"]) == ("http_request", 404, "/nothing")
