"""Which requests are run again when workers die, and with whom; no processes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_engine.engine.batching import RequestStatus, SchedulerConfig, WorkerSlot
from omni_engine.engine.scheduler import RequestScheduler
from omni_engine.engine.step_scheduler import StepScheduler

DOWN_ROUNDS = 3
STEPS = 3


class Stage:
    """Workers that die when a poisonous request runs on them."""

    def __init__(self, num_workers: int, poisonous: set[str]) -> None:
        self.poisonous = poisonous
        self.back_at = dict.fromkeys((f"w{i}" for i in range(num_workers)), 0)
        self.deaths: Counter[str] = Counter()
        self.ended: dict[str, RequestStatus] = {}
        self.round = 0

    @property
    def up(self) -> list[WorkerSlot]:
        return [WorkerSlot(name) for name, at in self.back_at.items() if at <= self.round]

    @property
    def now(self) -> float:
        return self.round * 0.1

    def lose(self, worker_id: str, running: list[str], scheduler: object) -> None:
        """As the engine does: twice is once too often, all others run again, alone."""
        self.back_at[worker_id] = self.round + DOWN_ROUNDS
        again = []
        for request_id in running:
            self.deaths[request_id] += 1
            if self.deaths[request_id] == 2:
                self.end(request_id, RequestStatus.FINISHED_ERROR, scheduler)
            else:
                again.append(request_id)
        assert scheduler.requeue(again, self.now, alone=True) == []  # type: ignore[attr-defined]

    def end(self, request_id: str, status: RequestStatus, scheduler: object) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = status
        assert scheduler.finish(request_id, status, self.now) is status  # type: ignore[attr-defined]


def only_the_poisonous_failed(stage: Stage, names: list[str]) -> None:
    failed = {n for n, s in stage.ended.items() if s is RequestStatus.FINISHED_ERROR}
    assert set(stage.ended) == set(names)
    assert failed == stage.poisonous


traffic = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 20)), max_size=25)


@settings(max_examples=150, deadline=None)
@given(requests=traffic, num_workers=st.integers(1, 3), policy=st.sampled_from(["grouped", "fifo"]))
def test_step_mode_only_what_kills_fails(
    requests: list[tuple[int, bool, int]], num_workers: int, policy: str
) -> None:
    names = [f"r{i}" for i in range(len(requests))]
    stage = Stage(
        num_workers, {n for n, (_, kills, _) in zip(names, requests, strict=True) if kills}
    )
    scheduler = StepScheduler(
        SchedulerConfig(max_num_seqs=3, policy=policy, max_skip_ms=500.0), max_resident_groups=2
    )
    left: dict[str, int] = {}
    arriving = sorted(zip(requests, names, strict=True), key=lambda one: one[0][2])
    while arriving or len(stage.ended) < len(names):
        stage.round += 1
        assert stage.round < 2000, "it comes to no end"
        while arriving and arriving[0][0][2] <= stage.round:
            (key, _, _), name = arriving.pop(0)
            scheduler.add(name, key=key, adapter=None, now=stage.now)
            left[name] = STEPS
        awaited = len(stage.up) < num_workers
        plans = scheduler.schedule(stage.up, stage.now, awaited=awaited)
        for slot in stage.up:
            residents = scheduler.residents(slot.worker_id)
            running = [one for ids in residents.values() for one in ids]
            suspects = [one for one in running if stage.deaths[one]]
            assert not suspects or len(running) == 1, "a suspect has nobody beside it"
            if stage.poisonous & set(running):
                stage.lose(slot.worker_id, scheduler.forget_worker(slot.worker_id), scheduler)
                for name in running:
                    left[name] = STEPS
                continue
            for plan in (one for one in plans if one.worker_id == slot.worker_id and one.ticks):
                for name in residents.get(plan.group_id, ()):
                    left[name] -= 1
                    if left[name] == 0:
                        stage.end(name, RequestStatus.FINISHED_COMPLETED, scheduler)
                scheduler.on_tick(slot.worker_id, plan.plan_id, plan.ticks, 50.0, True, stage.now)
    only_the_poisonous_failed(stage, names)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


@settings(max_examples=150, deadline=None)
@given(requests=traffic, num_workers=st.integers(1, 3), policy=st.sampled_from(["grouped", "fifo"]))
def test_request_mode_only_what_kills_fails(
    requests: list[tuple[int, bool, int]], num_workers: int, policy: str
) -> None:
    names = [f"r{i}" for i in range(len(requests))]
    stage = Stage(
        num_workers, {n for n, (_, kills, _) in zip(names, requests, strict=True) if kills}
    )
    scheduler = RequestScheduler(SchedulerConfig(max_num_seqs=3, policy=policy, max_skip_ms=500.0))
    arriving = sorted(zip(requests, names, strict=True), key=lambda one: one[0][2])
    while arriving or len(stage.ended) < len(names):
        stage.round += 1
        assert stage.round < 2000, "it comes to no end"
        while arriving and arriving[0][0][2] <= stage.round:
            (key, _, _), name = arriving.pop(0)
            scheduler.add(name, key=key, adapter=None, now=stage.now)
        for batch in scheduler.schedule(stage.up, stage.now):
            suspects = [one for one in batch.request_ids if stage.deaths[one]]
            assert not suspects or len(batch.request_ids) == 1, "a suspect has nobody beside it"
            if stage.poisonous & set(batch.request_ids):
                stage.lose(batch.worker_id, list(batch.request_ids), scheduler)
                continue
            for name in batch.request_ids:
                stage.end(name, RequestStatus.FINISHED_COMPLETED, scheduler)
    only_the_poisonous_failed(stage, names)
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)


def test_a_suspect_waits_for_no_company() -> None:
    scheduler = RequestScheduler(
        SchedulerConfig(max_num_seqs=4, request_batch_max_wait_ms=60_000.0)
    )
    for name in "abcd":
        scheduler.add(name, key="k", adapter=None, now=0.0)
    (batch,) = scheduler.schedule([WorkerSlot("w")], 0.0)
    scheduler.requeue(batch.request_ids, 1.0, alone=True)
    (batch,) = scheduler.schedule([WorkerSlot("w")], 1.0)
    assert batch.request_ids == ("a",)


def with_suspects(count: int) -> StepScheduler:
    """A scheduler whose worker died with so many requests."""
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=8))
    for i in range(count):
        scheduler.add(f"s{i}", key="k", adapter=None, weights=(f"w{i}",), now=0.0)
    scheduler.schedule([WorkerSlot("a")], 0.0)
    scheduler.requeue(scheduler.forget_worker("a"), 0.0, alone=True)
    return scheduler


def test_suspects_go_one_by_one_in_their_old_order() -> None:
    scheduler = with_suspects(3)
    assert scheduler.waiting_ids() == ["s0", "s1", "s2"]
    assert scheduler.num_waiting == 3
    assert sum(scheduler.waiting_by_key().values()) == 3
    assert scheduler.upcoming(2) == [("w0",), ("w1",)]
    order = []
    for _ in range(3):
        plans = scheduler.schedule([WorkerSlot("a")], 0.0)
        (name,) = [one for plan in plans for one in plan.new_ids]
        order.append(name)
        scheduler.finish(name, RequestStatus.FINISHED_COMPLETED, 0.0)
        for plan in plans:
            scheduler.on_tick("a", plan.plan_id, 1, 1.0, True, 0.0)
    assert order == ["s0", "s1", "s2"]


@pytest.mark.parametrize("awaited", [True, False])
def test_a_busy_worker_is_cleared_for_suspects_only_if_no_other_is_on_its_way(
    awaited: bool,
) -> None:
    scheduler = StepScheduler(SchedulerConfig(max_num_seqs=8))
    a, b = WorkerSlot("a"), WorkerSlot("b")
    for name in ("first", "second"):
        scheduler.add(name, key=name, adapter=None, now=0.0)
    scheduler.schedule([a, b], 0.0)
    (lost,) = scheduler.forget_worker("a")
    assert scheduler.requeue([lost], 0.0, alone=True) == []
    scheduler.schedule([b], 0.0, awaited=awaited)
    scheduler.add("new", key="second", adapter=None, now=0.0)
    joined = [one for p in scheduler.schedule([b], 0.0, awaited=awaited) for one in p.new_ids]
    assert joined == (["new"] if awaited else [])


@pytest.mark.parametrize("ends", ["abort", "drain"])
def test_held_suspects_can_be_aborted_and_drained(ends: str) -> None:
    scheduler = with_suspects(2)
    if ends == "abort":
        for name in ("s1", "s0"):
            assert scheduler.abort(name, 0.0) is RequestStatus.FINISHED_ABORTED
    else:
        assert scheduler.drain_waiting() == ["s0", "s1"]
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
    assert scheduler.schedule([WorkerSlot("a")], 0.0) == []
    scheduler.add("s0", key="k", adapter=None, now=0.0)
    (plan,) = [p for p in scheduler.schedule([WorkerSlot("a")], 0.0) if p.new_ids]
    assert plan.key == "k", "its successor is no suspect"
