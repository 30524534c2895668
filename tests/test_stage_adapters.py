"""A stage's adapters between its clients and its workers, whose messages the tests write."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_engine.engine import adapter_desk
from omni_engine.engine.devices import worker_device
from omni_engine.engine.live_request import Preview
from omni_engine.engine.scheduler import RequestStatus
from omni_engine.engine.stage_runtime import StageRuntime
from omni_engine.engine.status import describe_stage
from omni_engine.engine.worker_handle import WorkerHandle
from omni_engine.protocol import codec, messages, plans
from omni_engine.protocol.adapters import Adapter, AdapterReport, AdaptersHeld
from omni_engine.protocol.errors import (
    AdapterError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    StageUnavailableError,
    UnknownAdapterError,
)
from omni_engine.protocol.lora_info import LoRAInfo
from omni_engine.protocol.outputs import AppliedLoRA, DiffusionOutput
from omni_engine.protocol.plans import (
    BatchPlan,
    PipelineCapabilities,
    StepPlan,
    StepReport,
    WorkerSpec,
)
from omni_engine.protocol.requests import build_request
from omni_engine.protocol.sampling import LoRARequest, OmniDiffusionSamplingParams
from omni_engine.stages.config import Limits, StageConfig

CAPABILITIES = PipelineCapabilities(
    pipeline="Some",
    supports_request_batch=True,
    supports_step_execution=True,
    sampling_fields=frozenset({"height", "width", "lora_request"}),
    per_request=frozenset({"seed"}),
    defaults={"height": 64, "width": 64},
    supports_lora=True,
    mixes_adapters=True,
)


class Stage:
    """A stage whose workers say what the test lets them say; their processes do nothing."""

    def __init__(self, folder: Path, *names: str, workers: int = 1, **arguments: Any) -> None:
        self.folder = folder
        modules = [m if isinstance(m, dict) else {"name": m} for m in names]
        for module in modules:
            module["path"] = self.write(module["name"])
        settings = {
            "model": "m",
            "lora_dirs": [str(folder)],
            "lora_modules": modules,
            "max_worker_deaths": 1,
        }
        config = {"stage_id": 0, "engine_args": {**settings, **arguments}}
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.runtime = StageRuntime(StageConfig.model_validate(config), Limits(), self._send)
        self.told: list[DiffusionOutput] = []
        self.replies: list[dict[str, Any]] = []
        self.now = 0.0
        for number in range(workers):
            spec = WorkerSpec(f"w{number}", "ipc://nowhere", {}, "m", "cpu")
            worker = WorkerHandle(spec, worker_device("cpu"), self.runtime.stage.engine_args, 0.0)
            os.kill(worker.pid, signal.SIGSTOP)  # what it says is written here
            self.runtime.workers[spec.worker_id] = worker

    def _send(self, worker_id: str, message: dict[str, Any]) -> None:
        frames = [bytes(frame) for frame in codec.encode(message)]
        self.sent.append((worker_id, codec.decode(frames, trusted=True)))

    # -- files, workers

    def write(self, name: str, text: str = "") -> str:
        path = self.folder / f"{name}.safetensors"
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)
        return str(path)

    def says(self, worker_id: str, kind: str, **body: Any) -> None:
        frames = [bytes(frame) for frame in codec.encode({"type": kind, **body})]
        message = codec.decode(frames, trusted=True)
        self.runtime.on_worker_message(worker_id, message, self.now)
        self.turn()

    def turn(self) -> None:
        """What the server's loop does after messages."""
        self.runtime.dispatch(self.now)

    def start(self, capabilities: PipelineCapabilities = CAPABILITIES) -> None:
        for worker_id in self.runtime.workers:
            self.says(worker_id, plans.READY, load_ms=1.0, parameter_bytes=1,
                      capabilities=capabilities.to_wire())  # fmt: skip

    def dies(self, worker_id: str) -> None:
        worker = self.runtime.workers[worker_id]
        worker.kill()
        assert worker.wait(10)
        self.runtime.check_workers(self.now)
        self.turn()

    def took(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """The messages of a kind that workers were sent since this was asked last."""
        found = [(w, m) for w, m in self.sent if m["type"] == kind]
        self.sent = [(w, m) for w, m in self.sent if m["type"] != kind]
        return found

    def check(self, **found: str | None) -> None:
        """Let workers answer all checks: with the digest of what they find, or that it's broken."""
        for worker_id, check in self.took("adapter_check"):
            digest = found[check["name"]]
            error = None if digest else AdapterError(f"{check['name']} is broken").to_wire()
            report = AdapterReport(digest, "peft", {"t": 1}, [4], ["q"], 9) if digest else None
            self.says(worker_id, "adapter_checked", check_id=check["check_id"],
                      report=report.to_wire() if report else None, error=error)  # fmt: skip

    def holds(self, worker_id: str, device: str = "", host: str = "", **counters: Any) -> None:
        held = AdaptersHeld(device.split(), host.split(), **counters).to_wire()
        self.says(worker_id, held.pop("type"), **held)

    # -- requests

    def ask(self, request_id: str, *asked: str | LoRARequest, default: bool = False) -> None:
        loras = [LoRARequest(one) if isinstance(one, str) else one for one in asked]
        params = OmniDiffusionSamplingParams(seed=1, lora_request=None if default else loras)
        self.runtime.submit(build_request("p", params, request_id=request_id), self, self.now)
        self.turn()

    label = "00ab"

    def on_status(self, request_id: str, status: RequestStatus) -> None: ...

    def on_progress(self, request_id: str, step: int, num: int, preview: Preview | None) -> None:
        raise AssertionError("nobody reports steps here")

    def on_output(self, output: DiffusionOutput) -> None:
        self.told.append(output)

    def plans(self) -> list[tuple[str, BatchPlan]]:
        return [(w, BatchPlan.from_wire(m)) for w, m in self.took(plans.BATCH_PLAN)]

    def plan(self) -> BatchPlan:
        ((_, plan),) = self.plans()
        return plan

    def finish(self, worker_id: str, plan: BatchPlan) -> None:
        """Let a worker end a batch; it calls adapters by their digests."""
        outputs = [
            DiffusionOutput(
                request.request_id,
                latents=None,
                applied_loras=[
                    AppliedLoRA(digest, digest, scale)
                    for digest, scale in (activation.identity if activation else ())
                ],
            )
            for request, activation in zip(plan.requests, plan.activations, strict=True)
        ]
        self.says(worker_id, plans.OUTPUTS, plan_id=plan.plan_id, forwards=1,
                  outputs=[output.to_wire() for output in outputs])  # fmt: skip

    # -- management

    def manage(self, kind: str, **body: Any) -> list[LoRAInfo] | LoRAInfo | OmniError | None:
        """Send a message as a client; what came back at once, None if nothing did."""
        before = len(self.replies)
        message = messages.parse_client_message(messages.client_message(kind, 7, **body))
        adapter_desk.answer(message, self.runtime, self.replies.append, self.now)
        self.turn()
        return self.reply() if len(self.replies) > before else None

    def reply(self) -> Any:
        (wire,) = codec_roundtrip([self.replies.pop()])
        assert wire["reply_to"] == 7
        if wire["type"] == messages.LORAS:
            return [LoRAInfo.from_wire(one) for one in wire["loras"]]
        if wire["type"] == messages.LORA:
            return LoRAInfo.from_wire(wire["lora"])
        return wire["error"]

    def loras(self) -> dict[str, LoRAInfo]:
        listed = self.manage(messages.LORAS)
        assert isinstance(listed, list)
        return {info.name: info for info in listed}

    def load(self, name: str, file: str | None = None, **body: Any) -> Any:
        path = self.write(file or name, name)
        return self.manage(messages.LOAD_LORA, name=name, path=path, **body)


def codec_roundtrip(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [codec.decode([bytes(f) for f in codec.encode(one)], trusted=True) for one in found]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def start(*names: Any, **arguments: Any) -> Stage:
        stage = Stage(tmp_path, *names, **arguments)
        made.append(stage)
        return stage

    yield start
    for stage in made:
        for worker in stage.runtime.workers.values():
            worker.kill()
            assert worker.wait(10)
            worker.close()


@pytest.fixture
def stage(make: Callable[..., Stage]) -> Stage:
    """One worker; a, b and c are checked; a and b are one content."""
    stage = make("a", "b", "c", max_loras=3)
    stage.start()
    stage.check(a="d1", b="d1", c="d2")
    return stage


def named(plan: BatchPlan) -> list[tuple[str, list[str]]]:
    """The requests of a batch, and the names of the adapters that each runs under."""
    return [
        (request.request_id, [] if one is None else [adapter.name for adapter in one.adapters])
        for request, one in zip(plan.requests, plan.activations, strict=True)
    ]


# -- requests that wait for checks


def test_requests_wait_for_the_checks_of_their_adapters_alone(make: Callable[..., Stage]) -> None:
    stage = make("a", "b", "c")
    stage.ask("early", "a")
    with pytest.raises(UnknownAdapterError):
        stage.ask("nobody", "x")
    stage.start()
    assert not stage.runtime.settled
    stage.ask("both", "b", "a")
    stage.ask("bare")
    bare = stage.plan()
    assert named(bare) == [("bare", [])]
    stage.finish("w0", bare)
    assert stage.runtime.num_waiting == 2
    checks = {check["name"]: (w, check) for w, check in stage.took("adapter_check")}
    stage.sent = [checks["a"]]
    stage.check(a="d1")
    early = stage.plan()
    assert named(early) == [("early", ["a"])]
    stage.finish("w0", early)
    assert stage.plans() == []
    stage.sent = [checks["b"], checks["c"]]
    stage.check(b=None, c="d3")
    assert stage.runtime.settled
    assert [output.request_id for output in stage.told] == ["bare", "early", "both"]
    assert "b is broken" in str(stage.told[-1].error)
    assert stage.runtime.num_waiting == 0
    assert stage.runtime.live("both") is None


def test_parked_requests_can_be_aborted(make: Callable[..., Stage]) -> None:
    stage = make("a")
    stage.start()
    stage.ask("one", "a")
    stage.ask("two", "a")
    stage.runtime.abort(["one"], 0.0)
    assert [(o.request_id, o.aborted) for o in stage.told] == [("one", True)]
    stage.check(a="d1")
    assert named(stage.plan()) == [("two", ["a"])]


def test_what_else_is_wrong_with_a_request_is_told_before_it_waits(
    make: Callable[..., Stage],
) -> None:
    stage = make("a")
    stage.start()
    params = OmniDiffusionSamplingParams(lora_request=[LoRARequest("a")], fps=3)
    with pytest.raises(InvalidRequestError, match="takes no fps"):
        stage.runtime.submit(build_request("p", params), stage, 0.0)
    assert stage.runtime.num_waiting == 0


def test_a_changed_file_makes_new_requests_wait_and_old_ones_keep_theirs(stage: Stage) -> None:
    stage.ask("old", "c")
    running = stage.plan()
    stage.ask("queued", "c")
    stage.write("c", "new content")
    stage.ask("new", "c")
    stage.ask("other", "a")
    stage.finish("w0", running)
    queued = stage.plan()
    stage.finish("w0", queued)
    other = stage.plan()
    assert [named(plan) for plan in (running, queued, other)] == [
        [("old", ["c"])], [("queued", ["c"])], [("other", ["a"])],
    ]  # fmt: skip
    stage.finish("w0", other)
    assert stage.took("adapter_drop") == []
    stage.check(c="d9")
    assert stage.took("adapter_drop") == [("w0", {"type": "adapter_drop", "digests": ["d2"]})]
    new = stage.plan()
    digests = [p.activations[0].digests for p in (running, queued, new) if p.activations[0]]
    assert digests == [("d2",), ("d2",), ("d9",)]
    stage.write("c", "broken content")
    stage.ask("newest", "c")
    stage.finish("w0", new)
    stage.check(c=None)
    newest = stage.plan()
    assert newest.activations == new.activations
    assert (stage.loras()["c"].state, str(stage.loras()["c"].error)[:11]) == (
        "ready",
        "c is broken",
    )


def test_checks_of_a_dead_worker_are_done_by_another(make: Callable[..., Stage]) -> None:
    stage = make("a", workers=2)
    stage.start()
    stage.ask("one", "a")
    ((first, _),) = stage.took("adapter_check")
    stage.dies(first)
    ((second, check),) = stage.took("adapter_check")
    assert second != first
    stage.sent.append((second, check))
    stage.check(a="d1")
    assert [worker for worker, _ in stage.plans()] == [second]


def test_a_file_that_takes_two_workers_with_it_is_broken(make: Callable[..., Stage]) -> None:
    stage = make("a", workers=3)
    stage.start()
    stage.ask("one", "a")
    for _ in range(2):
        ((worker_id, _),) = stage.took("adapter_check")
        stage.dies(worker_id)
    assert stage.took("adapter_check") == []
    assert "two workers died while they checked the file" in str(stage.told[0].error)
    assert stage.runtime.state == "degraded"


def test_when_no_worker_is_left_loads_and_requests_get_the_reason(
    make: Callable[..., Stage],
) -> None:
    stage = make("a")
    stage.start()
    stage.ask("one", "a")
    assert stage.load("b") is None
    stage.dies("w0")
    assert isinstance(stage.told[0].error, StageUnavailableError)
    assert stage.reply()["code"] == "stage_unavailable"
    assert stage.runtime.settled
    with pytest.raises(StageUnavailableError):
        stage.load("c")


# -- batches


def test_outputs_name_adapters_as_their_request_did(stage: Stage) -> None:
    stage.ask("block")
    block = stage.plan()
    stage.ask("one", "a")
    stage.ask("two", "b")
    stage.ask("three", "c", LoRARequest("b", 0.5), LoRARequest("a", 0.5))
    stage.finish("w0", block)
    shared = stage.plan()
    assert named(shared) == [("one", ["a"]), ("two", ["b"])], "one content, one batch"
    stage.finish("w0", shared)
    stage.finish("w0", stage.plan())
    told = {
        o.request_id: [(x.name, x.digest, x.scale) for x in o.applied_loras] for o in stage.told
    }
    assert told == {
        "block": [],
        "one": [("a", "d1", 1.0)],
        "two": [("b", "d1", 1.0)],
        "three": [("b", "d1", 1.0), ("c", "d2", 1.0)],
    }


@pytest.mark.parametrize("mixes", [True, False])
def test_adapters_are_mixed_where_it_is_wanted_and_possible(
    make: Callable[..., Stage], mixes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make("a", "b", "c", mixed_lora=True, max_mixed_adapters=2, max_loras=3)
    able = {"mixes_adapters": mixes, "adapters_note": "because"}
    stage.start(PipelineCapabilities.from_wire({**CAPABILITIES.to_wire(), **able}))
    assert ("mixed_lora has no effect: because" in caplog.text) is not mixes
    stage.check(a="d1", b="d2", c="d3")
    status = describe_stage(stage.runtime, 0.0)
    assert (status["mixed_lora"], status["effective_mixed_adapters"]) == (
        True,
        2 if mixes else None,
    )
    assert status["adapters_note"] == "because"
    stage.ask("block")
    block = stage.plan()
    for name in "abc":
        stage.ask(name, name)
    stage.finish("w0", block)
    plan = stage.plan()
    assert named(plan) == [("a", ["a"]), ("b", ["b"])][: 2 if mixes else 1]
    if mixes:
        with pytest.raises(LimitExceededError, match="needs 3 adapters at once"):
            stage.ask("all", "a", "b", "c")
    else:
        stage.ask("all", "a", "b", "c")


def test_step_plans_carry_what_each_newcomer_runs_under(make: Callable[..., Stage]) -> None:
    stage = make("a", "b", step_execution=True, mixed_lora=True)
    stage.start()
    stage.check(a="d1", b="d2")
    stage.ask("one", "a")
    stage.ask("two", "b")
    stage.ask("three")
    sent = [StepPlan.from_wire(message) for _, message in stage.took(plans.STEP_PLAN)]
    joined = {
        request.request_id: activation and activation.identity
        for plan in sent
        for request, activation in zip(plan.requests, plan.activations, strict=True)
    }
    assert joined == {"one": (("d1", 1.0),), "two": (("d2", 1.0),), "three": None}
    assert len({plan.group_id for plan in sent}) == 1
    (worker,) = describe_stage(stage.runtime, 0.0)["workers"]
    (group,) = worker["groups"]
    assert group["adapters"] == [{"name": "a", "scale": 1.0}, {"name": "b", "scale": 1.0}]
    done = StepReport(sent[0].plan_id, outputs=[DiffusionOutput("two")], ticks=1).to_wire()
    stage.says("w0", done.pop("type"), **done)
    assert stage.loras()["b"].requests.running == 0


def test_waiting_adapters_are_loaded_ahead_on_the_worker_that_will_run_them(
    make: Callable[..., Stage],
) -> None:
    stage = make("a", "b", "c", workers=2, max_loras=2)
    stage.start()
    stage.check(a="d1", b="d2", c="d3")
    stage.ask("one", "a")
    stage.ask("bare")
    (holder, _), (other, _) = running = stage.plans()
    assert holder != other
    stage.ask("next", "b")
    stage.ask("later", "c")
    deadline = stage.runtime.next_deadline(stage.now)
    assert deadline is not None, "the second one is looked at after a moment"
    stage.now = deadline
    stage.turn()
    told = stage.took("adapter_prefetch")
    assert {w: [Adapter(**wire).digest for wire in m["adapters"]] for w, m in told} == {
        other: ["d2"], holder: ["d3"],
    }  # fmt: skip
    stage.now += 0.1
    stage.turn()
    assert stage.took("adapter_prefetch") == []
    stage.holds(other, device="d2")
    stage.holds(holder, device="d1 d3")
    assert stage.took("adapter_prefetch") == []
    stage.finish(*running[1])
    assert [(w, named(plan)) for w, plan in stage.plans()] == [(other, [("next", ["b"])])]
    stage.finish(*running[0])
    assert [(w, named(plan)) for w, plan in stage.plans()] == [(holder, [("later", ["c"])])]


# -- management


def test_a_load_is_answered_with_the_verdict(stage: Stage) -> None:
    assert stage.load("new", default_scale=0.5) is None
    assert stage.loras()["new"].state == "checking"
    stage.ask("early", "new")
    stage.check(new="d7")
    info = stage.reply()
    assert (info.state, info.digest, info.default_scale) == ("ready", "d7", 0.5)
    assert info.path == str(stage.folder / "new.safetensors")
    assert info.report.ranks == [4]
    assert stage.plan().activations[0].identity == (("d7", 0.5),)  # type: ignore[union-attr]


def test_a_broken_load_is_answered_with_its_error_and_so_are_those_who_waited(
    stage: Stage,
) -> None:
    assert stage.load("new") is None
    stage.ask("early", "new")
    stage.check(new=None)
    assert stage.reply()["message"] == "new is broken"
    assert "new is broken" in str(stage.told[0].error)
    assert set(stage.loras()) == {"a", "b", "c"}


def test_replacing_puts_the_new_content_in_force_when_it_is_found_good(stage: Stage) -> None:
    with pytest.raises(InvalidRequestError, match="registered already"):
        stage.load("c", "other")
    stage.ask("old", "c")
    old = stage.plan()
    assert stage.load("c", "other", replace=True) is None
    stage.ask("between", "c")
    stage.check(c="d8")
    assert stage.reply().digest == "d8"
    stage.ask("new", "c")
    usage = stage.loras()["c"].requests
    assert (usage.total, usage.waiting, usage.running) == (1, 1, 0), "of the new content"
    stage.finish("w0", old)
    between = stage.plan()
    assert between.activations[0].digests == ("d2",)  # type: ignore[union-attr]
    assert stage.took("adapter_drop") == []
    stage.finish("w0", between)
    assert stage.took("adapter_drop") == [("w0", {"type": "adapter_drop", "digests": ["d2"]})]
    assert stage.plan().activations[0].digests == ("d8",)  # type: ignore[union-attr]


def test_unloading_drains_and_workers_forget_the_content_when_the_last_has_ended(
    stage: Stage,
) -> None:
    stage.ask("running", "c")
    running = stage.plan()
    stage.ask("waiting", "c")
    gone = stage.manage(messages.UNLOAD_LORA, name="c")
    assert isinstance(gone, LoRAInfo)
    assert (gone.state, gone.digest) == ("unloaded", "d2")
    assert (gone.requests.waiting, gone.requests.running) == (1, 1)
    with pytest.raises(UnknownAdapterError):
        stage.ask("late", "c")
    stage.finish("w0", running)
    assert stage.took("adapter_drop") == []
    stage.finish("w0", stage.plan())
    assert stage.took("adapter_drop") == [("w0", {"type": "adapter_drop", "digests": ["d2"]})]
    assert [output.error for output in stage.told] == [None, None]


def test_a_content_that_another_name_means_is_not_forgotten(stage: Stage) -> None:
    stage.manage(messages.UNLOAD_LORA, name="a")
    assert stage.took("adapter_drop") == []
    stage.manage(messages.UNLOAD_LORA, name="b")
    assert stage.took("adapter_drop") == [("w0", {"type": "adapter_drop", "digests": ["d1"]})]


def test_a_content_that_comes_back_is_not_forgotten(stage: Stage) -> None:
    stage.ask("running", "c")
    running = stage.plan()
    stage.manage(messages.UNLOAD_LORA, name="c")
    assert stage.load("c") is None
    stage.check(c="d2")
    stage.finish("w0", running)
    assert stage.took("adapter_drop") == []


def test_aborting_the_last_waiting_request_of_an_unloaded_adapter_lets_it_be_forgotten(
    stage: Stage,
) -> None:
    stage.ask("block")
    stage.ask("waiting", "c")
    stage.manage(messages.UNLOAD_LORA, name="c")
    stage.runtime.abort(["waiting"], 0.0)
    assert [m["digests"] for _, m in stage.took("adapter_drop")] == [["d2"]]


def test_unloading_answers_a_load_that_was_under_way(stage: Stage) -> None:
    assert stage.load("new") is None
    stage.ask("early", "new")
    stage.manage(messages.UNLOAD_LORA, name="new")
    unloaded_before = stage.replies.pop()
    assert unloaded_before["error"]["message"].endswith("was unloaded before its check ended")
    assert isinstance(stage.told[0].error, UnknownAdapterError)
    stage.check(new="d7")
    assert set(stage.loras()) == {"a", "b", "c"}, "a late verdict changes nothing"


def test_pins_are_told_to_all_workers_and_to_those_that_come(make: Callable[..., Stage]) -> None:
    stage = make({"name": "a", "pin": True}, {"name": "b", "preload": True}, "c", workers=2,
                 max_loras=3)  # fmt: skip
    ready = {"load_ms": 1.0, "parameter_bytes": 1, "capabilities": CAPABILITIES.to_wire()}
    stage.says("w0", plans.READY, **ready)
    stage.check(a="d1", b="d2", c="d3")
    assert stage.took("adapter_pin") == [("w0", {"type": "adapter_pin", "digests": ["d1"]})]
    assert [w for w, _ in stage.took("adapter_prefetch")] == ["w0"]
    stage.says("w1", plans.READY, **ready)
    assert stage.took("adapter_pin") == [("w1", {"type": "adapter_pin", "digests": ["d1"]})]
    ((worker_id, told),) = stage.took("adapter_prefetch")
    assert (worker_id, told["adapters"][0]["digest"]) == ("w1", "d2")
    info = stage.manage(messages.PIN_LORA, name="b", pin=True)
    assert isinstance(info, LoRAInfo)
    assert info.pin
    assert [(w, m["digests"]) for w, m in stage.took("adapter_pin")] == [
        ("w0", ["d1", "d2"]), ("w1", ["d1", "d2"]),
    ]  # fmt: skip
    with pytest.raises(LimitExceededError, match="at most 2 pinned"):
        stage.manage(messages.PIN_LORA, name="c", pin=True)
    stage.manage(messages.UNLOAD_LORA, name="a")
    assert [m["digests"] for _, m in stage.took("adapter_pin")] == [["d2"], ["d2"]]
    stage.manage(messages.PIN_LORA, name="c", pin=True)
    stage.manage(messages.PIN_LORA, name="c", pin=False)
    assert [m["digests"] for _, m in stage.took("adapter_pin")] == [["d2", "d3"]] * 2 + [["d2"]] * 2


def test_pins_leave_room_for_compositions_that_were_taken_in(stage: Stage) -> None:
    for name in "xy":
        stage.load(name)
    stage.check(x="d8", y="d9")
    stage.ask("both", "a", "c")
    stage.manage(messages.PIN_LORA, name="x", pin=True)
    with pytest.raises(LimitExceededError, match="2 would be, and 2 of 3 places"):
        stage.manage(messages.PIN_LORA, name="y", pin=True)
    stage.finish("w0", stage.plan())
    stage.manage(messages.PIN_LORA, name="y", pin=True)
    with pytest.raises(LimitExceededError, match=r"at most 1 \(max_loras = 3, less 2 pinned"):
        stage.ask("more", "a", "c")
    stage.ask("other", "a", "x", "y")


def test_usage_and_holders_are_listed(stage: Stage) -> None:
    stage.ask("one", "a", "c")
    plan = stage.plan()
    stage.ask("two", LoRARequest("c", 0.5))
    stage.holds("w0", device="d1", host="d1 d2")
    stage.now = 10.0
    listed = stage.loras()
    assert [(n, i.requests.total, i.requests.waiting, i.requests.running) for n, i in listed.items()
            ] == [("a", 1, 0, 1), ("b", 0, 0, 0), ("c", 2, 1, 1)]  # fmt: skip
    assert [listed[n].last_used_s for n in "abc"] == [10.0, None, 10.0]
    held = {n: [(h.worker, h.device, h.host) for h in listed[n].held] for n in "abc"}
    one = [("w0", True, True)]
    assert held == {"a": one, "b": one, "c": [("w0", False, True)]}
    stage.finish("w0", plan)
    stage.finish("w0", stage.plan())
    assert stage.loras()["c"].requests.total == 2


def test_status_shows_what_a_worker_holds_and_how_often_it_had_it(stage: Stage) -> None:
    (worker,) = describe_stage(stage.runtime, 0.0)["workers"]
    assert worker["adapters"] is None
    stage.ask("one", "a", "c")
    stage.finish("w0", stage.plan())
    stage.ask("two", "c", "a")
    stage.holds("w0", device="d1 d2", host="d2", device_hits=2, host_hits=1, loads=1, load_ms=3.0)
    (worker,) = describe_stage(stage.runtime, 0.0)["workers"]
    shown = worker["adapters"]
    assert (shown["device"], shown["host"], shown["loads"], shown["load_ms"]) == (2, 1, 1, 3.0)
    assert (shown["needed"], shown["device_hit_rate"], shown["memory_hit_rate"]) == (4, 0.5, 0.75)
    stage.dies("w0")
    (worker,) = describe_stage(stage.runtime, 0.0)["workers"]
    assert worker["adapters"] is None


def test_a_pipeline_without_adapters_says_so(make: Callable[..., Stage]) -> None:
    stage = make("a")
    stage.ask("early", "a")
    stage.start(PipelineCapabilities.from_wire({**CAPABILITIES.to_wire(), "supports_lora": False}))
    assert stage.runtime.settled
    assert stage.took("adapter_check") == []
    assert "Some takes no adapters" in str(stage.told[0].error)
    assert stage.loras()["a"].state == "broken"
    with pytest.raises(OmniError, match="takes no adapters"):
        stage.load("b")


def test_messages_about_adapters_are_checked_on_arrival() -> None:
    def parsed(kind: str, **body: Any) -> dict[str, Any]:
        return messages.parse_client_message(messages.client_message(kind, 1, **body)).body

    good = {"name": "n", "path": "p"}
    assert parsed(messages.LOAD_LORA, **good)["default_scale"] is None
    assert parsed(messages.LOAD_LORA, **good, default_scale=2, pin=True)["default_scale"] == 2.0
    for kind, body, field in (
        (messages.LOAD_LORA, {"name": "n"}, "path"),
        (messages.LOAD_LORA, {"path": "p"}, "name"),
        (messages.LOAD_LORA, {**good, "path": "a\0b"}, "path"),
        (messages.LOAD_LORA, {**good, "name": "x" * 201}, "name"),
        (messages.LOAD_LORA, {**good, "name": " x"}, "name"),
        (messages.LOAD_LORA, {**good, "default_scale": 101}, "default_scale"),
        (messages.LOAD_LORA, {**good, "pin": 1}, "pin"),
        (messages.UNLOAD_LORA, {}, "name"),
        (messages.PIN_LORA, {"name": "n"}, "pin"),
        (messages.LORAS, {"model": 5}, "model"),
        (messages.LORAS, {"name": "n"}, "name"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parsed(kind, **body)
        assert caught.value.field == field


def test_a_file_outside_the_folders_is_refused_by_message(stage: Stage, tmp_path: Path) -> None:
    shutil.copy(stage.write("x"), tmp_path.parent / "x.safetensors")
    with pytest.raises(InvalidRequestError, match="lora_dirs"):
        stage.manage(messages.LOAD_LORA, name="x", path="../x.safetensors")
    assert set(stage.loras()) == {"a", "b", "c"}
