"""The protocol as documented: a client written from the page works, and the page says what is."""

from __future__ import annotations

import ast
import dataclasses
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raw_client import Array, RawClient
from support_pipelines import pattern
from test_step_mode import GATED

from omni_engine import Omni
from omni_engine.engine import client_desk, connection, pending, timeline
from omni_engine.protocol import adapters, codec, messages, plans, requests
from omni_engine.protocol.adapters import Adapter, AdapterActivation, AdapterReport, AdaptersHeld
from omni_engine.protocol.errors import ERRORS_BY_CODE, OmniError
from omni_engine.protocol.lora_info import LoRAInfo
from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.plans import (
    BatchPlan,
    PipelineCapabilities,
    StepPlan,
    StepReport,
    WorkerSpec,
)
from omni_engine.protocol.requests import build_request
from omni_engine.protocol.sampling import SAMPLING_FIELDS
from omni_engine.protocol.tensors import ITEM_SIZES, MAX_DIMENSIONS
from omni_engine.stages.bundled import ADAPTER_DIR
from omni_engine.stages.config import DeployConfig, Limits

_WORDS = {2: "two", 3: "three", 4: "four"}
PAGE = Path(__file__).parent.parent / "docs" / "protocol.md"


@pytest.fixture
def raw(pattern_engine: Omni) -> Iterator[RawClient]:
    with RawClient(pattern_engine.endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def stepped_engine(start_engine: Callable[..., Omni]) -> Omni:
    """One worker that steps a hand-written pipeline."""
    return start_engine("bundled", max_num_seqs=4, **GATED)


@pytest.fixture
def raw_stepped(stepped_engine: Omni) -> Iterator[RawClient]:
    with RawClient(stepped_engine.endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def adapter_engine(
    start_engine: Callable[..., Omni], tmp_path_factory: pytest.TempPathFactory
) -> Omni:
    """One worker with the bundled model, one adapter and a folder for more."""
    return start_engine(
        "bundled",
        threads=1,
        default_sampling_params={"height": 32, "width": 32, "num_inference_steps": 1},
        lora_modules=[{"name": "night", "path": "bundled:night"}],
        lora_dirs=[tmp_path_factory.mktemp("loras")],
    )


@pytest.fixture
def raw_with_adapter(adapter_engine: Omni) -> Iterator[RawClient]:
    with RawClient(adapter_engine.endpoint) as client:
        yield client


def request(request_id: str, prompt: str = "a", **parameters: object) -> dict[str, object]:
    return {"request_id": request_id, "prompt": prompt, "sampling_params": parameters}


# -- a client from the page alone


def test_the_raw_client_uses_nothing_of_ours() -> None:
    tree = ast.parse((Path(__file__).parent / "raw_client.py").read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                     [alias.name for alias in node.names])
    }  # fmt: skip
    assert imported - set(sys.stdlib_module_names) == {"zmq", "msgpack"}


def test_hello(raw: RawClient) -> None:
    welcome = raw.call("hello", client="raw")
    assert welcome["type"] == "welcome"
    assert welcome["v"] == 1
    assert welcome["models"] == [
        {"name": "pattern", "state": "ready", "error": None, "adapters": []}
    ]
    assert raw.call("wait_ready")["models"] == welcome["models"]


def test_two_requests_from_submission_to_pictures(raw: RawClient) -> None:
    message_id = raw.submit(
        request("one", "first", seed=3, height=16, width=24),
        request("two", "second", seed=2**40, num_outputs_per_prompt=2),
    )
    assert raw.reply(message_id)["request_ids"] == ["one", "two"]
    sizes = {"one": (16, 24), "two": (16, 16)}
    prompts = {"one": ("first", 3, 1), "two": ("second", 2**40, 2)}
    for request_id, (height, width) in sizes.items():
        story = raw.story(request_id)
        assert [m.get("status") for m in story] == ["waiting", "running", None]
        output = story[-1]["output"]
        assert output["error"] is None
        prompt, seed, count = prompts[request_id]
        assert output["seed"] == seed
        for i, picture in enumerate(output["images"]):
            assert (picture.dtype, picture.shape) == ("uint8", (height, width, 3))
            assert bytes(picture.data) == pattern(prompt, seed + i, height, width).tobytes()
        assert len(output["images"]) == count


def test_progress_and_previews(raw_stepped: RawClient) -> None:
    raw_stepped.submit({**request("p", num_inference_steps=7), "preview_every": 3})
    story = raw_stepped.story("p")
    kinds = [message["type"] for message in story]
    assert kinds == ["event", "event", *["progress"] * (len(story) - 3), "output"]
    told = [message for message in story if message["type"] == "progress"]
    steps = [message["step"] for message in told]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 7)
    assert {message["num_steps"] for message in told} == {7}
    previews = {m["step"]: m["preview"] for m in told if m["preview"] is not None}
    assert list(previews) == [3, 6]
    for step, preview in previews.items():
        assert (preview.dtype, preview.shape) == ("uint8", (8, 8, 3))
        assert bytes(preview.data) == bytes([step]) * (8 * 8 * 3)


def test_no_preview_comes_unasked(raw_stepped: RawClient) -> None:
    raw_stepped.submit({**request("p"), "preview_every": None}, request("q"))
    for request_id in "pq":
        story = raw_stepped.story(request_id)
        assert {m["preview"] for m in story if m["type"] == "progress"} == {None}


def test_the_timeline_is_followed_by_number(raw: RawClient) -> None:
    """Every batch comes once, in order, whoever asks how often."""
    seen = []
    since = raw.call("timeline", since=2**63 - 1)["timeline"]["next"]
    for name in ("a", "b", "c"):
        raw.submit(request(name))
        assert raw.output(name)["error"] is None
        drawn = raw.call("timeline", since=since)["timeline"]
        (box,) = drawn["boxes"]
        assert (box["seq"], drawn["next"], drawn["missed"]) == (since, since + 1, 0)
        assert box["start_s"] < box["end_s"] <= drawn["now_s"]
        since = drawn["next"]
        seen.append(box["request_ids"])
    assert seen == [["a"], ["b"], ["c"]]
    assert raw.call("timeline", since=since)["timeline"]["boxes"] == []
    latest = raw.call("timeline")["timeline"]["boxes"]
    assert [box["request_ids"] for box in latest[-3:]] == seen


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.5, True, "2", [1]])
def test_since_is_checked_on_arrival(raw: RawClient, wrong: object) -> None:
    error = raw.call("timeline", since=wrong)["error"]
    assert (error["code"], error["field"]) == ("invalid_request", "since")


@pytest.mark.parametrize("wrong", [0, 15, 4097, 100.5, True, "64"])
def test_preview_max_side_is_checked_on_arrival(raw: RawClient, wrong: object) -> None:
    error = raw.refusal({"prompt": "a", "preview_every": 1, "preview_max_side": wrong})
    assert (error["code"], error["field"]) == ("invalid_request", "preview_max_side")
    alone = raw.refusal({"prompt": "a", "preview_max_side": 64})
    assert (alone["field"], alone["expected"]) == (
        "preview_max_side",
        "preview_every to be given as well",
    )


@pytest.mark.parametrize("wrong", [0, -1, 2**31, 1.5, True, "2", [1]])
def test_preview_every_is_checked_on_arrival(raw: RawClient, wrong: object) -> None:
    error = raw.refusal({"prompt": "a", "preview_every": wrong})
    assert (error["code"], error["field"]) == ("invalid_request", "preview_every")


def test_adapters_are_managed_and_composed(
    raw_with_adapter: RawClient, adapter_engine: Omni
) -> None:
    raw = raw_with_adapter
    (folder,) = adapter_engine.settings.config.stage_args[0].engine_args.lora_dirs
    shutil.copy(ADAPTER_DIR / "outline.safetensors", Path(folder, "lines.safetensors"))
    load = {"name": "lines", "path": "lines.safetensors", "default_scale": 0.5}
    loaded = raw.call("load_lora", **load)
    assert loaded["type"] == "lora"
    assert (loaded["lora"]["state"], loaded["lora"]["default_scale"]) == ("ready", 0.5)
    refused = raw.call("load_lora", **load)
    assert (refused["type"], refused["error"]["field"]) == ("error", "name")
    both = [{"name": "night", "scale": 0.25}, {"name": "lines"}, {"name": "night", "scale": 0.5}]
    raw.submit(request("both", lora_request=both), request("bare", lora_request=[]))
    applied = raw.output("both")["applied_loras"]
    assert {lora["name"]: lora["scale"] for lora in applied} == {"night": 0.75, "lines": 0.5}
    assert raw.output("bare")["applied_loras"] == []
    listed = raw.call("loras")
    assert listed["type"] == "loras"
    digests = {lora["name"]: lora["digest"] for lora in listed["loras"]}
    assert {lora["digest"] for lora in applied} == set(digests.values())
    assert raw.call("pin_lora", name="lines", pin=True)["lora"]["pin"] is True
    assert raw.call("unload_lora", name="lines")["lora"]["state"] == "unloaded"
    error = raw.refusal(request("gone", lora_request={"name": "lines"}))
    assert error["code"] == "unknown_adapter"


def test_the_engine_draws_a_seed_and_an_id(raw: RawClient) -> None:
    (request_id,) = raw.reply(raw.submit({"prompt": "a"}))["request_ids"]
    output = raw.output(request_id)
    picture, seed = output["images"][0], output["seed"]
    assert bytes(picture.data) == pattern("a", seed, 16, 16).tobytes()


def test_an_input_picture_is_checked_on_arrival(raw: RawClient) -> None:
    picture = Array("uint8", (2, 2, 3), bytes(12))
    error = raw.refusal({"prompt": "a", "multi_modal_data": {"image": picture}})
    assert (error["code"], error["field"]) == ("unknown_field", "multi_modal_data.image")
    floats = Array("float32", (1, 1, 3), bytes(12))
    error = raw.refusal({"prompt": "a", "multi_modal_data": {"image": floats}})
    assert (error["code"], error["field"]) == ("invalid_request", "multi_modal_data.image")


def test_a_refused_request_is_named_and_the_others_run(raw: RawClient) -> None:
    message_id = raw.submit(request("good"), request("bad", height=63), request("", seed=1))
    bad, nameless = raw.reply(message_id), raw.reply(message_id)
    assert (bad["request_id"], bad["request_index"]) == ("bad", 1)
    assert (nameless["request_id"], nameless["request_index"]) == (None, 2)
    assert raw.reply(message_id)["request_ids"] == ["good"]
    assert raw.output("good")["error"] is None


def test_abort(raw: RawClient) -> None:
    raw.submit(request("long", extra_args={"sleep_ms": 800}))
    raw.find(lambda message: message.get("status") == "running")
    raw.submit(request("queued", extra_args={"sleep_ms": 1}))
    raw.send("abort", request_ids=["queued", "long", "never heard of"])
    for request_id in ("queued", "long"):
        output = raw.output(request_id)
        assert output["aborted"]
        assert output["error"]["code"] == "aborted"
    raw.submit(request("next"))
    assert raw.output("next")["error"] is None


def test_ping_and_session(raw: RawClient, pattern_engine: Omni) -> None:
    session = raw.call("hello")["session"]
    assert raw.call("ping")["session"] == session
    with RawClient(pattern_engine.endpoint) as other:
        assert other.call("hello")["session"] != session
    assert raw.call("ping")["session"] == session


def test_bye_aborts_what_is_not_detached_and_starts_a_new_session(
    raw: RawClient, pattern_engine: Omni
) -> None:
    session = raw.call("hello")["session"]
    slow = {"extra_args": {"sleep_ms": 800}}
    raw.submit(
        {**request("stays", **slow), "detached": True},
        request("goes", num_inference_steps=3, **slow),
    )
    raw.find(lambda message: message.get("status") == "running")
    raw.send("bye")
    assert raw.output("goes")["aborted"]
    assert raw.call("ping")["session"] != session
    raw.submit({**request("stays", **slow), "detached": True})  # follows the same run
    assert raw.output("stays")["error"] is None
    raw.submit(request("goes", num_inference_steps=3))  # is new
    assert raw.output("goes")["error"] is None
    raw.send("received", request_ids=["stays", "goes"])


def test_a_result_is_given_out_again_until_it_was_received(raw: RawClient) -> None:
    first, other = request("kept", seed=1), request("kept", seed=2)
    before = raw.call("status")["status"]["kept_results"]
    raw.submit(first)
    picture = raw.output("kept")["images"][0]
    status = raw.call("status")["status"]
    assert status["kept_results"] == before + 1
    assert status["kept_result_bytes"] > len(bytes(picture.data))
    message_id = raw.submit(first)
    assert raw.reply(message_id)["request_ids"] == ["kept"]
    again = raw.output("kept")
    assert bytes(again["images"][0].data) == bytes(picture.data)
    ran = raw.call("status")["status"]["stages"][0]["requests"]["received"]
    assert ran == status["stages"][0]["requests"]["received"], "it did not run again"
    refused = raw.refusal(other)
    assert (refused["code"], refused["field"]) == ("duplicate_request_id", "request_id")
    raw.send("received", request_ids=["kept", "never heard of"])
    status = raw.call("status")["status"]
    assert status["kept_results"] == before
    raw.submit(other)
    assert raw.output("kept")["seed"] == 2


def test_another_version_is_refused_with_the_engines(raw: RawClient) -> None:
    for version in (0, 2, "1", 1.0, True, None, [1]):
        answer = raw.call("hello", v=version)
        assert answer["type"] == "error"
        assert answer["error"]["code"] == "protocol_version_mismatch"
        assert answer["error"]["expected"] == str(answer["v"]) == "1"
    assert raw.call("hello")["type"] == "welcome"


# -- the page


def tables() -> dict[str, list[list[str]]]:
    """Rows of every table of the page, by 'section / first column's title'."""
    found: dict[str, list[list[str]]] = {}
    section, rows = "", None
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# ").replace("`", "")
        if not line.startswith("|"):
            rows = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if rows is None:
            title = f"{section} / {cells[0]}"
            assert title not in found, title
            rows = found[title] = []
        elif not set(cells[0]) <= {"-"}:
            rows.append(cells)
    return found


TABLES = tables()


def column(title: str) -> list[str]:
    """The names in a table's first column."""
    names = [match[1] for row in TABLES[title] if (match := re.match(r"`(\w+)`$", row[0]))]
    assert len(names) == len(TABLES[title])
    assert len(set(names)) == len(names)
    return names


CLIENT_TYPES = set(messages.CLIENT_FIELDS)
ENGINE_TYPES = {
    messages.WELCOME, messages.ACCEPTED, messages.EVENT, messages.PROGRESS, messages.OUTPUT,
    messages.STATUS, messages.READY, messages.PONG, messages.LORAS, messages.LORA, messages.ERROR,
    messages.METRICS, messages.TIMELINE,
}  # fmt: skip


def test_the_page_lists_every_message_type() -> None:
    rows = [(row[0].strip("`"), row[1]) for row in TABLES["Types at a glance / type"]]
    assert sorted(rows) == sorted(
        [(kind, "client to engine") for kind in CLIENT_TYPES]
        + [(kind, "engine to client") for kind in ENGINE_TYPES]
    )


@pytest.mark.parametrize("kind", sorted(CLIENT_TYPES))
def test_the_page_lists_the_fields_a_client_sends(kind: str) -> None:
    listed = set(column(f"{kind} / field")) if messages.CLIENT_FIELDS[kind] else set()
    assert listed == messages.CLIENT_FIELDS[kind]
    assert f'{{"v": 1, "type": "{kind}", "id":' in PAGE.read_text()


def test_the_page_lists_the_fields_the_engine_sends(
    raw: RawClient, raw_stepped: RawClient, raw_with_adapter: RawClient
) -> None:
    raw.submit(request("r"), request("", seed=1))
    raw_stepped.submit(request("r"))
    raw_with_adapter.submit({**request("s", num_inference_steps=1, lora_request={"name": "night"})})
    assert raw_with_adapter.output("s")["error"] is None
    told = {
        "welcome": raw.call("hello"),
        "ready": raw.call("wait_ready"),
        "pong": raw.call("ping"),
        "status (answer)": raw.call("status"),
        "metrics (answer)": raw_with_adapter.call("metrics"),
        "timeline (answer)": raw_with_adapter.call("timeline", since=0),
        "loras (answer)": raw_with_adapter.call("loras"),
        "lora": raw_with_adapter.call("pin_lora", name="night", pin=True),
        "progress": raw_stepped.find(lambda message: message["type"] == "progress"),
        **{kind: raw.find(lambda message, kind=kind: message["type"] == kind)
           for kind in ("accepted", "event", "output", "error")},
    }  # fmt: skip
    assert {message["type"] for message in told.values()} == ENGINE_TYPES
    common = set(column("Fields of every message / engine's field"))
    assert common == {"v", "type", "reply_to"}
    for section, message in told.items():
        assert set(message) - common == set(column(f"{section} / field")), section
    assert set(told["welcome"]["models"][0]) == set(column("welcome / model field"))
    (lora,) = told["loras (answer)"]["loras"]
    assert set(lora) == set(told["lora"]["lora"]) == set(column("loras (answer) / lora field"))
    assert set(lora["report"]) == set(column("loras (answer) / report field"))
    with_adapters = raw_with_adapter.call("status")["status"]["stages"][0]
    (holder,) = with_adapters["workers"]
    assert set(holder["adapters"]) == set(column("Status / adapters field"))
    assert set(with_adapters["adapters"][0]) >= {"name", "path", "digest", "error"}
    status = told["status (answer)"]["status"]
    assert set(status) >= set(column("Status / status field"))
    stage = status["stages"][0]
    assert set(stage) >= set(column("Status / stage field"))
    stepped = raw_stepped.call("status")["status"]["stages"][0]["workers"][0]
    assert set(stage["workers"][0]) == set(column("Status / worker field"))
    only_stepped = set(column("Status / stepped worker field"))
    assert set(stepped) - set(stage["workers"][0]) == only_stepped
    assert set(stage["capabilities"]) == set(column("Capabilities / capability"))
    metrics = told["metrics (answer)"]["metrics"]
    (figures,) = metrics["stages"]
    assert set(metrics) == set(column("Metrics / metrics field"))
    assert set(figures) == set(column("Metrics / stage figure"))
    assert set(figures["histograms"]) == set(column("Metrics / histogram"))
    assert set(figures["workers"][0]) == set(column("Metrics / worker figure"))
    assert set(figures["workers"][0]["adapters"]) == set(column("Metrics / adapters figure"))
    drawn = told["timeline (answer)"]["timeline"]
    assert set(drawn) == set(column("Timeline / timeline field"))
    assert set(drawn["boxes"][0]) == set(column("Timeline / box field"))
    assert set(told["output"]["output"]) == set(column("Outputs / output field"))


def names_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_the_page_lists_every_field_of_the_types() -> None:
    for title, names in {
        "Requests / request field": requests.REQUEST_FIELDS,
        "Requests / prompt field": requests.PROMPT_FIELDS,
        "Requests / input": requests.INPUT_NAMES,
        "Requests / parameter": SAMPLING_FIELDS,
        "loras (answer) / lora field": names_of(LoRAInfo),
        "loras (answer) / report field": names_of(AdapterReport),
        "Outputs / output field": names_of(DiffusionOutput),
        "Outputs / metric": names_of(OutputMetrics),
        "Capabilities / capability": names_of(PipelineCapabilities),
        "Arrays: extension type 1 / dtype": set(ITEM_SIZES),
    }.items():
        assert set(column(title)) == set(names), title
    assert {row[0].strip("`"): int(row[1]) for row in TABLES[
        "Arrays: extension type 1 / dtype"]} == ITEM_SIZES  # fmt: skip


def test_the_page_lists_every_error() -> None:
    assert set(column("Errors / code")) == set(ERRORS_BY_CODE)
    full = OmniError("m", field="f", value="v", expected="e", hint="h", retry_after_ms=1)
    assert column("Errors / error field") == list(full.to_wire())


def test_the_page_states_the_limits_that_are() -> None:
    text = " ".join(PAGE.read_text().split())
    limits = Limits()
    ttl_s = DeployConfig.model_fields["result_ttl_s"].default
    for stated in (
        f"Wire protocol, version {messages.PROTOCOL_VERSION}",
        f"({limits.max_message_bytes >> 20} MiB unless configured)",
        f"the header | {codec.MAX_HEADER_BYTES >> 20} MiB",
        f"frames of a message | {codec.MAX_FRAMES}",
        f"dimensions of an array | {MAX_DIMENSIONS}",
        f"requests of a `submit` | {messages.MAX_REQUESTS_PER_MESSAGE}",
        f"ids of an `abort` or a `received` | {messages.MAX_IDS_PER_MESSAGE}",
        f"values in all maps and lists of a header | {codec.MAX_ITEMS}",
        f"maps and lists in a header | {codec.MAX_CONTAINERS}",
        f"`max_waiting_per_client`, {limits.max_waiting_per_client} by default",
        f"`max_clients`, {limits.max_clients} by default",
        f"`max_client_backlog_bytes`, {limits.max_client_backlog_bytes >> 20} MiB by default",
        f"`result_ttl_s` of its configuration, {ttl_s:g} seconds by default",
        f"`reconnect_timeout_s`, {connection.ENGINE_TIMEOUT_S:g} seconds by default",
        f"up to {_WORDS[pending.MAX_ATTEMPTS]} times",
        f"number 0.001 to {requests.MAX_TIMEOUT_S:.0f}, or nil",
        f"list of 1 to {messages.MAX_REQUESTS_PER_MESSAGE} maps",
        f"keeps the latest {timeline.MAX_BOXES}, fewer",
        f"name more than {timeline.MAX_KEPT_IDS} requests together",
        f"holds up to {timeline.MAX_BOXES_PER_REPLY} boxes",
        f"the first {timeline.MAX_IDS_PER_BOX} of them",
        f"at most {timeline.MAX_ADAPTERS_PER_BOX} |",
        f"`max_waiting_requests`, {limits.max_waiting_requests} by default",
        f"string of 1 to {requests.MAX_REQUEST_ID_CHARS} printable characters",
        f"string of at most {messages.MAX_CLIENT_CHARS} characters",
        f"from it for **{client_desk.CLIENT_TIMEOUT_S:g} seconds**",
        f"`ping` every **{connection.PING_INTERVAL_S:g} seconds**",
        f"heard nothing for {connection.ENGINE_TIMEOUT_S:g} seconds",
    ):
        assert stated in text, stated


def test_the_page_lists_what_engine_and_workers_say() -> None:
    rows = {row[0].strip("`"): row[1:] for row in TABLES[
        "Engine and workers (internal) / worker message"]}  # fmt: skip
    assert {kind for kind, (way, _) in rows.items() if way == "engine to worker"} == {
        plans.BATCH_PLAN, plans.STEP_PLAN, plans.ABORT, plans.STOP, adapters.ADAPTER_CHECK,
        adapters.ADAPTER_PREFETCH, adapters.ADAPTER_PIN, adapters.ADAPTER_DROP,
    }  # fmt: skip
    assert {kind for kind, (way, _) in rows.items() if way == "worker to engine"} == {
        plans.READY, plans.OUTPUTS, plans.STEP_STATES, plans.HEARTBEAT, plans.FAULT,
        adapters.ADAPTER_CHECKED, adapters.ADAPTERS_HELD,
    }  # fmt: skip
    requests = (build_request("a"),)
    activations = (AdapterActivation((Adapter("a", "/a", "d"),), (0.5,)),)
    for wire in (
        BatchPlan(1, requests, activations).to_wire(),
        StepPlan(1, 1, requests, activations).to_wire(),
        AdaptersHeld([], []).to_wire(),
        plans.outputs_message(1, []),
        StepReport(1).to_wire(),
    ):
        assert all(f"`{name}`" in rows[wire["type"]][1] for name in set(wire) - {"type"})
    assert all(f"`{name}`" in PAGE.read_text() for name in names_of(WorkerSpec))
    told = names_of(plans.Heartbeat)
    assert all(f"`{name}`" in rows[plans.HEARTBEAT][1] for name in told)
