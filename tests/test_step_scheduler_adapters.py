"""The step scheduler and adapters: who gets a place first, and how many a group may mix."""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections import defaultdict

import pytest
from step_devices import DONE, Stage, assert_nothing_kept

from omni_engine.engine.batching import WorkerSlot

ADAPTERS = 10_000


def add(stage: Stage, ids: str, weights: str = "", *, key="k", **request) -> None:
    """Queue requests under the adapters in ``weights``, in a group of their own."""
    needed = tuple(weights.split())
    stage.add(ids, key=key, adapter=weights or None, weights=needed, **request)


def add_mixed(stage: Stage, ids: str, weights: str = "", *, key="k", **request) -> None:
    stage.add(ids, key=key, weights=tuple(weights.split()), **request)


def joined(plans) -> list[tuple[str, str]]:
    return [(plan.worker_id, " ".join(plan.new_ids)) for plan in plans if plan.new_ids]


def has_place(stage: Stage, request_id: str) -> bool:
    return request_id in stage.scheduler._home_of


def worker(held="", *, active=None, name="w0") -> WorkerSlot:
    return WorkerSlot(name, active, frozenset(held.split()))


# Places


def test_a_scarce_place_goes_to_a_group_that_needs_no_load_however_small():
    stage = Stage(groups=1)
    add(stage, "c0 c1 c2 c3", "cold")
    add(stage, "h0 h1", "held")
    add(stage, "base0")
    stage.devices["w0"].load("held")
    assert joined(stage.schedule()) == [("w0", "h0 h1")]
    assert stage.scheduler.upcoming(2) == [("cold",)]
    stage.run()
    assert [plan.new_ids for plan in stage.log if plan.new_ids] == [
        ("h0", "h1"),
        ("base0",),
        ("c0", "c1", "c2", "c3"),
    ]
    assert stage.scheduler.upcoming(2) == []


def test_a_place_to_spare_goes_to_a_cold_group_at_once():
    stage = Stage(groups=3)
    add(stage, "c0 c1", "cold", steps=9)
    add(stage, "h0", "held", steps=9)
    stage.schedule([worker("held")])
    assert has_place(stage, "h0")
    assert has_place(stage, "c0")
    assert stage.log[0].new_ids == ("h0",)  # it got its place first, and so the first turn
    assert stage.scheduler.upcoming(2) == [("cold",)]  # it waits for its turn


def test_an_overdue_cold_group_gets_the_place_before_a_warm_one():
    def order(max_skip_ms):
        stage = Stage(groups=1, max_skip_ms=max_skip_ms)
        add(stage, "first", steps=4)
        stage.round()
        add(stage, "cold", "cold")
        for number in range(20):
            add(stage, f"base{number}", key=number)
        stage.run()
        return list(stage.started_at).index("cold")

    assert order(1e9) == 21
    assert order(200) < 6


def test_newcomers_of_a_resident_group_join_it_loaded_or_not():
    stage = Stage(groups=1, max_num_seqs=2)
    add(stage, "a0", "a", steps=9)
    stage.schedule([worker()])
    add(stage, "a1", "a", steps=9)
    assert joined(stage.schedule([worker()])) == [("w0", "a1")]


def test_a_group_opens_where_most_of_it_is_if_that_worker_is_not_busier():
    for order in itertools.permutations(range(4)):
        slots = [
            worker("x", active="a b", name="w0"),
            worker("a b x", active="x", name="w1"),
            worker("b x y", name="w2"),
            worker("x y z", name="w3"),
        ]
        stage = Stage(workers=4)
        mixed = [slots[n] for n in order]
        for number, at in enumerate(["w0", "w1", "w2", "w3"]):
            add(stage, f"ab{number}", "a b", key=number, steps=9)
            assert joined(stage.schedule(mixed)) == [(at, f"ab{number}")]


# Mixed groups


def test_a_newcomer_joins_only_if_the_group_then_mixes_no_more_than_it_may():
    stage = Stage(groups=1, max_num_seqs=8, max_mixed_adapters=3)
    add_mixed(stage, "a", "x", steps=30)
    add_mixed(stage, "b", "x y", steps=4)
    stage.round()
    add_mixed(stage, "base", steps=30)
    add_mixed(stage, "c", "z y", steps=9)
    add_mixed(stage, "d", "v", steps=9)  # the fourth
    add_mixed(stage, "e", "x", steps=9)  # would fit, but it is behind d
    stage.round()
    assert [has_place(stage, one) for one in ("base", "c", "d", "e")] == [True, True, False, False]
    assert stage.scheduler.upcoming(2) == [("v",), ("x",)]
    while "b" not in stage.ended:
        stage.round()
    stage.round()
    assert not has_place(stage, "d")  # c still needs y
    while "c" not in stage.ended:
        stage.round()
    stage.round()
    assert has_place(stage, "d")
    assert has_place(stage, "e")
    stage.run()
    assert_nothing_kept(stage.scheduler)


def test_a_request_that_is_too_much_for_one_worker_goes_to_another():
    stage = Stage(workers=2, groups=1, max_num_seqs=8, max_mixed_adapters=2)
    add_mixed(stage, "a", "x y", steps=30)
    stage.round()
    add_mixed(stage, "b", "z", steps=30)
    assert joined(stage.schedule()) == [("w1", "b")]
    add_mixed(stage, "c", "x", steps=30)
    add_mixed(stage, "d", "v z", steps=30)
    assert joined(stage.schedule()) == [("w0", "c"), ("w1", "d")]


def test_a_composition_of_more_than_a_group_may_mix_is_refused():
    stage = Stage(max_mixed_adapters=2)
    with pytest.raises(ValueError, match=r"3 adapters.*max_mixed_adapters is 2"):
        add_mixed(stage, "a", "x y z")
    assert_nothing_kept(stage.scheduler)


def test_what_a_lost_worker_mixed_is_free_again():
    stage = Stage(max_mixed_adapters=2)
    add_mixed(stage, "a", "x y", steps=9)
    stage.round()
    add_mixed(stage, "b", "z", steps=9)
    stage.round()
    stage.abort("a")
    assert stage.lose("w0") == ["a"]
    assert joined(stage.schedule()) == [("w0", "b")]
    stage.run()
    assert_nothing_kept(stage.scheduler)


# What comes next


def test_upcoming_names_those_with_a_place_first_then_passed_over_then_by_fill():
    stage = Stage(groups=2, quantum=4)
    add(stage, "now", "now", steps=50)
    stage.schedule()
    add(stage, "next", "next", steps=50)
    add(stage, "c0 c1", "c")
    add(stage, "d0 d1 d2", "d")
    add(stage, "e0", "e")
    stage.schedule([worker("now next")])
    assert has_place(stage, "next")
    assert stage.scheduler.upcoming(9) == [("next",), ("d",), ("c",), ("e",)]
    assert stage.scheduler.upcoming(2) == [("next",), ("d",)]


def test_upcoming_of_a_full_mixed_group_is_what_its_next_ones_need():
    stage = Stage(groups=1, max_num_seqs=2, max_mixed_adapters=2)
    add_mixed(stage, "a b", "x", steps=9)
    for name in "cdef":
        add_mixed(stage, name, f"of {name}", steps=9)
    stage.schedule()
    assert stage.scheduler.upcoming(9) == [("of", "c")]  # of, c and d would be three
    add_mixed(stage, "g", "y", key="other")
    assert stage.scheduler.upcoming(9) == [("y",), ("of", "c")]


# Traffic of ten thousand adapters


def test_ten_thousand_cold_adapters_get_through_a_flood_of_the_hottest_in_the_order_of_their_age():
    stage = Stage(groups=2, quantum=4, max_num_seqs=2, max_skip_ms=200, max_loras=4)
    count = waiting = seen = 0

    def round_with_flood() -> None:
        nonlocal count, waiting, seen
        for plan in stage.log[seen:]:
            waiting -= len(plan.new_ids) if plan.adapter == "hot" else 0
        seen = len(stage.log)
        while waiting < 3:
            add(stage, f"hot{count}", "hot", key=count % 2, steps=1 + count % 3)
            count, waiting = count + 1, waiting + 1
        stage.round()

    for _ in range(20):
        round_with_flood()
    for number in range(ADAPTERS):
        add(stage, f"cold{number}", f"a{number:05}", steps=1)
    arrived, ticks_before = stage.now, len(stage.reports)
    while f"cold{ADAPTERS - 1}" not in stage.ended:
        round_with_flood()
    cold = [one for one in stage.started_at if one.startswith("cold")]
    assert len(cold) == ADAPTERS
    late = [one for one in cold if stage.started_at[one][0] > arrived + 0.2]
    assert late == [f"cold{number}" for number in range(ADAPTERS - len(late), ADAPTERS)]
    assert len(late) > ADAPTERS * 0.99
    # Each has a tick of its own; beside them only what ran before they were overdue.
    ticks = sum(report.ticks for report in stage.reports[ticks_before:])
    assert ticks <= ADAPTERS + 100


@pytest.mark.parametrize("limit", [None, 2, 4])
def test_zipf_traffic_of_ten_thousand_adapters_runs_once_in_order_and_in_time(limit):
    """The stage checks each plan: the limit, places, nobody twice."""
    rng = random.Random(11)
    max_skip, steps, groups, quantum = 1.0, 4, 4, 4
    stage = Stage(
        workers=2,
        groups=groups,
        quantum=quantum,
        max_num_seqs=4,
        max_mixed_adapters=limit,
        max_skip_ms=max_skip * 1000,
        max_loras=8,
    )
    sums = list(itertools.accumulate(1 / (rank + 1) for rank in range(ADAPTERS)))
    count, start = 3000, 0.0
    arrivals = []
    for _ in range(count):
        start += rng.expovariate(30)
        arrivals.append((start, bisect(sums, rng.random() * sums[-1]), rng.random() < 0.2))
    submitted = 0
    while submitted < count or len(stage.ended) < count:
        while submitted < count and arrivals[submitted][0] <= stage.now:
            _, adapter, is_base = arrivals[submitted]
            enter = add if limit is None else add_mixed
            enter(stage, f"r{submitted}", "" if is_base else f"a{adapter:05}", steps=steps)
            submitted += 1
        stage.round()
        assert all(len(device.held) <= 8 for device in stage.devices.values())
    stage.run()
    assert set(stage.ended.values()) == {DONE}
    assert all(len(times) == 1 for times in stage.started_at.values())
    assert_nothing_kept(stage.scheduler)
    started = {one: times[0] for one, times in stage.started_at.items()}
    order = defaultdict(list)
    for plan in stage.log:
        order[plan.worker_id, plan.key, plan.adapter] += [int(one[1:]) for one in plan.new_ids]
    assert all(own == sorted(own) for own in order.values())
    # One that is overdue waits for drains of its elders only, or for its turn in a group.
    drain = (steps + quantum) * groups * stage.tick_ms / 1000
    for number in range(count):
        overdue = stage.arrived_at[f"r{number}"] + max_skip
        elders = sum(started[f"r{n}"] > overdue for n in range(max(0, number - 300), number))
        assert started[f"r{number}"] <= overdue + drain * (elders + 1)
    if limit is not None:
        assert stage.most_mixed == limit
