"""The step scheduler with random devices, and in simulated service: what must always hold."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from step_devices import ABORTED, DONE, Device, Report, Stage, assert_nothing_kept

from omni_engine.engine.batching import RequestStatus
from omni_engine.engine.step_scheduler import StepAssignment

steady = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

NEVER_MS = 1e9

WEIGHTS = {"A": ("a",), "A twice": ("a",), "B": ("b",), "A and B": ("a", "b"), "C": ("c",)}
"""What each identity needs loaded."""

stages = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 3),
        "tick_ms": st.sampled_from([0.0, 3.0, 8.0, 30.0]),
        "quantum": st.integers(1, 5),
        "groups": st.integers(1, 3),
        "max_num_seqs": st.integers(1, 5),
        "max_batch_rows": st.none() | st.integers(3, 8),
        "max_batch_work": st.none() | st.integers(3, 12),
        "max_mixed_adapters": st.sampled_from([None, 2, 3]),
        "policy": st.sampled_from(["grouped", "grouped", "fifo"]),
        "max_skip_ms": st.sampled_from([0.0, 50.0, 500.0, NEVER_MS]),
    }
)
adds = st.tuples(
    st.just("add"),
    st.integers(0, 3),
    st.sampled_from([None, None, *WEIGHTS]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
)
operations = st.one_of(
    adds,
    adds,
    st.tuples(st.just("schedule")),
    st.tuples(st.just("tick"), st.integers(0, 2)),
    st.tuples(st.just("tick"), st.integers(0, 2)),
    st.tuples(st.just("deliver"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.001, 0.05, 0.5])),
    st.tuples(st.just("abort"), st.integers(0, 60)),
    st.tuples(st.just("lose"), st.integers(0, 2)),
    st.tuples(st.just("absent"), st.integers(0, 2)),
)
scripts = st.lists(operations, min_size=30, max_size=120)


class Machine:
    """A stage driven by a script; reports are under way for a while, or lost with their worker."""

    def __init__(self, **stage) -> None:
        self.stage = Stage(**stage)
        self.under_way: list[tuple[Device, Report]] = []
        self.absent: set[str] = set()
        self.lost: dict[str, int] = {}
        self.count = 0

    def apply(self, operation: str, *args) -> None:
        getattr(self, "do_" + operation)(*args)
        scheduler = self.stage.scheduler
        running = [one for ids in self.stage.held.values() for one in ids]
        assert scheduler.num_running == len(running)
        assert scheduler.num_waiting == len(self.stage.steps) - len(running) - len(self.stage.ended)
        assert sum(scheduler.waiting_by_key().values()) == scheduler.num_waiting
        check_upcoming(self.stage)
        for one in running:
            assert scheduler.status_of(one) is RequestStatus.RUNNING

    def device(self, number: int) -> Device:
        devices = list(self.stage.devices.values())
        return devices[number % len(devices)]

    def do_add(self, key, adapter, steps, rows, work) -> None:
        mixed = self.stage.config.max_mixed_adapters is not None
        self.stage.add(
            f"r{self.count}",
            key=key,
            adapter=None if mixed else adapter,
            weights=WEIGHTS.get(adapter, ()),
            steps=steps,
            rows=rows,
            work=work,
        )
        self.count += 1

    def do_schedule(self) -> None:
        before = self.stage.scheduler.waiting_ids()
        slots = [slot for slot in self.stage.slots() if slot.worker_id not in self.absent]
        plans = self.stage.schedule(slots)
        assert not {plan.worker_id for plan in plans} & self.absent
        check_joined(self.stage, self.absent)
        check_turns_are_planned(self.stage, self.absent)
        check_order(self.stage, before, plans)
        self.absent.clear()

    def do_tick(self, number) -> None:
        device = self.device(number)
        if report := device.tick():
            self.under_way.append((device, report))

    def do_deliver(self, count, finish_first) -> None:
        for device, report in self.under_way[:count]:
            if self.stage.devices[report.worker_id] is device:
                self.stage.deliver(report, finish_first=finish_first)
        del self.under_way[:count]

    def do_wait(self, seconds) -> None:
        self.stage.now += seconds

    def do_abort(self, number) -> None:
        self.stage.abort(f"r{number % (self.count + 1)}")

    def do_lose(self, number) -> None:
        for request_id in self.stage.lose(self.device(number).worker_id):
            self.lost[request_id] = self.lost.get(request_id, 0) + 1

    def do_absent(self, number) -> None:
        self.absent.add(self.device(number).worker_id)

    def finish(self) -> None:
        """Deliver, then run in order until nothing is left."""
        while self.under_way:
            self.apply("deliver", 10, True)
        self.stage.run()
        self.stage.schedule()


def occupancy(stage: Stage, ids) -> tuple[int, int, int]:
    sizes = [stage.sizes[one] for one in ids]
    return len(sizes), sum(rows for rows, _ in sizes), sum(work for _, work in sizes)


def check_upcoming(stage: Stage) -> None:
    """What is named is waited for; nothing is left out that has a place, or would be next."""
    scheduler = stage.scheduler
    upcoming = scheduler.upcoming(100)
    assert len(set(upcoming)) == len(upcoming)
    assert {stage.weights[one] for one in scheduler.waiting_ids()} >= set(upcoming)
    assert () not in upcoming
    heads = {group.head.weights for group in scheduler._queue.groups()}
    placed = {one.weights for one in scheduler._unsent.values()}
    assert (heads | placed) - {()} <= set(upcoming)
    assert set(upcoming[: len(placed - {()})]) == placed - {()}


def check_joined(stage: Stage, absent: set[str]) -> None:
    """Nobody without a place waits whose group runs somewhere with room, unless it drains."""
    scheduler, config = stage.scheduler, stage.config
    draining = scheduler._drain.home if scheduler._drain else None
    if config.policy == "fifo":
        heads = list(itertools.islice(scheduler._queue, 1))
    else:
        heads = [group.head for group in scheduler._queue.groups()]
    for head in heads:
        for worker in scheduler._table.workers.values():
            home = worker.groups.get((head.key, head.adapter))
            if home is None or home is draining or worker.worker_id in absent:
                continue
            count, rows, work = occupancy(stage, home.members)
            assert (
                count >= config.max_num_seqs
                or rows + head.rows > (config.max_batch_rows or 10**9)
                or work + head.work > (config.max_batch_work or 10**9)
                or len(stage.needed([*home.members, head.request_id]))
                > (config.max_mixed_adapters or 10**9)
            )


def check_turns_are_planned(stage: Stage, absent: set[str]) -> None:
    """Each worker with requests has two plans with ticks; newcomers of planned groups are sent."""
    for worker in stage.scheduler._table.workers.values():
        if worker.worker_id in absent:
            continue
        if any(home.members for home in worker.groups.values()):
            assert len(worker.outstanding) == 2
        for home in worker.groups.values():
            assert home.members or home.outstanding
            assert not (home.unsent and home.outstanding)
        free = stage.max_groups - len(worker.groups)
        assert not (free and stage.scheduler._homeless and stage.config.policy == "grouped")


def check_order(stage: Stage, before: list[str], plans: list[StepAssignment]) -> None:
    """Within a group the oldest go first; under fifo nobody gets a place before an older one."""
    scheduler = stage.scheduler
    for plan in plans:
        seqs = [before.index(one) for one in plan.new_ids]
        assert seqs == sorted(seqs)
    placed = [one for one in before if one in scheduler._home_of]
    homeless = [one for one in before if one not in scheduler._home_of]
    if stage.config.policy == "fifo":
        assert before == placed + homeless
    for group in {stage.groups_of[one] for one in before}:
        own = [one for one in before if stage.groups_of[one] == group]
        assert own == [one for one in own if one in placed] + [
            one for one in own if one in homeless
        ]


@settings(steady, max_examples=200)
@given(stages, scripts)
def test_nothing_is_lost_runs_twice_or_is_kept_and_capacity_is_never_exceeded(stage, script):
    machine = Machine(**stage)
    for step in script:
        machine.apply(*step)
    machine.finish()
    stage = machine.stage
    assert set(stage.ended) == set(stage.steps)
    for request_id, status in stage.ended.items():
        runs = len(stage.started_at.get(request_id, []))
        if status is DONE:
            assert runs == 1 + machine.lost.get(request_id, 0)
        else:
            assert status is ABORTED
            assert runs <= 1 + machine.lost.get(request_id, 0)
    assert_nothing_kept(stage.scheduler)
    assert stage.scheduler._drain is None


@settings(steady, max_examples=100)
@given(stages, scripts)
def test_every_request_is_advanced_as_often_as_it_has_steps(stage, script):
    """Of requests that are neither aborted nor lost every step runs, and none runs twice."""
    machine = Machine(**stage)
    for step in script:
        if step[0] in ("add", "schedule", "tick", "deliver", "wait", "absent"):
            machine.apply(*step)
    machine.finish()
    advanced: dict[str, int] = {}
    for report in machine.stage.reports:
        for request_id in report.advanced:
            advanced[request_id] = advanced.get(request_id, 0) + 1
    assert advanced == machine.stage.steps


@settings(steady, max_examples=60)
@given(stages, scripts)
def test_the_same_calls_give_the_same_plans(stage, script):
    logs = []
    for _ in range(2):
        machine = Machine(**stage)
        for step in script:
            machine.apply(*step)
        machine.finish()
        logs.append(machine.stage.log)
    assert logs[0] == logs[1]


@settings(steady, max_examples=100)
@given(
    quantum=st.integers(1, 6),
    steps=st.lists(st.integers(1, 30), min_size=2, max_size=6),
    tick_ms=st.sampled_from([1.0, 6.0, 20.0, 100.0]),
)
def test_no_group_waits_longer_for_its_turn_than_the_others_turns_take(quantum, steps, tick_ms):
    stage = Stage(groups=len(steps), quantum=quantum, tick_ms=tick_ms)
    for number, count in enumerate(steps):
        stage.add(f"r{number}", key=number, steps=count)
    stage.run()
    served = [report.group_id for report in stage.reports if report.ticks]
    for group in range(len(steps)):
        at = [-1] + [tick for tick, one in enumerate(served) if one == group]
        longest = max(b - a for a, b in itertools.pairwise(at))
        assert longest <= quantum * (len(steps) - 1) + 1


class Flood:
    """Hot groups that are refilled before every round, so that they never end by themselves."""

    def __init__(self, stage: Stage, keys: int, steps: int, backlog: int) -> None:
        self.stage, self.steps, self.backlog = stage, steps, backlog
        self.keys = [("hot", number) for number in range(keys)]
        self.waiting = dict.fromkeys(self.keys, 0)
        self.count = self.seen = 0

    def round(self) -> None:
        for plan in self.stage.log[self.seen :]:
            if plan.key in self.waiting:
                self.waiting[plan.key] -= len(plan.new_ids)
        self.seen = len(self.stage.log)
        for key, waiting in self.waiting.items():
            for _ in range(waiting, self.backlog):
                # Staggered lengths, so that a group's requests don't end together.
                steps = 1 + self.count % self.steps
                self.stage.add(f"hot{self.count}", key=key, steps=steps)
                self.count += 1
            self.waiting[key] = max(waiting, self.backlog)
        self.stage.round()


@settings(steady, max_examples=60)
@given(
    workers=st.integers(1, 2),
    groups=st.integers(1, 4),
    quantum=st.integers(1, 4),
    steps=st.integers(2, 12),
    extra=st.integers(0, 2),
    max_num_seqs=st.integers(2, 4),
    max_skip=st.sampled_from([0.1, 0.5]),
    adapter=st.sampled_from([None, "never loaded before"]),
)
def test_under_floods_a_cold_request_starts_max_skip_and_a_drain_after_its_arrival(
    workers, groups, quantum, steps, extra, max_num_seqs, max_skip, adapter
):
    """The flood's own backlog, always one per hot group, bounds how many drains go before."""
    stage = Stage(
        workers=workers,
        groups=groups,
        quantum=quantum,
        max_num_seqs=max_num_seqs,
        max_skip_ms=max_skip * 1000,
    )
    hot = Flood(stage, groups + extra, steps, backlog=max_num_seqs + 1)
    for _ in range(20):
        hot.round()
    weights = () if adapter is None else (adapter,)
    stage.add("cold", key="cold", adapter=adapter, weights=weights, steps=1)
    arrived = stage.now
    # A drained group runs its longest request's steps in turns with the others.
    drain = (steps + quantum) * groups + 2
    older_groups = groups + extra
    bound = max_skip + (drain * (older_groups + 1) + quantum * groups + 2) * stage.tick_ms / 1000
    while "cold" not in stage.started_at:
        assert stage.now - arrived <= bound
        hot.round()


def test_it_is_max_skip_that_keeps_the_cold_from_starving():
    def rounds(max_skip_ms):
        stage = Stage(groups=2, max_num_seqs=3, max_skip_ms=max_skip_ms)
        hot = Flood(stage, 2, steps=9, backlog=4)
        stage.add("warm", key="warm")
        for _ in range(10):
            hot.round()
        stage.add("cold", key="cold")
        for number in range(1000):
            if "cold" in stage.started_at:
                return number
            hot.round()
        return None

    assert rounds(NEVER_MS) is None
    assert rounds(1000) < 100


def test_ten_thousand_cold_keys_all_get_through_a_flood_in_the_order_of_their_age():
    stage = Stage(groups=4, quantum=4, max_num_seqs=2, max_skip_ms=200)
    hot = Flood(stage, 3, steps=4, backlog=3)
    for _ in range(20):
        hot.round()
    count = 10_000
    for number in range(count):
        stage.add(f"cold{number}", key=number, steps=1)
    arrived, ticks_before = stage.now, len(stage.reports)
    while f"cold{count - 1}" not in stage.ended:
        hot.round()
    cold = [one for one in stage.started_at if one.startswith("cold")]
    assert len(cold) == count
    late = [one for one in cold if stage.started_at[one][0] > arrived + 0.2]
    assert len(late) > count * 0.99
    assert late == [f"cold{number}" for number in range(count - len(late), count)]
    # Each has a tick of its own; beside them only what ran before they were overdue.
    ticks = sum(report.ticks for report in stage.reports[ticks_before:])
    assert ticks <= count + 100
