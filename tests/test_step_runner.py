"""Step plans on a worker: their order, who joins when, what is reported, whose fault is whose."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from support_stepped import Counting, logged, request

from omni_engine.protocol import codec
from omni_engine.protocol.adapters import Adapter, AdapterActivation, AdapterReport
from omni_engine.protocol.errors import AdapterError
from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import StepPlan, StepReport
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_runtime import AdapterRuntime
from omni_engine.worker.adapter_weights import AdapterWeights
from omni_engine.worker.step_runner import StepRunner


class Library:
    """Where adapters that change nothing come from, some of them late or not at all."""

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.may_load.set()

    def check(self, name: str, path: str) -> AdapterReport:
        raise NotImplementedError

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        assert self.may_load.wait(30)
        if adapter.name == "gone":
            raise AdapterError("adapter 'gone' can't be used: its file is gone")
        return AdapterWeights(adapter.digest, {})


class Bare:
    """A pipeline without anything that adapters could change."""

    components: ClassVar[dict[str, Any]] = {}


def activation(*names: str) -> AdapterActivation:
    adapters = tuple(Adapter(name, f"/nowhere/{name}", name * 8) for name in names)
    return AdapterActivation(adapters, (1.0,) * len(names))


class Worker:
    """A runner fed with plans as the wire brings them."""

    def __init__(self, pipeline: Any = None, **options: Any) -> None:
        self.pipeline = Counting() if pipeline is None else pipeline
        self.aborts, self.library, self.loaded = AbortFlags(), Library(), threading.Event()
        self.adapters = AdapterRuntime(
            Bare(), self.library, max_loras=2, max_cpu_loras=2, on_loaded=self.loaded.set
        )
        self.runner = StepRunner(self.pipeline, self.adapters, self.aborts, "worker 3", **options)
        self.plans = 0

    def send(
        self,
        group: int,
        *requests: DiffusionRequest,
        ticks: int = 1,
        activation: AdapterActivation | None = None,
    ) -> None:
        plan = StepPlan(self.plans, group, requests, (activation,) * len(requests), ticks)
        self.plans += 1
        self.aborts.expect(request.request_id for request in requests)
        wire = codec.decode(codec.encode(plan.to_wire()), trusted=True)
        self.runner.add(StepPlan.from_wire(wire))

    def tick(self) -> StepReport:
        report = self.runner.tick()
        wire = codec.decode(codec.encode(report.to_wire()), trusted=True)
        return StepReport.from_wire(wire)

    def run(self) -> list[StepReport]:
        """Tick until no plan has ticks left."""
        reports = []
        while self.runner.has_turn:
            assert len(reports) < 500
            reports.append(self.tick())
        return reports


def ended(report: StepReport) -> list[str]:
    return [output.request_id for output in report.outputs]


def test_plans_run_in_order_to_their_end() -> None:
    worker = Worker()
    worker.send(0, request("a", 9), ticks=2)
    worker.send(1, request("b", 9), ticks=3)
    worker.send(0, ticks=1)
    reports = worker.run()
    assert [report.plan_id for report in reports] == [0, 0, 1, 1, 1, 2]
    assert [report.plan_done for report in reports] == [False, True, False, False, True, True]
    assert [report.ticks for report in reports] == [1] * 6
    states = [[(s.request_id, s.step_index, s.num_steps) for s in r.states] for r in reports]
    assert states == [
        [("a", 1, 9)], [("a", 2, 9)], [("b", 1, 9)], [("b", 2, 9)], [("b", 3, 9)], [("a", 3, 9)],
    ]  # fmt: skip


def test_groups_never_share_a_forward() -> None:
    worker = Worker()
    worker.send(0, request("a", 2), request("b", 2), ticks=1)
    worker.send(1, request("c", 2), ticks=2)
    worker.send(0, ticks=1)
    worker.run()
    assert [who for _, who in worker.pipeline.batches] == [
        ["a/0", "b/0"], ["c/0"], ["c/0"], ["a/0", "b/0"],
    ]  # fmt: skip


@pytest.mark.parametrize("ticks", [0, 3])
def test_newcomers_of_a_queued_plan_join_while_an_earlier_one_runs(ticks: int) -> None:
    worker = Worker()
    worker.send(0, request("a", 6), ticks=4)
    worker.tick()
    worker.send(0, request("b", 2), ticks=ticks)
    report = worker.tick()
    assert report.plan_id == 0
    assert [(s.request_id, s.step_index) for s in report.states] == [("a", 2), ("b", 1)]
    assert ended(worker.tick()) == ["b"], "it leaves in the tick of its last step"


def test_a_plan_without_ticks_is_never_reported() -> None:
    worker = Worker()
    worker.send(0, request("a", 2), ticks=0)
    assert not worker.runner.has_turn
    worker.send(0, ticks=1)
    worker.send(0, request("b", 1), ticks=0)
    worker.send(0, ticks=5)
    reports = worker.run()
    assert {report.plan_id for report in reports} == {1, 3}
    assert sorted(name for report in reports for name in ended(report)) == ["a", "b"]


def test_every_plan_with_ticks_is_done_exactly_once() -> None:
    worker = Worker()
    for group, steps, ticks in ((0, 5, 2), (1, 1, 4), (0, 2, 0), (0, 3, 2), (2, 7, 2), (1, 3, 1)):
        worker.send(group, request(f"r{worker.plans}", steps), ticks=ticks)
    worker.send(0, ticks=50)
    worker.send(2, ticks=50)
    worker.send(1, ticks=50)
    reports = worker.run()
    done = [report.plan_id for report in reports if report.plan_done]
    assert done == [0, 1, 3, 4, 5, 6, 7, 8]
    assert len({name for report in reports for name in ended(report)}) == 6


def test_a_plan_ends_early_when_its_group_has_nobody_left() -> None:
    worker = Worker()
    worker.send(0, request("a", 2), ticks=9)
    worker.send(0, ticks=9)
    first, second, third = worker.run()
    assert (first.plan_done, ended(first)) == (False, [])
    assert (second.plan_done, ended(second), second.states) == (True, ["a"], [])
    assert (third.plan_id, third.plan_done, third.ticks) == (1, True, 0), "there was nothing to do"
    assert len(worker.pipeline.batches) == 2


def test_a_group_that_ended_may_come_again_under_another_adapter() -> None:
    worker = Worker()
    worker.send(0, request("a", 1))
    worker.run()
    worker.send(0, request("b", 1), activation=activation("gone"))
    report = worker.tick()
    assert isinstance(report.outputs[0].error, AdapterError)


def test_an_adapter_that_fails_ends_its_group_only() -> None:
    worker = Worker()
    worker.send(0, request("a", 3), ticks=1)
    worker.send(1, request("b", 3), request("c", 3, n=2), ticks=3, activation=activation("gone"))
    assert worker.loaded.wait(30)
    worker.send(0, ticks=2)
    first, failed, *others = worker.run()
    assert first.outputs == []
    assert failed.plan_done
    assert [output.request_id for output in failed.outputs] == ["b", "c"]
    for output in failed.outputs:
        assert isinstance(output.error, AdapterError)
        assert "'gone' can't be used" in str(output.error)
        assert output.applied_loras == []
    assert ended(others[-1]) == ["a"]
    assert others[-1].outputs[0].ok
    assert logged(worker.pipeline.log, "encode") == ["a/0"], "nothing ran without its adapter"


def test_a_group_whose_adapter_is_being_loaded_lets_others_go_first() -> None:
    worker = Worker()
    worker.library.may_load.clear()
    worker.send(0, request("slow", 1), ticks=1, activation=activation("s"))
    assert not worker.runner.has_turn, "nothing can be done yet"
    worker.send(1, request("quick", 2), ticks=2)
    first, second = worker.tick(), worker.tick()
    assert (ended(first), ended(second)) == ([], ["quick"])
    assert not worker.runner.has_turn
    worker.library.may_load.set()
    assert worker.loaded.wait(30)
    (report,) = worker.run()
    assert ended(report) == ["slow"]
    (lora,) = report.outputs[0].applied_loras
    assert (lora.name, lora.scale) == ("s", 1.0)


def test_a_newcomer_whose_adapter_is_being_loaded_joins_when_it_is_there() -> None:
    worker = Worker()
    worker.send(0, request("first", 4), ticks=4)
    worker.library.may_load.clear()
    worker.send(0, request("late", 2), ticks=0, activation=activation("s"))
    worker.tick()
    assert logged(worker.pipeline.log, "encode") == ["first/0"]
    worker.library.may_load.set()
    assert worker.loaded.wait(30)
    worker.tick()
    assert logged(worker.pipeline.log, "encode") == ["first/0", "late/0"]
    worker.send(0, ticks=3)
    done = {output.request_id: output for report in worker.run() for output in report.outputs}
    assert done["first"].applied_loras == []
    assert [lora.name for lora in done["late"].applied_loras] == ["s"]


def wait_until(worker: Worker, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, which may change with every load."""
    while not condition():
        assert worker.loaded.wait(30)
        worker.loaded.clear()


def finish(worker: Worker, number: int) -> list[DiffusionOutput]:
    """Run until so many requests have ended; returns their outputs in order."""
    outputs: list[DiffusionOutput] = []
    while len(outputs) < number:
        wait_until(worker, lambda: worker.runner.has_turn)
        outputs += worker.tick().outputs
    return outputs


def test_requests_that_hold_what_each_other_waits_for_both_end() -> None:
    worker = Worker()
    for group, name in enumerate("bc"):
        worker.send(group, request(name, 1), activation=activation(name))
        finish(worker, 1)
    worker.library.may_load.clear()
    worker.send(2, request("ab", 2), ticks=2, activation=activation("a", "b"))
    worker.send(3, request("cd", 2), ticks=2, activation=activation("c", "d"))
    assert not worker.runner.has_turn, "they are being loaded"
    worker.library.may_load.set()
    wait_until(worker, lambda: all(map(worker.adapters.lacks_room, ("ab", "cd"))))
    outputs = finish(worker, 2)
    assert [output.request_id for output in outputs if output.ok] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("max_skip_ms", "order"),
    [(0.0, ["first", "other", "next"]), (math.inf, ["first", "next", "other"])],
)
def test_room_for_adapters_is_made_for_who_was_passed_over_for_long(
    max_skip_ms: float, order: list[str]
) -> None:
    worker = Worker(max_skip_ms=max_skip_ms)
    worker.send(0, request("first", 2), ticks=2, activation=activation("a", "b"))
    worker.send(1, request("other", 1), ticks=1, activation=activation("c"))
    worker.send(0, request("next", 3), ticks=2, activation=activation("a", "b"))
    wait_until(worker, lambda: worker.adapters.lacks_room("other"))
    worker.send(0, ticks=2)
    assert [output.request_id for output in finish(worker, 3)] == order


def test_an_encode_of_several_that_raises_ends_its_culprit_only() -> None:
    class Broken(Counting):
        def prepare_encode_batch(self, states: Any) -> list[Any]:
            for state in states:
                self.prepare_encode(state)
                if state.request_id == "b":
                    raise RuntimeError("all at once")
            return [None] * len(states)

    worker = Worker(Broken())
    worker.send(0, request("a", 2), ticks=1)
    worker.send(1, request("b", 2), request("c", 2), ticks=5)
    worker.send(0, ticks=1)
    outputs = {o.request_id: o for report in worker.run() for o in report.outputs}
    assert outputs["a"].ok
    assert outputs["c"].ok
    assert outputs["b"].error is not None
    assert "RuntimeError: all at once" in str(outputs["b"].error)


def test_a_tick_that_fails_as_a_whole_ends_its_group_only() -> None:
    class Broken(Counting):
        @property
        def post_decode_batch(self) -> Any:
            raise KeyboardInterrupt

    broken = Worker(Broken())
    broken.send(0, request("a", 5), ticks=1)
    broken.send(1, request("b", 1), request("c", 2), ticks=2)
    broken.send(0, ticks=1)
    outputs = {o.request_id: o for report in broken.run() for o in report.outputs}
    assert sorted(outputs) == ["b", "c"]
    assert all("KeyboardInterrupt" in str(output.error) for output in outputs.values())
    assert broken.runner.has_turn is False


def test_an_abort_is_answered_in_the_next_tick_whoevers_turn_it_is() -> None:
    worker = Worker()
    worker.send(0, request("a", 9), ticks=1)
    worker.send(1, request("b", 9), request("c", 9), ticks=3)
    worker.tick()
    worker.aborts.set(["a", "b"])
    report = worker.tick()
    assert report.plan_id == 1
    assert sorted((o.request_id, o.aborted) for o in report.outputs) == [("a", True), ("b", True)]
    assert [who for _, who in worker.pipeline.batches] == [["a/0"], ["c/0"]]
    assert not worker.aborts.is_set("a"), "its id may come again"


def test_a_plan_whose_only_request_was_aborted_is_done_without_a_tick() -> None:
    worker = Worker()
    worker.send(0, request("a", 9), ticks=4)
    worker.aborts.set(["a"])
    (report,) = worker.run()
    assert (ended(report), report.plan_done, report.ticks) == (["a"], True, 0)
    assert worker.pipeline.batches == []


def test_an_id_may_come_again_after_an_abort() -> None:
    worker = Worker()
    worker.send(0, request("a", 9), ticks=1)
    worker.run()
    worker.aborts.set(["a"])
    worker.send(0, ticks=1)
    assert worker.run()[0].outputs[0].aborted
    worker.send(1, request("a", 1), ticks=1)
    assert worker.run()[0].outputs[0].ok


def test_outputs_name_their_worker_and_what_they_ran_under() -> None:
    worker = Worker()
    worker.send(0, request("a", 2), ticks=2)
    (_, report) = worker.run()
    (output,) = report.outputs
    assert output.metrics.worker == "worker 3"
    assert output.applied_loras == []
    assert output.metrics.run_ms > 0
    assert report.tick_ms > 0


def test_previews_are_reported_in_the_tick_they_are_due() -> None:
    class Showing(Counting):
        def preview(self, state: Any) -> Any:
            return self.post_decode(state)

    worker = Worker(Showing())
    worker.send(0, request("a", 4, preview_every=2), request("b", 4), ticks=4)
    shown = [{name: p.shape for name, p in r.previews.items()} for r in worker.run()]
    assert shown == [{}, {"a": (4, 6, 3)}, {}, {}]


def test_an_exclusive_pipeline_has_one_picture_under_way() -> None:
    worker = Worker(one_at_a_time=True)
    worker.send(0, request("a", 2, n=2), request("b", 1), ticks=9)
    reports = worker.run()
    assert all(len(who) == 1 for _, who in worker.pipeline.batches)
    assert [ended(report) for report in reports] == [[], [], [], ["a"], ["b"]]
