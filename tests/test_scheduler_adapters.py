"""The request scheduler and adapters: what is loaded goes first, and nobody starves for it."""

from __future__ import annotations

import itertools
import random
import sys
from bisect import bisect
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_service import DONE, Arrival, Service, assert_nothing_kept

from omni_engine.engine.scheduler import RequestScheduler, SchedulerConfig, WorkerSlot

ADAPTERS = 10_000


def make(**config) -> RequestScheduler:
    return RequestScheduler(SchedulerConfig(**config))


def add(scheduler, ids, weights="", *, adapter=None, key="k", now=0.0) -> None:
    """Queue requests that need the digests in ``weights``; their scale is 1 unless told."""
    needed = tuple(weights.split())
    for request_id in ids.split():
        scheduler.add(
            request_id,
            key=key,
            adapter=adapter or (weights or None),
            weights=needed,
            now=now,
        )


def add_mixed(scheduler, ids, weights="", *, key="k", now=0.0) -> None:
    """Queue requests of a stage that mixes adapters."""
    for request_id in ids.split():
        scheduler.add(request_id, key=key, adapter=None, weights=tuple(weights.split()), now=now)


def worker(held="", *, active=None, name="w0") -> WorkerSlot:
    return WorkerSlot(name, active, frozenset(held.split()))


def picked(assignments) -> list[str]:
    return [" ".join(one.request_ids) for one in assignments]


def placed(assignments) -> dict[str, str]:
    return {one.worker_id: " ".join(one.request_ids) for one in assignments}


# The cold and the warm


def test_a_batch_that_must_be_loaded_waits_for_ones_that_need_not_however_small():
    scheduler = make()
    add(scheduler, "c0 c1 c2 c3", "cold")
    add(scheduler, "h0 h1", "held")
    add(scheduler, "base")
    slot = worker("held")
    assert picked(scheduler.schedule([slot], 0.0)) == ["h0 h1"]
    assert scheduler.upcoming(3) == [("cold",)]
    assert picked(scheduler.schedule([slot], 0.0)) == ["base"]
    assert scheduler.upcoming(3) == [("cold",)]
    # Nothing else is left: the worker doesn't idle until somebody has loaded it.
    assert picked(scheduler.schedule([slot], 0.0)) == ["c0 c1 c2 c3"]
    assert scheduler.upcoming(3) == []


def test_it_goes_before_them_once_it_is_held_or_overdue():
    def after(slot, seconds):
        scheduler = make(max_skip_ms=1000)
        add(scheduler, "c0 c1 c2 c3", "cold")
        add(scheduler, "base")
        scheduler.schedule([slot], 0.0)
        add(scheduler, "base2", now=0.5)
        return picked(scheduler.schedule([worker("cold")] if slot is None else [slot], seconds))

    assert after(worker(), 0.999) == ["base2"]
    assert after(worker(), 1.0) == ["c0 c1 c2 c3"]
    scheduler = make()
    add(scheduler, "c0 c1 c2 c3", "cold")
    add(scheduler, "base base2", key="other")
    scheduler.schedule([worker()], 0.0)
    add(scheduler, "base3")
    assert picked(scheduler.schedule([worker("cold")], 0.1)) == ["c0 c1 c2 c3"]


def test_what_left_the_device_is_cold_again():
    scheduler = make()
    add(scheduler, "a0", "a")
    add(scheduler, "b0", "b")
    assert picked(scheduler.schedule([worker("a")], 0.0)) == ["a0"]
    add(scheduler, "a1", "a")
    add(scheduler, "a2 a3", "a", key="other")
    add(scheduler, "base")
    assert picked(scheduler.schedule([worker("b")], 0.0)) == ["base"]
    assert picked(scheduler.schedule([worker("b")], 0.0)) == ["b0"]
    assert picked(scheduler.schedule([worker("b")], 0.0)) == ["a2 a3"]
    assert picked(scheduler.schedule([worker("b")], 0.0)) == ["a1"]


def test_a_composition_is_held_only_where_all_of_it_is():
    scheduler = make()
    add(scheduler, "ab0 ab1", "a b")
    add(scheduler, "base0")
    add(scheduler, "base1", key="other")
    add(scheduler, "base2", key="third")
    halves = [worker("a", name="w0"), worker("b c", name="w1")]
    assert picked(scheduler.schedule(halves[:1], 0.0)) == ["base0"]
    assert picked(scheduler.schedule(halves, 0.0)) == ["base1", "base2"]
    add(scheduler, "base3")
    assert picked(scheduler.schedule([worker("a b c")], 0.0)) == ["ab0 ab1"]


def test_every_scale_of_a_held_adapter_is_warm():
    scheduler = make()
    add(scheduler, "cold0 cold1", "cold")
    for scale in range(3):
        add(scheduler, f"a{scale}", "a", adapter=("a", scale))
    assert picked(scheduler.schedule([worker("a")], 0.0)) == ["a0"]
    slot = worker("a", active=("a", 2))
    assert picked(scheduler.schedule([slot], 0.0)) == ["a2"]
    assert picked(scheduler.schedule([slot], 0.0)) == ["a1"]


def test_one_that_waits_for_its_batch_to_fill_does_not_hold_up_a_cold_one():
    scheduler = make(max_num_seqs=2, request_batch_max_wait_ms=50)
    add(scheduler, "c0 c1", "cold")
    add(scheduler, "base")
    assert picked(scheduler.schedule([worker()], 0.0)) == ["c0 c1"]


def test_an_active_identity_that_was_dropped_is_not_preferred():
    scheduler = make()
    add(scheduler, "a0", "a")
    add(scheduler, "b0", "b")
    assert picked(scheduler.schedule([worker("b", active="a")], 0.0)) == ["b0"]


def test_fifo_passes_nobody_over():
    scheduler = make(policy="fifo")
    add(scheduler, "c", "cold")
    add(scheduler, "h", "held")
    add(scheduler, "base")
    slot = worker("held", active="held")
    assert [picked(scheduler.schedule([slot], 0.0)) for _ in range(3)] == [["c"], ["h"], ["base"]]


# Workers


def test_each_goes_where_its_adapter_is_active_then_held_then_mostly_held():
    for order in itertools.permutations(range(4)):
        slots = [
            worker("a x", active="a", name="active"),
            worker("b x", active="a", name="held"),
            worker("c1 c2 x", active="y", name="most"),
            worker("c1 z", active=None, name="none"),
        ]
        scheduler = make()
        add(scheduler, "c", "c1 c2 c3")
        add(scheduler, "base")
        add(scheduler, "b", "b")
        add(scheduler, "a", "a")
        got = placed(scheduler.schedule([slots[n] for n in order], 0.0))
        assert got == {"active": "a", "held": "b", "most": "c", "none": "base"}


def test_the_base_model_takes_no_worker_from_an_adapter_that_is_held_there():
    slots = [worker("a", name="w0"), worker("b", active="b", name="w1")]
    scheduler = make()
    add(scheduler, "base")
    add(scheduler, "a", "a")
    assert placed(scheduler.schedule(slots, 0.0)) == {"w0": "a", "w1": "base"}


def test_of_two_workers_that_hold_it_an_adapter_leaves_the_one_that_another_needs():
    slots = [worker("a b", name="w0"), worker("a c", name="w1")]
    scheduler = make()
    add(scheduler, "a0 a1", "a")
    add(scheduler, "b0", "b")
    assert placed(scheduler.schedule(slots, 0.0)) == {"w0": "b0", "w1": "a0 a1"}


def test_a_second_batch_does_not_count_on_the_worker_that_the_first_will_take():
    scheduler = make(max_num_seqs=2)
    add(scheduler, "a0 a1 a2 a3", "a")
    add(scheduler, "b0", "b")
    slots = [worker("a", name="w0"), worker("b", name="w1")]
    assert placed(scheduler.schedule(slots, 0.0)) == {"w0": "a0 a1", "w1": "b0"}


def test_an_idle_worker_takes_a_batch_that_a_busy_one_holds_if_it_has_nothing_else():
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a0 a1", "a")
    assert picked(scheduler.schedule([worker("a")], 0.0)) == ["a0"]
    assert placed(scheduler.schedule([worker("b", name="w1")], 0.0)) == {"w1": "a1"}


# What comes next


def test_upcoming_names_what_was_passed_over_then_the_fullest_then_the_oldest():
    scheduler = make(max_num_seqs=4)
    add(scheduler, "a0", "a")
    add(scheduler, "b0 b1", "b")
    add(scheduler, "c0 c1", "c")
    add(scheduler, "d0 d1 d2", "d")
    add(scheduler, "base0")
    assert scheduler.upcoming(9) == [("d",), ("b",), ("c",), ("a",)]
    assert scheduler.upcoming(2) == [("d",), ("b",)]
    scheduler.schedule([worker()], 0.0)
    add(scheduler, "c2 c3", "c")
    assert scheduler.upcoming(9) == [("d",), ("c",), ("b",), ("a",)]


def test_upcoming_puts_those_first_that_are_soon_overdue():
    scheduler = make(max_skip_ms=1000)
    add(scheduler, "old", "rare", now=0.0)
    add(scheduler, "h0 h1 h2 h3", "hot", now=0.4)
    scheduler.schedule([], 0.49)
    assert scheduler.upcoming(2) == [("hot",), ("rare",)]
    scheduler.schedule([], 0.5)
    assert scheduler.upcoming(2) == [("rare",), ("hot",)]


def test_upcoming_names_each_composition_once_whatever_keys_and_scales_it_comes_in():
    scheduler = make()
    for number in range(5):
        add(scheduler, f"r{number}", "a b", adapter=("ab", number % 3), key=number)
    add(scheduler, "base")
    add(scheduler, "last", "b")
    assert scheduler.upcoming(5) == [("a", "b"), ("b",)]


def test_upcoming_under_fifo_is_the_arrival_order():
    scheduler = make(policy="fifo")
    for number, name in enumerate("abab c d"):
        if name != " ":
            add(scheduler, f"r{number}", name)
    add(scheduler, "base")
    assert scheduler.upcoming(3) == [("a",), ("b",), ("c",)]


def test_upcoming_of_mixed_batches_is_what_their_requests_need():
    scheduler = make(max_num_seqs=4, max_mixed_adapters=3)
    for request_id, weights in [("r0", "a"), ("r1", ""), ("r2", "b c"), ("r3", "d")]:
        add_mixed(scheduler, request_id, weights)
    add_mixed(scheduler, "other", "e", key="other")
    assert scheduler.upcoming(9) == [("a",), ("b", "c"), ("e",)]  # r3 fits the next batch only


def test_nothing_is_upcoming_of_the_base_model_or_of_what_was_aborted():
    scheduler = make()
    add(scheduler, "a b c")
    assert scheduler.upcoming(4) == []
    add(scheduler, "d", "d")
    scheduler.schedule([worker()], 0.0)
    assert scheduler.upcoming(4) == [("d",)]
    scheduler.abort("d", 0.0)
    assert scheduler.upcoming(4) == []


# Mixed batches


def test_a_mixed_batch_ends_before_the_request_that_would_be_one_adapter_too_many():
    scheduler = make(max_num_seqs=8, max_mixed_adapters=3)
    needs = ["a", "", "b", "a b", "c", "a", "d", "a"]
    for number, weights in enumerate(needs):
        add_mixed(scheduler, f"r{number}", weights)
    slot = worker("a b c d")
    # Nobody overtakes r6, though r7 would fit the first batch.
    assert picked(scheduler.schedule([slot], 0.0)) == ["r0 r1 r2 r3 r4 r5"]
    assert picked(scheduler.schedule([slot], 0.0)) == ["r6 r7"]


def test_a_composition_counts_each_of_its_adapters():
    scheduler = make(max_num_seqs=8, max_mixed_adapters=3)
    for number, weights in enumerate(["a b", "a c", "b c", "a d"]):
        add_mixed(scheduler, f"r{number}", weights)
    assert picked(scheduler.schedule([worker()], 0.0)) == ["r0 r1 r2"]
    with pytest.raises(ValueError, match=r"4 adapters.*max_mixed_adapters is 3"):
        add_mixed(scheduler, "big", "a b c d")
    assert scheduler.status_of("big") is None


def test_mixed_batches_go_where_most_of_what_they_need_is():
    scheduler = make(max_num_seqs=2, max_mixed_adapters=4)
    for key, weights in [("x", "a"), ("x", "b"), ("y", "c"), ("y", "d"), ("z", "")]:
        add_mixed(scheduler, f"{key}{weights}", weights, key=key)
    slots = [worker("c", name="w0"), worker("c d", name="w1"), worker("b e", name="w2")]
    got = placed(scheduler.schedule(slots, 0.0))
    assert got == {"w1": "yc yd", "w2": "xa xb", "w0": "z"}


def test_an_abort_in_a_mixed_batch_changes_what_it_needs():
    scheduler = make(max_num_seqs=4, max_mixed_adapters=4)
    add_mixed(scheduler, "a", "held", key="x")
    add_mixed(scheduler, "b", "cold", key="x")
    add_mixed(scheduler, "c d", key="y")
    scheduler.abort("b", 0.0)
    add_mixed(scheduler, "e", "held", key="x")
    assert picked(scheduler.schedule([worker("held")], 0.0)) == ["a e"]
    scheduler.drain_waiting()
    scheduler.finish("a", DONE, 0.0)
    scheduler.finish("e", DONE, 0.0)
    assert_nothing_kept(scheduler)


# Cost


def calls_per_pick(groups: int, compositions: bool) -> int:
    """How many functions a pick calls that passes ``groups`` cold groups over."""
    scheduler = make(max_num_seqs=4)
    for number in range(groups):
        weights = f"x{number:05} y" if compositions else f"x{number:05}"
        add(scheduler, f"c{number}a c{number}b", weights)
    slots = [worker(" ".join(f"h{n}" for n in range(16)) + " y", name=f"w{n}") for n in range(2)]
    add(scheduler, "base0 base1")
    add(scheduler, "base2", key="other")
    assert len(scheduler.schedule(slots, 0.0)) == 2
    add(scheduler, "warm0", "h3")
    add(scheduler, "warm1", "h4", key="other")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        got = scheduler.schedule(slots, 0.0)
        upcoming = scheduler.upcoming(4)
    finally:
        sys.setprofile(None)
    assert picked(got) == ["warm0", "warm1"]
    assert len(upcoming) == 4
    return calls


@pytest.mark.parametrize("compositions", [False, True])
def test_what_a_pick_costs_does_not_depend_on_how_many_cold_groups_wait(compositions):
    # A look at a worker whose adapters changed costs as much as there are groups that need those.
    few, many = calls_per_pick(100, compositions), calls_per_pick(ADAPTERS, compositions)
    assert many <= few * 1.1 + 50


# In service: traffic of ten thousand adapters


def zipf(rng: random.Random, count: int) -> list[int]:
    """Draw adapters, the first the most popular."""
    sums = list(itertools.accumulate(1 / (rank + 1) for rank in range(ADAPTERS)))
    return [bisect(sums, rng.random() * sums[-1]) for _ in range(count)]


def arrival(time: float, adapter: int | None, *, key: int = 0) -> Arrival:
    name = None if adapter is None else f"a{adapter:05}"
    return Arrival(time, key, name, weights=(name,) if name else ())


def check_all_ran(service: Service, arrivals: list[Arrival]) -> None:
    assert len(service.ended) == len(arrivals)
    assert set(service.ended.values()) <= {DONE}
    assert all(len(times) == 1 for times in service.started.values())
    assert_nothing_kept(service.scheduler)


def check_batches_while_overdue(service: Service, max_skip: float) -> None:
    """Between a request's being overdue and its start only batches with older requests start."""
    starts = [(time, int(batch.request_ids[0][1:])) for time, batch in service.batches]
    times = [time for time, _ in starts]
    for name, wait in service.waits():
        if wait > max_skip:
            number = int(name[1:])
            overdue = service.arrived[name].time + max_skip
            own = bisect(times, service.started[name][0] - 1e-9)
            between = starts[bisect(times, overdue - 1e-9) : own]
            assert all(head < number for _, head in between)


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_zipf_traffic_of_ten_thousand_adapters_leaves_nobody_behind(workers, prefetch):
    rng = random.Random(7)
    config = SchedulerConfig(max_num_seqs=4, max_skip_ms=1000)
    drawn = zipf(rng, 4000)
    times = itertools.accumulate(rng.expovariate(14 * workers) for _ in drawn)
    arrivals = [
        arrival(1 + time, None if rng.random() < 0.2 else adapter, key=rng.randrange(2))
        for time, adapter in zip(times, drawn, strict=True)
    ]
    service = Service(
        config, arrivals, workers, 0.1, max_loras=8, load_s=0.05, prefetch=prefetch
    ).run()
    check_all_ran(service, arrivals)
    check_batches_while_overdue(service, 1.0)
    assert max(Counter(one.adapter for one in arrivals).values()) > 200
    assert len({one.adapter for one in arrivals}) > 1000


def test_what_is_prefetched_meanwhile_need_not_be_waited_for():
    rng = random.Random(7)
    drawn = zipf(rng, 3000)
    times = list(itertools.accumulate(rng.expovariate(12) for _ in drawn))
    arrivals = [arrival(1 + time, adapter) for time, adapter in zip(times, drawn, strict=True)]

    def cold_starts(prefetch):
        config = SchedulerConfig(max_num_seqs=4, max_skip_ms=2000)
        service = Service(config, arrivals, 1, 0.1, max_loras=8, load_s=0.05, prefetch=prefetch)
        return sum(service.run().cold)

    assert cold_starts(3) < cold_starts(0) / 3


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (3, 1), (0, 2), (3, 2)])
@pytest.mark.parametrize("hot", ["adapter", "base"])
def test_under_a_flood_of_the_hottest_the_rarest_wait_max_skip_and_two_batches(
    prefetch, workers, hot
):
    """The flood always has two full batches waiting per worker, but is younger than max_skip."""
    duration, load_s, max_skip = 0.1, 0.1, 1.0
    config = SchedulerConfig(max_num_seqs=4, max_skip_ms=max_skip * 1000)
    gap = 0.55 / workers
    rare = [arrival(1 + n * gap, ADAPTERS - n) for n in range(600)]
    backlog = 8 * workers
    flood = arrival(0.5, 0 if hot == "adapter" else None)
    end_of_rare = rare[-1].time

    def refill(service: Service, now: float, name: str) -> None:
        if now < end_of_rare and service.arrived[name].adapter == flood.adapter:
            service.arrive(now, f"r{len(service.arrived) + 10**6}", flood_at(now))

    def flood_at(now: float) -> Arrival:
        return Arrival(now, flood.key, flood.adapter, weights=flood.weights)

    arrivals = [flood] * backlog + rare
    service = Service(
        config,
        arrivals,
        workers,
        duration,
        max_loras=4,
        load_s=load_s,
        prefetch=prefetch,
        on_end=refill,
    ).run()
    waits: dict[object, list[float]] = defaultdict(list)
    for name, wait in service.waits():
        waits[service.arrived[name].adapter].append(wait)
    of_flood = waits.pop(flood.adapter)
    assert len(of_flood) > 2000
    assert len(waits) == len(rare)
    bound = max_skip + 2 * (duration + load_s)
    assert max(max(one) for one in waits.values()) <= bound + 1e-9
    assert max(of_flood) <= bound + 1e-9
    late = [one for one in waits.values() if max(one) > max_skip / 2]
    assert len(late) > len(rare) / 2  # the flood did hold them up
    assert_nothing_kept(service.scheduler)


def test_base_requests_get_through_a_flood_of_a_held_adapter():
    config = SchedulerConfig(max_num_seqs=2, max_skip_ms=500)
    hot = [arrival(1 + n * 0.04, 0) for n in range(1500)]
    base = [arrival(1 + n * 0.7, None) for n in range(80)]
    arrivals = sorted(hot + base, key=lambda one: one.time)
    service = Service(config, arrivals, 1, 0.07, max_loras=2, load_s=0.5).run()
    check_all_ran(service, arrivals)
    waits = [wait for name, wait in service.waits() if service.arrived[name].adapter is None]
    assert max(waits) <= 0.5 + 2 * 0.07


@pytest.mark.parametrize("policy", ["grouped", "fifo"])
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_mixed_traffic_of_ten_thousand_adapters_keeps_to_the_limit(policy, limit):
    """The service checks each batch: the limit, and that nobody in it overtook anybody."""
    rng = random.Random(limit)
    config = SchedulerConfig(
        max_num_seqs=8, max_mixed_adapters=limit, max_skip_ms=500, policy=policy
    )
    drawn = zipf(rng, 2000)
    times = itertools.accumulate(rng.expovariate(20) for _ in drawn)
    arrivals = []
    for time, adapter in zip(times, drawn, strict=True):
        names = {f"a{one:05}" for one in (adapter, rng.randrange(9))[: rng.choice([0, 1, 1, 2])]}
        weights = tuple(sorted(names))[:limit]
        arrivals.append(Arrival(1 + time, adapter % 3, None, weights=weights))
    service = Service(config, arrivals, 2, 0.1, max_loras=8, load_s=0.02, prefetch=4).run()
    check_all_ran(service, arrivals)
    check_batches_while_overdue(service, 0.5)
    distinct = Counter(len(service.needed(batch.request_ids)) for _, batch in service.batches)
    assert max(distinct) == limit


def test_two_workers_keep_to_the_adapters_they_hold():
    """Eight adapters, four on each device: once there they stay, whoever is free first."""
    rng = random.Random(3)
    config = SchedulerConfig(max_num_seqs=4, max_skip_ms=60_000)
    times = itertools.accumulate(rng.expovariate(60) for _ in range(3000))
    arrivals = [arrival(1 + time, rng.randrange(8)) for time in times]
    service = Service(config, arrivals, 2, 0.1, max_loras=4, load_s=0.1).run()
    check_all_ran(service, arrivals)
    assert len(service.batches) > 700
    assert sum(service.cold) < len(service.batches) * 0.03


steady = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(steady, max_examples=60)
@given(
    data=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.01, 0.1]),
            st.none() | st.integers(0, 5),
            st.integers(0, 1),
        ),
        min_size=20,
        max_size=120,
    ),
    workers=st.integers(1, 3),
    max_loras=st.integers(1, 3),
    prefetch=st.integers(0, 2),
    max_skip=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_cold_request_waits_for_older_ones_only_once_it_is_overdue(
    data, workers, max_loras, prefetch, max_skip
):
    times = itertools.accumulate(row[0] for row in data)
    arrivals = [
        arrival(1 + time, adapter, key=key)
        for time, (_, adapter, key) in zip(times, data, strict=True)
    ]
    config = SchedulerConfig(max_num_seqs=3, max_skip_ms=max_skip * 1000)
    service = Service(
        config, arrivals, workers, 0.1, max_loras=max_loras, load_s=0.05, prefetch=prefetch
    ).run()
    check_all_ran(service, arrivals)
    check_batches_while_overdue(service, max_skip)
