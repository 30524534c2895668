"""The step scheduler's rules, one test each."""

from __future__ import annotations

import gc
import weakref

import pytest
from step_devices import ABORTED, DONE, Stage, assert_nothing_kept

from omni_engine.engine.batching import RequestStatus, WorkerSlot
from omni_engine.engine.step_scheduler import StepAssignment, StepScheduler

ERROR = RequestStatus.FINISHED_ERROR
POLICIES = ["grouped", "fifo"]


def joins(plans: list[StepAssignment]) -> list[tuple[str, str]]:
    """Who joins where: (worker, ids) of each plan with newcomers."""
    return [(plan.worker_id, " ".join(plan.new_ids)) for plan in plans if plan.new_ids]


def ticks(plans: list[StepAssignment]) -> list[tuple[int, int]]:
    return [(plan.group_id, plan.ticks) for plan in plans if plan.ticks]


def turns(stage: Stage) -> list[int]:
    """The groups whose ticks ran, in order."""
    return [report.group_id for report in stage.reports if report.ticks]


# Plans


@pytest.mark.parametrize("policy", POLICIES)
def test_compatible_requests_start_together_with_two_plans_of_one_tick(policy):
    stage = Stage(policy=policy, max_num_seqs=4)
    stage.add("a b c")
    assert stage.schedule() == [
        StepAssignment(0, "w0", 0, "k", None, ("a", "b", "c"), 1),
        StepAssignment(1, "w0", 0, "k", None, (), 1),
    ]
    assert stage.schedule() == []
    stage.run()
    assert stage.ended == dict.fromkeys("abc", DONE)
    assert sum(report.ticks for report in stage.reports) == 3
    assert_nothing_kept(stage.scheduler)


def test_a_plan_that_is_done_is_followed_by_one_more():
    stage = Stage()
    stage.add("a", steps=10)
    stage.schedule()
    stage.deliver(stage.devices["w0"].tick())
    assert ticks(stage.schedule()) == [(0, 1)]
    assert stage.schedule() == []


def test_plans_of_fast_ticks_last_about_20_ms_but_no_longer_than_a_turn():
    def plan_size(tick_ms, quantum):
        stage = Stage(tick_ms=tick_ms, quantum=quantum)
        stage.add("a", steps=1000)
        for _ in range(30):
            stage.round()
        assert stage.log[0].ticks == 1
        return stage.log[-1].ticks

    assert plan_size(2.0, 100) == 10
    assert plan_size(2.0, 4) == 4
    assert plan_size(9.0, 4) == 2
    assert plan_size(11.0, 4) == 1
    assert plan_size(20.0, 4) == 1
    assert plan_size(500.0, 4) == 1
    assert plan_size(0.0, 4) == 4


def test_the_size_of_plans_follows_an_average_and_not_the_last_tick():
    stage = Stage(tick_ms=4.5, quantum=100)
    stage.add("a", steps=1000)

    def next_plan():
        sent = len(stage.log)
        while len(stage.log) == sent:
            stage.deliver(stage.devices["w0"].tick())
            stage.schedule()
        return stage.log[-1].ticks

    stage.schedule()
    assert [next_plan() for _ in range(12)][-1] == 4
    stage.tick_ms = 100.0
    assert next_plan() == 1
    stage.tick_ms = 4.5
    after = [next_plan() for _ in range(20)]
    assert after == sorted(after)
    assert after[0] == 1
    assert {2, 3} <= set(after)
    assert after[-1] == 4


def test_slow_groups_get_single_ticks_beside_fast_ones():
    stage = Stage(quantum=4)
    stage.add("slow", key="video", steps=40)
    stage.add("fast", key="small", steps=40)
    key_of = {}
    for _ in range(60):
        key_of.update({plan.group_id: plan.key for plan in stage.schedule()})
        report = stage.devices["w0"].tick()
        stage.tick_ms = 200.0 if key_of[report.group_id] == "video" else 4.0
        stage.deliver(report)
    assert {plan.ticks for plan in stage.log if plan.key == "video"} == {1}
    assert max(plan.ticks for plan in stage.log if plan.key == "small") == 4


def test_a_worker_without_requests_gets_no_plan():
    stage = Stage(workers=2)
    stage.add("a")
    assert {plan.worker_id for plan in stage.schedule()} == {"w0"}
    stage.run()
    assert stage.schedule() == []


# Joining and leaving


@pytest.mark.parametrize("policy", POLICIES)
def test_a_late_request_joins_at_once_while_ticks_are_planned(policy):
    stage = Stage(policy=policy)
    stage.add("a", steps=20)
    for _ in range(10):
        stage.round()
    stage.schedule()
    stage.add("b", steps=2)
    [plan] = stage.schedule()
    assert (plan.group_id, plan.new_ids, plan.ticks) == (0, ("b",), 0)
    assert stage.devices["w0"].tick().advanced == ("a", "b")


def test_a_late_request_rides_on_the_next_plan_with_ticks_if_one_is_due():
    stage = Stage()
    stage.add("a", steps=20)
    stage.round()
    stage.add("b")
    [plan] = stage.schedule()
    assert (plan.new_ids, plan.ticks) == (("b",), 1)


def test_a_finisher_frees_its_place_for_the_next_one_in_the_same_call():
    stage = Stage(max_num_seqs=2)
    stage.add("short", steps=1)
    stage.add("long c", steps=9)
    stage.schedule()
    stage.deliver(stage.devices["w0"].tick())
    assert stage.ended == {"short": DONE}
    [plan] = stage.schedule()
    assert plan.new_ids == ("c",)
    assert plan.group_id == 0


def test_rows_and_work_count_over_the_whole_group_and_nobody_in_it_is_overtaken():
    stage = Stage(max_num_seqs=8, max_batch_rows=4, max_batch_work=100)
    stage.add("a", rows=2, work=10, steps=9)
    stage.add("b", rows=1, work=10, steps=2)
    stage.add("wide", rows=2, work=10)
    stage.add("c", rows=1, work=10)
    assert joins(stage.schedule()) == [("w0", "a b")]  # c would fit, but it is after wide
    stage.round()
    stage.round()
    assert joins(stage.schedule()) == [("w0", "wide")]
    stage.run()
    stage.add("heavy", work=90, steps=9)
    stage.add("light", work=10, steps=9)
    stage.add("more", work=10)
    assert joins(stage.schedule()) == [("w0", "heavy light")]


def test_a_group_keeps_its_id_until_its_last_request_ends_and_has_a_new_one_after():
    stage = Stage()
    stage.add("a", steps=5)
    stage.round()
    stage.add("b", steps=9)
    stage.run()
    stage.add("c")
    stage.run()
    assert [plan.group_id for plan in stage.log if plan.new_ids] == [0, 0, 1]


@pytest.mark.parametrize("finish_first", [True, False])
def test_a_group_stays_while_a_plan_of_its_own_is_out_and_can_be_revived(finish_first):
    stage = Stage(groups=1)
    stage.add("a", steps=1)
    stage.schedule()
    stage.deliver(stage.devices["w0"].tick(), finish_first=finish_first)
    assert stage.ended == {"a": DONE}
    assert stage.scheduler.residents("w0") == {0: ()}
    stage.add("other", key="other")
    stage.add("b", steps=1)
    [plan] = stage.schedule()
    # One plan is still out, so that b only joins; ticks for it follow when that is done.
    assert (plan.group_id, plan.new_ids) == (0, ("b",))
    stage.run()
    assert stage.ended == dict.fromkeys(["a", "b", "other"], DONE)
    assert_nothing_kept(stage.scheduler)


def test_a_plan_whose_requests_have_all_ended_is_reported_done_and_forgotten():
    stage = Stage()
    stage.add("a", steps=1)
    stage.schedule()
    device = stage.devices["w0"]
    stage.deliver(device.tick())
    report = device.tick()
    assert (report.ticks, report.plan_done, report.advanced) == (0, True, ())
    stage.deliver(report)
    assert_nothing_kept(stage.scheduler)


# Turns


def test_groups_take_turns_of_the_quantum():
    stage = Stage(quantum=3)
    stage.add("a", key="x", steps=9)
    stage.add("b", key="y", steps=9)
    stage.run()
    assert turns(stage) == [0, 0, 0, 1, 1, 1] * 3


def test_the_least_recently_served_group_goes_next():
    stage = Stage(quantum=2)
    for key in "xyz":
        stage.add(key, key=key, steps=6)
    stage.run()
    assert turns(stage) == [0, 0, 1, 1, 2, 2] * 3


def test_a_group_that_was_alone_makes_way_for_a_newcomer_after_what_is_planned():
    stage = Stage(quantum=4)
    stage.add("a", steps=50)
    for _ in range(10):
        stage.round()
    stage.schedule()
    stage.add("b", key="other", steps=50)
    start = len(turns(stage))
    for _ in range(11):
        stage.round()
    assert turns(stage)[start:] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1]


def test_a_stream_of_short_lived_groups_does_not_shut_out_one_that_stays():
    """Each runs for a turn and makes room for the next, which must not go before ``long``."""
    stage = Stage(groups=3, quantum=2)
    stage.add("long", key="long", steps=30)
    for number in range(60):
        stage.add(f"short{number}", key=number, steps=2)
    stage.run()
    assert turns(stage)[:12] == [0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 4, 4]
    assert list(stage.ended).index("long") < 32


def test_a_turn_of_fast_ticks_is_not_exceeded_by_a_plan():
    stage = Stage(tick_ms=4.0, quantum=7)
    stage.add("a", key="x", steps=100)
    stage.add("b", key="y", steps=100)
    stage.run()
    shared = turns(stage)[:140]
    assert shared == ([0] * 7 + [1] * 7) * 10
    assert {5, 2} <= {plan.ticks for plan in stage.log}


def test_the_turn_passes_at_once_when_a_groups_last_request_ends():
    stage = Stage(quantum=4)
    stage.add("a", key="x", steps=1)
    stage.add("b", key="y", steps=3)
    stage.run()
    assert turns(stage) == [0, 1, 1, 1]


def test_newcomers_of_a_group_without_planned_ticks_wait_for_its_turn_unsent():
    stage = Stage(quantum=4)
    stage.add("a", key="x", steps=50)
    stage.schedule()
    stage.add("b", key="y", steps=50)
    assert stage.schedule() == []
    assert stage.scheduler.status_of("b") is RequestStatus.WAITING
    assert stage.scheduler.waiting_ids() == ["b"]
    assert stage.scheduler.waiting_by_key() == {("y", None): 1}
    assert (stage.scheduler.num_waiting, stage.scheduler.num_running) == (1, 1)
    assert stage.scheduler.worker_of("b") is None
    for _ in range(4):
        stage.round()
    [plan] = [plan for plan in stage.log if plan.new_ids == ("b",)]
    assert plan.ticks == 1
    assert stage.scheduler.worker_of("b") == "w0"


# Placement


def test_a_burst_of_one_key_is_spread_over_equally_loaded_workers():
    stage = Stage(workers=2, max_num_seqs=8)
    stage.add("a b c d e f g h", steps=5)
    assert joins(stage.schedule()) == [("w0", "a c e g"), ("w1", "b d f h")]


@pytest.mark.parametrize("policy", POLICIES)
def test_late_requests_go_to_the_least_loaded_worker(policy):
    stage = Stage(workers=2, policy=policy, max_num_seqs=4)
    stage.add("a", steps=20)
    stage.round()
    stage.add("b", steps=20)
    assert joins(stage.schedule()) == [("w1", "b")]
    stage.add("c", rows=2, steps=20)
    assert joins(stage.schedule()) == [("w0", "c")]
    stage.add("d e", steps=20)
    assert joins(stage.schedule()) == [("w1", "d e")]


def test_work_weighs_more_than_rows():
    stage = Stage(workers=2)
    stage.add("video", key="v", work=1000, steps=20)
    stage.add("small", key="s", rows=4, work=40, steps=20)
    stage.schedule()
    stage.add("next", key="n", work=10, steps=20)
    assert joins(stage.schedule()) == []  # it waits for its turn
    stage.run()
    assert next(p.worker_id for p in stage.log if "next" in p.new_ids) == "w1"


def test_among_equally_loaded_workers_the_resident_group_is_joined():
    stage = Stage(workers=3)
    stage.add("a", key="x", steps=20)
    stage.add("b", key="y", steps=20)
    stage.add("c", key="z", steps=20)
    stage.schedule()
    stage.add("d", key="y", steps=20)
    assert joins(stage.schedule()) == [("w1", "d")]


def test_a_new_group_goes_where_its_adapter_is_active_or_held():
    slots = [
        WorkerSlot("w0", "X"),
        WorkerSlot("w1", "Y", frozenset({"Y", "A"})),
        WorkerSlot("w2", "A"),
    ]
    stage = Stage(workers=3)
    stage.add("a", adapter="A", weights=("A",), steps=9)
    assert joins(stage.schedule(slots)) == [("w2", "a")]
    stage.add("b", key="other", adapter="A", weights=("A",), steps=9)
    assert joins(stage.schedule(slots)) == [("w1", "b")]  # w2 is busier by now


def test_groups_differ_by_key_and_by_adapter():
    stage = Stage(max_num_seqs=4)
    stage.add("a", key="x")
    stage.add("b", key="x", adapter="A")
    stage.add("c", key="y")
    stage.run()
    assert {(p.key, p.adapter, p.new_ids) for p in stage.log if p.new_ids} == {
        ("x", None, ("a",)),
        ("x", "A", ("b",)),
        ("y", None, ("c",)),
    }


def test_a_group_does_not_spread_onto_the_place_that_another_group_waits_for():
    stage = Stage(workers=2, groups=1, max_num_seqs=8)
    stage.add("a b c d", key="x")
    stage.add("z", key="z")
    assert joins(stage.schedule()) == [("w0", "a b c d"), ("w1", "z")]


def test_a_group_that_is_full_on_one_worker_overflows_to_another():
    stage = Stage(workers=2, max_num_seqs=2)
    stage.add("a b", work=5, steps=20)
    stage.add("c d e", work=1, steps=20)
    assert joins(stage.schedule()) == [("w0", "a c"), ("w1", "b d")]
    assert stage.scheduler.waiting_ids() == ["e"]


def test_no_more_groups_become_resident_than_there_are_places():
    stage = Stage(groups=2)
    for key in "xyz":
        stage.add(key, key=key, steps=2)
    stage.round()
    assert set(stage.scheduler.residents("w0")) == {0, 1}
    assert stage.scheduler.waiting_by_key()[("z", None)] == 1
    stage.run()
    assert stage.ended == dict.fromkeys("xyz", DONE)


def test_the_fullest_group_becomes_resident_first_then_the_oldest():
    stage = Stage(groups=1, max_num_seqs=4)
    stage.add("a", key="one")
    stage.add("b c d", key="three")
    stage.add("e f", key="two")
    stage.add("g", key="also one")
    stage.run()
    assert [p.new_ids for p in stage.log if p.new_ids] == [
        ("b", "c", "d"),
        ("e", "f"),
        ("a",),
        ("g",),
    ]


def test_no_plan_goes_to_a_worker_that_is_not_ready_and_its_unsent_requests_go_elsewhere():
    stage = Stage(workers=2, quantum=4)
    stage.add("a b", key="x", steps=50)
    stage.schedule()
    stage.add("c d", key="y", steps=50)
    stage.schedule()
    assert stage.scheduler.waiting_ids() == ["c", "d"]
    only = [WorkerSlot("w1")]
    for _ in range(6):
        plans = stage.schedule(only)
        assert {plan.worker_id for plan in plans} <= {"w1"}
        stage.deliver(stage.devices["w1"].tick())
    assert stage.scheduler.worker_of("c") == stage.scheduler.worker_of("d") == "w1"
    # Back again, w0 goes on with what it ran.
    stage.run()
    assert len(stage.ended) == 4
    assert_nothing_kept(stage.scheduler)


# max_skip_ms


def flood(stage: Stage, keys: str, rounds: int, *, until: str | None = None) -> int:
    """Keep the groups of ``keys`` full for ``rounds`` rounds, or until a request has started."""
    for number in range(rounds):
        if until in stage.started_at:
            return number
        for key in keys:
            waiting = stage.scheduler.waiting_by_key().get((key, None), 0)
            for serial in range(waiting, 6):
                stage.add(f"{key}-{len(stage.steps)}", key=key, steps=4 + serial)
        stage.round()
    return rounds


def test_without_max_skip_flooded_groups_keep_their_places_and_with_it_one_makes_way():
    def rounds_until_cold_starts(max_skip_ms):
        stage = Stage(groups=2, max_num_seqs=3, quantum=2, max_skip_ms=max_skip_ms)
        flood(stage, "xy", 20)
        stage.add("cold", key="cold")
        return flood(stage, "xy", 400, until="cold")

    assert rounds_until_cold_starts(1e9) == 400
    # 100 ms are 5 rounds; then at most 9 steps of a drained group in turns with the other.
    assert 5 <= rounds_until_cold_starts(100) <= 5 + 2 * 9 + 4


def test_the_group_resident_longest_drains_and_takes_newcomers_again_once_that_is_moot():
    stage = Stage(groups=2, max_num_seqs=2, max_skip_ms=1000)
    stage.add("x0", key="x", steps=90)
    stage.add("y0", key="y", steps=90)
    stage.schedule()
    stage.add("cold", key="cold")
    stage.now = 0.9
    stage.add("x1", key="x", steps=90)
    stage.round()
    assert "x1" in stage.started_at
    for _ in range(8):
        stage.round()
    stage.scheduler.abort("x1", stage.now)
    stage.devices["w0"].aborted.add("x1")
    while "x1" not in stage.ended:
        stage.round()
    assert stage.now > 1.0
    stage.add("x2", key="x", steps=90)
    stage.add("y1", key="y", steps=90)
    for _ in range(20):
        stage.round()
    assert "y1" in stage.started_at
    assert "x2" not in stage.started_at  # x drains for cold
    stage.abort("cold")
    for _ in range(8):
        stage.round()
    assert "x2" in stage.started_at


def test_the_place_of_a_drained_group_goes_to_the_overdue_one_and_not_to_its_own_backlog():
    stage = Stage(groups=1, max_num_seqs=1, max_skip_ms=100)
    stage.add("x0 x1 x2 x3", key="x", steps=3)
    stage.round()
    stage.add("cold", key="cold", steps=3)
    stage.run()
    order = sorted(stage.started_at, key=lambda one: stage.started_at[one])
    # x1 runs as cold becomes overdue; x2 is older than cold, but x was drained for cold.
    assert order == ["x0", "x1", "cold", "x2", "x3"]


def test_an_overdue_group_goes_before_a_fuller_one():
    stage = Stage(groups=1, max_skip_ms=1000)
    stage.add("first", key="first", steps=60)
    stage.round()
    stage.add("old", key="old")
    stage.add("a b c", key="full")
    stage.run()
    order = sorted(stage.started_at, key=lambda one: stage.started_at[one])
    assert order == ["first", "old", "a", "b", "c"]


# fifo


def test_fifo_blocks_behind_a_head_that_has_no_place():
    stage = Stage(policy="fifo", groups=1)
    stage.add("a", key="x", steps=9)
    stage.round()
    stage.add("b", key="y")
    stage.add("c", key="x")
    stage.round()
    assert stage.scheduler.waiting_ids() == ["b", "c"]
    stage.run()
    assert [p.new_ids for p in stage.log if p.new_ids] == [("a",), ("b",), ("c",)]


def test_fifo_blocks_behind_a_head_whose_group_is_full():
    stage = Stage(policy="fifo", max_num_seqs=1)
    stage.add("a b", key="x", steps=9)
    stage.add("c", key="y")
    stage.round()
    assert stage.scheduler.waiting_ids() == ["b", "c"]
    stage.run()
    assert stage.started_at["b"] <= stage.started_at["c"]


def test_fifo_goes_on_over_several_groups_while_there_are_places():
    stage = Stage(policy="fifo", groups=3)
    stage.add("a", key="x", steps=50)
    stage.add("b", key="y", steps=50)
    stage.add("c", key="x", steps=50)
    stage.add("d", key="z", steps=50)
    assert joins(stage.schedule()) == [("w0", "a c")]  # all have places; b and d wait for a turn
    for _ in range(10):
        stage.round()
    assert list(stage.started_at) == ["a", "c", "b", "d"]


def test_fifo_uses_a_free_place_for_a_head_that_is_full_elsewhere():
    stage = Stage(policy="fifo", workers=2, groups=1, max_num_seqs=1)
    stage.add("a b", key="x", steps=9)
    stage.add("c", key="y")
    assert joins(stage.schedule()) == [("w0", "a"), ("w1", "b")]


# Aborting and finishing


def test_an_aborted_running_request_keeps_its_place_until_it_ends_as_aborted():
    stage = Stage(max_num_seqs=2)
    stage.add("a b", steps=50)
    stage.schedule()
    stage.add("c", steps=50)
    assert stage.abort("a") is RequestStatus.RUNNING
    assert stage.abort("a") is RequestStatus.RUNNING
    assert joins(stage.schedule()) == []
    assert stage.scheduler.worker_of("a") == "w0"
    stage.deliver(stage.devices["w0"].tick())
    assert stage.ended == {"a": ABORTED}
    assert joins(stage.schedule()) == [("w0", "c")]
    assert stage.scheduler.worker_of("a") is None


def test_an_abort_wins_over_a_completion_that_raced_with_it():
    stage = Stage()
    stage.add("a b", steps=1)
    stage.schedule()
    stage.scheduler.abort("a", 0.0)
    stage.deliver(stage.devices["w0"].tick())
    assert stage.ended == {"a": ABORTED, "b": DONE}
    assert stage.scheduler.finish("a", DONE, 0.0) is None


def test_a_request_with_a_place_that_was_not_sent_is_aborted_at_once():
    stage = Stage(quantum=4)
    stage.add("a", key="x", steps=9)
    stage.schedule()
    stage.add("b", key="y")
    stage.schedule()
    assert stage.abort("b") is ABORTED
    assert stage.scheduler.status_of("b") is None
    assert set(stage.scheduler.residents("w0")) == {0}
    stage.run()
    assert all("b" not in plan.new_ids for plan in stage.log)
    assert_nothing_kept(stage.scheduler)


def test_an_error_is_reported_as_such_and_final_states_only_are_taken():
    stage = Stage()
    stage.add("a")
    stage.schedule()
    with pytest.raises(ValueError, match="FINISHED"):
        stage.scheduler.finish("a", RequestStatus.RUNNING, 0.0)
    assert stage.scheduler.finish("a", ERROR, 0.0) is ERROR


def test_unknown_ids_workers_and_plans_are_passed_over():
    scheduler = StepScheduler(Stage().config)
    assert scheduler.abort("ghost", 0.0) is None
    assert scheduler.finish("ghost", DONE, 0.0) is None
    assert scheduler.requeue(["ghost"], 0.0) == []
    assert scheduler.forget_worker("ghost") == []
    assert scheduler.residents("ghost") == {}
    assert scheduler.worker_of("ghost") is None
    scheduler.on_tick("ghost", 0, 1, 1.0, True, 0.0)
    assert_nothing_kept(scheduler)


def test_a_request_that_fits_no_group_is_refused():
    stage = Stage(max_batch_rows=4)
    with pytest.raises(ValueError, match="max_batch_rows is 4"):
        stage.add("a", rows=5)
    with pytest.raises(TypeError):
        stage.add("b", key=["not hashable"])
    assert_nothing_kept(stage.scheduler)


def test_drain_forgets_what_waits_with_a_place_or_without_and_leaves_what_runs():
    stage = Stage(groups=2, quantum=4)
    stage.add("a", key="x", steps=9)
    stage.schedule()
    for name, key in zip("bcd", "yzx", strict=True):
        stage.add(name, key=key)
    stage.scheduler.schedule([], 0.0)
    stage.schedule()
    assert stage.scheduler.drain_waiting() == ["b", "c"]  # d runs with a
    assert (stage.scheduler.num_waiting, stage.scheduler.num_running) == (0, 2)
    for name in "bc":
        stage.end(name, ABORTED)
    stage.run()
    assert_nothing_kept(stage.scheduler)


# Lost workers


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_lost_worker_ran_waits_again_in_arrival_order_before_the_rest(policy):
    stage = Stage(policy=policy, max_num_seqs=2, groups=2, quantum=2)
    stage.add("a b c", key="x", steps=5)
    stage.add("d", key="y", steps=5)
    stage.schedule()
    stage.abort("b")
    assert stage.lose("w0") == ["a", "b"]
    assert stage.ended == {"b": ABORTED}
    assert stage.scheduler.waiting_ids() == ["a", "c", "d"]
    assert stage.scheduler.worker_of("a") is None
    assert stage.scheduler.residents("w0") == {}
    stage.run()
    assert stage.ended == {"b": ABORTED} | dict.fromkeys("acd", DONE)
    assert_nothing_kept(stage.scheduler)


def test_a_lost_workers_requests_may_end_instead_of_waiting_again():
    stage = Stage()
    stage.add("a b")
    stage.schedule()
    assert stage.scheduler.forget_worker("w0") == ["a", "b"]
    assert stage.scheduler.status_of("a") is RequestStatus.RUNNING
    assert stage.scheduler.finish("a", ERROR, 0.0) is ERROR
    assert stage.scheduler.abort("b", 0.0) is RequestStatus.RUNNING
    assert stage.scheduler.requeue(["a", "b"], 0.0) == ["b"]
    assert_nothing_kept(stage.scheduler)


def test_late_reports_of_a_lost_worker_change_nothing():
    stage = Stage()
    stage.add("a", steps=2)
    stage.schedule()
    late = stage.devices["w0"].tick()
    stage.lose("w0")
    stage.schedule()
    stage.scheduler.on_tick("w0", late.plan_id, 1, 20.0, True, 0.0)
    assert stage.schedule() == []  # two plans are out still
    stage.run()
    assert stage.ended == {"a": DONE}


def test_the_other_worker_takes_over():
    stage = Stage(workers=2, max_num_seqs=4)
    stage.add("a b c d", steps=9)
    stage.schedule()
    stage.lose("w0")
    del stage.devices["w0"]
    assert joins(stage.schedule()) == [("w1", "a c")]


# State


def test_residents_names_running_requests_by_group():
    stage = Stage(quantum=1)
    stage.add("a b", key="x", steps=9)
    stage.add("c", key="y", steps=9)
    stage.round()
    assert stage.scheduler.residents("w0") == {0: ("a", "b"), 1: ("c",)}


def test_time_alone_never_changes_a_decision():
    stage = Stage(groups=1, max_skip_ms=10)
    stage.add("a", key="x", steps=9)
    stage.round()
    stage.add("b", key="y")
    assert stage.scheduler.next_deadline(stage.now) is None


def test_a_finished_request_and_its_group_are_freed_at_once():
    stage = Stage()
    key = type("Key", (), {})()
    scheduler = StepScheduler(stage.config)
    scheduler.add("a", key=key, adapter=None, now=0.0)
    plan_ids = [plan.plan_id for plan in scheduler.schedule([WorkerSlot("w0")], 0.0)]
    seen = weakref.ref(key)
    del key
    gc.disable()
    try:
        scheduler.finish("a", DONE, 0.0)
        for plan_id in plan_ids:
            scheduler.on_tick("w0", plan_id, 1, 1.0, True, 0.0)
        assert seen() is None
    finally:
        gc.enable()


def test_memory_stays_bounded_over_many_aborts():
    stage = Stage(groups=1)
    stage.add("stays", key="old", steps=10**9)
    stage.schedule()
    scheduler = stage.scheduler
    for number in range(50_000):
        scheduler.add(f"r{number}", key=number % 3, adapter=None, now=number * 1e-3)
        if number >= 50:
            assert scheduler.abort(f"r{number - 50}", number * 1e-3) is ABORTED
        if number % 1000 == 0:
            stage.schedule()
    heaps = [scheduler._queue._heads._heap]
    heaps += [heads._heap for heads in scheduler._policy._index._levels.values()]
    assert max(len(heap) for heap in heaps) < 200
