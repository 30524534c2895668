"""The request scheduler's rules, one test each."""

from __future__ import annotations

import gc
import itertools
import math
import weakref

import pytest
from scheduler_service import ABORTED, DONE, assert_nothing_kept

from omni_engine.engine.scheduler import (
    Assignment,
    RequestScheduler,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)

ERROR = RequestStatus.FINISHED_ERROR
POLICIES = ["grouped", "fifo"]


def make(**config) -> RequestScheduler:
    return RequestScheduler(SchedulerConfig(**config))


def idle(*adapters, held=()) -> list[WorkerSlot]:
    """One idle worker per adapter, each with that adapter active."""
    return [WorkerSlot(f"w{n}", adapter, frozenset(held)) for n, adapter in enumerate(adapters)]


def add(scheduler, ids, *, key="k", adapter=None, now=0.0, **sizes) -> None:
    for request_id in ids.split():
        scheduler.add(request_id, key=key, adapter=adapter, now=now, **sizes)


def batches(assignments: list[Assignment]) -> list[str]:
    return [" ".join(assignment.request_ids) for assignment in assignments]


def run_all(scheduler: RequestScheduler, slot: WorkerSlot, now: float = 0.0) -> list[Assignment]:
    """Run everything that waits on one worker, whose adapter follows its batches."""
    done: list[Assignment] = []
    while assignments := scheduler.schedule([slot], now):
        [assignment] = assignments
        done.append(assignment)
        for request_id in assignment.request_ids:
            assert scheduler.finish(request_id, DONE, now) is DONE
        slot = WorkerSlot(slot.worker_id, assignment.adapter, slot.held_adapters)
    return done


# Configuration and admission


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", 2.0),
        ("max_num_seqs", True),
        ("max_batch_rows", 0),
        ("max_batch_work", -1),
        ("max_mixed_adapters", 0),
        ("request_batch_max_wait_ms", -1.0),
        ("request_batch_max_wait_ms", math.inf),
        ("request_batch_max_wait_ms", math.nan),
        ("request_batch_max_wait_ms", "5"),
        ("max_skip_ms", -0.1),
        ("max_skip_ms", math.nan),
        ("policy", "lifo"),
    ],
)
def test_config_refuses_a_value_out_of_range_and_names_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{field: value})


def test_a_live_id_is_refused_and_a_finished_one_may_be_used_again():
    scheduler = make()
    add(scheduler, "a")
    with pytest.raises(ValueError, match="request_id = 'a'"):
        add(scheduler, "a")
    scheduler.schedule(idle(None), 0.0)
    with pytest.raises(ValueError, match="already waiting or running"):
        add(scheduler, "a")
    scheduler.finish("a", DONE, 0.0)
    add(scheduler, "a")
    assert scheduler.waiting_ids() == ["a"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 5}, "rows = 5.*max_batch_rows is 4"),
        ({"work": 101}, "work = 101.*max_batch_work is 100"),
        ({"rows": 0}, "rows = 0"),
        ({"work": 0}, "work = 0"),
    ],
)
def test_a_request_that_fits_no_batch_is_refused_and_leaves_nothing(sizes, message):
    scheduler = make(max_batch_rows=4, max_batch_work=100)
    with pytest.raises(ValueError, match=message):
        add(scheduler, "a", **sizes)
    assert_nothing_kept(scheduler)


def test_a_key_that_cannot_be_hashed_is_refused_and_leaves_nothing():
    scheduler = make()
    with pytest.raises(TypeError):
        add(scheduler, "a", key=["not hashable"])
    assert_nothing_kept(scheduler)


# Batches


@pytest.mark.parametrize("policy", POLICIES)
def test_eight_compatible_requests_run_as_two_batches_of_four(policy):
    scheduler = make(policy=policy, max_num_seqs=4)
    add(scheduler, "a b c d e f g h")
    done = run_all(scheduler, idle(None)[0])
    assert batches(done) == ["a b c d", "e f g h"]
    assert done[0] == Assignment(0, "w0", "k", None, ("a", "b", "c", "d"), 4)
    assert [batch.batch_id for batch in done] == [0, 1]
    assert_nothing_kept(scheduler)


def test_nothing_waiting_or_nobody_idle_schedules_nothing():
    scheduler = make()
    assert scheduler.schedule(idle(None, None), 0.0) == []
    add(scheduler, "a")
    assert scheduler.schedule([], 0.0) == []
    assert scheduler.waiting_ids() == ["a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_shares_key_and_adapter(policy):
    scheduler = make(policy=policy)
    add(scheduler, "a b", key="small")
    add(scheduler, "c", key="large")
    add(scheduler, "d e", key="small", adapter="ink")
    done = run_all(scheduler, idle(None)[0])
    assert sorted(batches(done)) == ["a b", "c", "d e"]
    assert {(batch.key, batch.adapter) for batch in done} == {
        ("small", None),
        ("large", None),
        ("small", "ink"),
    }


def test_alternating_adapters_batch_under_grouped_and_run_one_by_one_under_fifo():
    count = {}
    for policy in POLICIES:
        scheduler = make(policy=policy, max_num_seqs=4)
        for number in range(40):
            add(scheduler, f"r{number}", adapter="AB"[number % 2])
        done = run_all(scheduler, WorkerSlot("w", None))
        assert sorted(i for batch in done for i in batch.request_ids) == sorted(
            f"r{number}" for number in range(40)
        )
        switches = sum(one.adapter != two.adapter for one, two in itertools.pairwise(done))
        count[policy] = (len(done), switches)
    assert count == {"grouped": (10, 1), "fifo": (40, 39)}


def test_rows_count_against_the_batch_and_order_within_a_key_is_kept():
    scheduler = make(max_num_seqs=4, max_batch_rows=4)
    add(scheduler, "a b", rows=2)
    add(scheduler, "c", rows=3)
    add(scheduler, "d", rows=2)
    add(scheduler, "e", rows=1)
    done = run_all(scheduler, idle(None)[0])
    # d and e would fit beside a smaller one, but nobody overtakes c.
    assert batches(done) == ["a b", "c", "d e"]
    assert [batch.rows for batch in done] == [4, 3, 3]


@pytest.mark.parametrize("policy", POLICIES)
def test_work_counts_against_the_batch(policy):
    scheduler = make(policy=policy, max_num_seqs=8, max_batch_work=100)
    add(scheduler, "a b c", work=40)
    assert batches(run_all(scheduler, idle(None)[0])) == ["a b", "c"]


# The grouped policy


def test_grouped_takes_the_fullest_batch_first():
    scheduler = make()
    add(scheduler, "a", key="one")
    add(scheduler, "b c d", key="three")
    add(scheduler, "e f", key="two")
    assert batches(run_all(scheduler, idle(None)[0])) == ["b c d", "e f", "a"]


def test_a_group_whose_next_request_does_not_fit_counts_as_full():
    scheduler = make(max_num_seqs=4, max_batch_rows=4)
    add(scheduler, "a b c", key="three")
    add(scheduler, "d", key="wide", rows=3)
    add(scheduler, "e", key="wide", rows=2)
    assert batches(scheduler.schedule(idle(None), 0.0)) == ["d"]


def test_a_group_whose_rows_are_used_up_counts_as_full():
    scheduler = make(max_num_seqs=4, max_batch_rows=4)
    add(scheduler, "a b c", key="three")
    add(scheduler, "d", key="wide", rows=4)
    assert batches(scheduler.schedule(idle(None), 0.0)) == ["d"]


def test_among_equals_the_active_adapter_goes_first_then_a_held_one_then_the_oldest():
    scheduler = make()
    for adapter in ("cold", "held", "active"):
        add(scheduler, f"{adapter}0 {adapter}1", adapter=adapter, weights=(adapter,))
    order = batches(run_all(scheduler, WorkerSlot("w", "active", frozenset({"active", "held"}))))
    assert order == ["active0 active1", "held0 held1", "cold0 cold1"]
    for adapter in ("cold", "older"):
        add(scheduler, adapter, adapter=adapter)
    assert batches(run_all(scheduler, WorkerSlot("w", None))) == ["cold", "older"]


def test_a_fuller_batch_goes_before_the_active_adapter():
    scheduler = make()
    add(scheduler, "a", adapter="active")
    add(scheduler, "b c", adapter="other")
    assert batches(scheduler.schedule(idle("active"), 0.0)) == ["b c"]


def test_the_oldest_request_goes_first_once_it_was_passed_over_for_max_skip():
    def after(seconds):
        scheduler = make(max_skip_ms=1000)
        add(scheduler, "old", key="rare", now=10.0)
        for number in range(12):
            add(scheduler, f"hot{number}", key="hot", now=10.0)
        return batches(scheduler.schedule(idle(None), 10.0 + seconds))

    assert after(0.999) == ["hot0 hot1 hot2 hot3"]
    assert after(1.0) == ["old"]


def test_an_overdue_group_takes_its_younger_members_along():
    scheduler = make(max_skip_ms=1000)
    add(scheduler, "old", key="rare", now=0.0)
    add(scheduler, "h0 h1 h2 h3", key="hot", now=0.5)
    add(scheduler, "young", key="rare", now=1.5)
    assert batches(scheduler.schedule(idle(None), 1.5)) == ["old young"]


def test_several_overdue_groups_go_oldest_first():
    scheduler = make(max_skip_ms=0)
    for number, key in enumerate(["x", "y", "z", "y", "y", "x"]):
        add(scheduler, f"r{number}", key=key)
    assert batches(run_all(scheduler, idle(None)[0])) == ["r0 r5", "r1 r3 r4", "r2"]


# Several workers


def test_each_idle_worker_gets_at_most_one_batch():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "a b c d e")
    got = scheduler.schedule(idle(None, None), 0.0)
    assert batches(got) == ["a b", "c d"]
    assert [batch.worker_id for batch in got] == ["w0", "w1"]
    assert scheduler.num_waiting == 1


def test_a_batch_goes_to_the_worker_with_its_adapter_active():
    scheduler = make()
    add(scheduler, "a", adapter="A")
    add(scheduler, "b", adapter="B")
    add(scheduler, "c", adapter="C")
    got = {batch.adapter: batch.worker_id for batch in scheduler.schedule(idle("C", "A", "X"), 0.0)}
    assert got == {"C": "w0", "A": "w1", "B": "w2"}


def test_an_overdue_batch_does_not_displace_one_from_its_worker():
    scheduler = make(max_skip_ms=1000)
    add(scheduler, "old", adapter="C", now=0.0)
    add(scheduler, "a0 a1", adapter="A", now=0.5)
    got = scheduler.schedule(idle("A", "B"), 1.0)
    assert [(batch.adapter, batch.worker_id) for batch in got] == [("C", "w1"), ("A", "w0")]


def test_a_held_adapter_is_used_where_nobody_has_it_active():
    scheduler = make()
    slots = [
        WorkerSlot("w0", "X", frozenset({"X"})),
        WorkerSlot("w1", "Y", frozenset({"Y", "A"})),
    ]
    add(scheduler, "a", adapter="A", weights=("A",))
    assert scheduler.schedule(slots, 0.0)[0].worker_id == "w1"
    scheduler.finish("a", DONE, 0.0)
    add(scheduler, "x", adapter="X", weights=("X",))
    assert scheduler.schedule(slots[::-1], 0.0)[0].worker_id == "w0"


def test_the_base_model_is_an_adapter_like_any_other_for_placement():
    scheduler = make()
    add(scheduler, "base")
    assert scheduler.schedule(idle("A", None), 0.0)[0].worker_id == "w1"


def test_a_second_batch_of_an_adapter_does_not_count_on_the_same_worker():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "a0 a1 a2 a3", adapter="A")
    add(scheduler, "b0 b1", adapter="B")
    got = scheduler.schedule(idle("A", "B"), 0.0)
    assert [(batch.adapter, batch.worker_id) for batch in got] == [("A", "w0"), ("B", "w1")]


# The fifo policy


def test_fifo_stops_at_the_first_incompatible_request():
    scheduler = make(policy="fifo")
    add(scheduler, "a b", key="x")
    add(scheduler, "c", key="y")
    add(scheduler, "d", key="x")
    assert batches(run_all(scheduler, idle(None)[0])) == ["a b", "c", "d"]


def test_fifo_goes_on_in_order_over_several_workers():
    scheduler = make(policy="fifo")
    add(scheduler, "a", adapter="A")
    add(scheduler, "b", adapter="B")
    add(scheduler, "c", adapter="C")
    got = scheduler.schedule(idle("B", "A"), 0.0)
    assert [(batch.request_ids, batch.worker_id) for batch in got] == [
        (("a",), "w1"),
        (("b",), "w0"),
    ]


def test_fifo_closes_the_gap_that_an_abort_leaves():
    scheduler = make(policy="fifo")
    add(scheduler, "a", key="x")
    add(scheduler, "b", key="y")
    add(scheduler, "c", key="x")
    scheduler.abort("b", 0.0)
    assert batches(scheduler.schedule(idle(None), 0.0)) == ["a c"]


# The admission wait


@pytest.mark.parametrize("policy", POLICIES)
def test_no_admission_wait_by_default(policy):
    scheduler = make(policy=policy)
    add(scheduler, "a", now=5.0)
    assert scheduler.next_deadline(5.0) is None
    assert batches(scheduler.schedule(idle(None), 5.0)) == ["a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_request_waits_exactly_its_bound(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50)
    add(scheduler, "a", now=7.0)
    assert scheduler.schedule(idle(None), 7.0) == []
    deadline = scheduler.next_deadline(7.0)
    assert deadline == pytest.approx(7.05)
    assert scheduler.schedule(idle(None), math.nextafter(deadline, 0)) == []
    assert batches(scheduler.schedule(idle(None), deadline)) == ["a"]
    assert_nothing_waits(scheduler, deadline)


def assert_nothing_waits(scheduler, now):
    assert scheduler.num_waiting == 0
    assert scheduler.next_deadline(now) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_burst_over_30_ms_shares_one_batch_with_a_wait_of_50(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50, max_num_seqs=4)
    for number in range(3):
        now = number * 0.015
        add(scheduler, f"r{number}", now=now)
        assert scheduler.schedule(idle(None), now) == []
    assert batches(scheduler.schedule(idle(None), scheduler.next_deadline(0.03))) == ["r0 r1 r2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_wait_ends_at_once_when_the_batch_is_full(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50, max_num_seqs=2)
    add(scheduler, "a", now=0.0)
    add(scheduler, "b", now=0.01)
    assert batches(scheduler.schedule(idle(None), 0.01)) == ["a b"]


@pytest.mark.parametrize("policy", POLICIES)
def test_incompatible_requests_do_not_end_the_wait(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50, max_num_seqs=2)
    for number in range(8):
        add(scheduler, f"r{number}", key=number, now=0.0)
    assert scheduler.schedule(idle(None), 0.049) == []


def test_other_ready_groups_go_during_a_wait_under_grouped_but_not_under_fifo():
    started = {}
    for policy in POLICIES:
        scheduler = make(policy=policy, request_batch_max_wait_ms=50, max_num_seqs=2)
        add(scheduler, "a", key="x", now=0.0)
        add(scheduler, "b c", key="y", now=0.01)
        started[policy] = batches(scheduler.schedule(idle(None), 0.01))
    assert started == {"grouped": ["b c"], "fifo": []}


def test_a_new_head_waits_from_its_own_arrival():
    scheduler = make(request_batch_max_wait_ms=50)
    add(scheduler, "a", now=0.0)
    add(scheduler, "b", now=0.04)
    scheduler.abort("a", 0.045)
    assert scheduler.schedule(idle(None), 0.05) == []
    assert scheduler.next_deadline(0.05) == pytest.approx(0.09)


def test_a_batch_that_an_abort_leaves_short_waits_again():
    scheduler = make(request_batch_max_wait_ms=50, max_num_seqs=2)
    add(scheduler, "a b", now=0.0)
    scheduler.abort("b", 0.01)
    assert scheduler.schedule(idle(None), 0.01) == []
    assert scheduler.next_deadline(0.01) == pytest.approx(0.05)


def test_the_rest_of_a_group_whose_wait_is_over_goes_in_the_same_call():
    scheduler = make(request_batch_max_wait_ms=50, max_num_seqs=4)
    add(scheduler, "a b c d e", now=0.0)
    assert batches(scheduler.schedule(idle(None, None), 0.05)) == ["a b c d", "e"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadline_that_passed_unseen_is_due_now_and_not_lost(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50)
    add(scheduler, "a", now=0.0)
    assert scheduler.schedule(idle(None), 0.049) == []
    assert scheduler.next_deadline(0.06) == 0.06


@pytest.mark.parametrize("policy", POLICIES)
def test_with_nobody_idle_a_wait_that_is_over_asks_for_no_further_wake_up(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=50)
    add(scheduler, "a", now=0.0)
    assert scheduler.schedule([], 0.06) == []
    assert scheduler.next_deadline(0.06) is None
    assert batches(scheduler.schedule(idle(None), 0.06)) == ["a"]


def test_max_skip_does_not_shorten_the_wait_of_a_lone_group():
    scheduler = make(request_batch_max_wait_ms=5000, max_skip_ms=1000)
    add(scheduler, "a", now=0.0)
    assert scheduler.schedule(idle(None), 4.9) == []
    assert batches(scheduler.schedule(idle(None), 5.0)) == ["a"]


def test_max_skip_ends_a_longer_wait_when_another_group_would_go_first():
    scheduler = make(request_batch_max_wait_ms=5000, max_skip_ms=1000, max_num_seqs=2)
    add(scheduler, "a", key="x", now=0.0)
    add(scheduler, "b c d e", key="y", now=0.5)
    assert batches(scheduler.schedule(idle(None), 0.9)) == ["b c"]
    assert batches(scheduler.schedule(idle(None), 1.0)) == ["a"]
    assert batches(scheduler.schedule(idle(None), 1.0)) == ["d e"]


# Aborting and finishing


def test_a_waiting_request_is_aborted_at_once_and_forgotten():
    scheduler = make()
    add(scheduler, "a b c")
    assert scheduler.abort("b", 0.0) is ABORTED
    assert scheduler.abort("b", 0.0) is None
    assert batches(scheduler.schedule(idle(None), 0.0)) == ["a c"]


def test_an_abort_wins_over_a_completion_that_raced_with_it():
    scheduler = make()
    add(scheduler, "a b c")
    scheduler.schedule(idle(None), 0.0)
    assert scheduler.abort("a", 0.0) is RequestStatus.RUNNING
    assert scheduler.abort("a", 0.0) is RequestStatus.RUNNING
    assert scheduler.status_of("a") is RequestStatus.RUNNING
    assert scheduler.finish("a", DONE, 0.0) is ABORTED
    assert scheduler.finish("a", DONE, 0.0) is None
    assert scheduler.abort("a", 0.0) is None
    assert scheduler.finish("b", ERROR, 0.0) is ERROR
    assert scheduler.finish("c", DONE, 0.0) is DONE
    assert scheduler.abort("c", 0.0) is None
    assert_nothing_kept(scheduler)


def test_unknown_ids_are_passed_over():
    scheduler = make()
    assert scheduler.abort("ghost", 0.0) is None
    assert scheduler.finish("ghost", DONE, 0.0) is None
    assert scheduler.requeue(["ghost"], 0.0) == []
    assert scheduler.status_of("ghost") is None


def test_finish_takes_final_states_only():
    scheduler = make()
    add(scheduler, "a")
    scheduler.schedule(idle(None), 0.0)
    with pytest.raises(ValueError, match="FINISHED"):
        scheduler.finish("a", RequestStatus.RUNNING, 0.0)


@pytest.mark.parametrize("gone", ["b", "c"])
def test_aborting_at_the_edge_of_a_full_batch_lets_later_ones_in(gone):
    scheduler = make(max_num_seqs=4, max_batch_rows=4)
    add(scheduler, "a", rows=1)
    add(scheduler, "b", rows=2)
    add(scheduler, "c", rows=2)
    add(scheduler, "d", rows=1)
    scheduler.abort(gone, 0.0)
    rest = " ".join(sorted({"a", "b", "c", "d"} - {gone}))
    assert batches(scheduler.schedule(idle(None), 0.0)) == [rest]


# Putting back


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_a_lost_worker_return_to_the_front_in_arrival_order(policy):
    scheduler = make(policy=policy, max_num_seqs=2)
    add(scheduler, "a b c d e f")
    first, second = scheduler.schedule(idle(None, None), 0.0)
    assert (first.request_ids, second.request_ids) == (("a", "b"), ("c", "d"))
    assert scheduler.requeue(["b", "a"], 1.0) == []
    assert scheduler.waiting_ids() == ["a", "b", "e", "f"]
    assert scheduler.status_of("a") is RequestStatus.WAITING
    assert scheduler.requeue(second.request_ids, 1.0) == []
    assert scheduler.waiting_ids() == ["a", "b", "c", "d", "e", "f"]
    assert batches(run_all(scheduler, idle(None)[0], 1.0)) == ["a b", "c d", "e f"]
    assert_nothing_kept(scheduler)


def test_an_aborted_request_of_a_lost_worker_ends_instead_of_waiting_again():
    scheduler = make()
    add(scheduler, "a b c d")
    scheduler.schedule(idle(None), 0.0)
    scheduler.abort("d", 0.0)
    scheduler.abort("b", 0.0)
    assert scheduler.requeue(["d", "c", "b", "a"], 0.0) == ["b", "d"]
    assert scheduler.waiting_ids() == ["a", "c"]
    assert scheduler.status_of("b") is None


def test_a_late_report_does_not_end_a_request_that_was_put_back():
    scheduler = make()
    add(scheduler, "a")
    scheduler.schedule(idle(None), 0.0)
    scheduler.requeue(["a"], 0.0)
    assert scheduler.finish("a", DONE, 0.0) is None
    assert scheduler.waiting_ids() == ["a"]


def test_a_request_put_back_keeps_its_age():
    scheduler = make(max_skip_ms=1000)
    add(scheduler, "old", key="rare", now=0.0)
    scheduler.schedule(idle(None), 0.0)
    add(scheduler, "h0 h1 h2 h3", key="hot", now=0.5)
    scheduler.requeue(["old"], 1.0)
    assert batches(scheduler.schedule(idle(None), 1.0)) == ["old"]


# State


def test_counts_and_groups_are_reported():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "a b c", key="x")
    add(scheduler, "d", key="x", adapter="A")
    scheduler.schedule(idle(None), 0.0)
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 2)
    assert scheduler.waiting_by_key() == {("x", None): 1, ("x", "A"): 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_drain_forgets_what_waits_and_leaves_what_runs(policy):
    scheduler = make(policy=policy, max_num_seqs=1, request_batch_max_wait_ms=1)
    for number in range(6):
        add(scheduler, f"r{number}", key=number % 2)
    scheduler.schedule(idle(None), 0.0)
    assert scheduler.drain_waiting() == ["r1", "r2", "r3", "r4", "r5"]
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)
    assert scheduler.finish("r0", DONE, 0.0) is DONE
    assert_nothing_kept(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_stays_bounded_over_many_aborts(policy):
    scheduler = make(policy=policy, request_batch_max_wait_ms=10)
    add(scheduler, "stays", key="old")
    for number in range(100_000):
        now = number * 1e-3
        add(scheduler, f"r{number}", key=number % 3, now=now)
        if number >= 50:
            assert scheduler.abort(f"r{number - 50}", now) is ABORTED
        if number % 1000 == 0:
            scheduler.schedule([], now)
    assert scheduler.num_waiting == 51
    heaps = [scheduler._queue._heads._heap]
    if index := getattr(scheduler._policy, "_index", None):
        heaps += [heads._heap for heads in index._levels.values()]
        heaps += [heads._heap for heads in index._by_adapter.values()]
        heaps += [heads._heap for heads in index._by_weights.values()]
    assert max(len(heap) for heap in heaps) < 200
    scheduler.drain_waiting()
    assert_nothing_kept(scheduler)


def test_a_finished_request_is_freed_at_once():
    scheduler = make()
    key = type("Key", (), {})()
    add(scheduler, "a b", key=key)
    scheduler.schedule(idle(None), 0.0)
    seen = weakref.ref(key)
    del key
    gc.disable()
    try:
        scheduler.finish("a", DONE, 0.0)
        assert seen() is not None
        scheduler.finish("b", DONE, 0.0)
        assert seen() is None
    finally:
        gc.enable()
