"""What the schedulers cost per request: added, scheduled and finished, at a steady depth.

    python benchmarks/scheduler_cost.py [--modes step] [--depths 1000 1000000] [--keys 1 100]
        [--adapters 7 10000] [--mixed 4]

Keeps the given number of requests waiting over the given number of keys, four requests to a batch
at most, and times each request's whole way through, in processor time. In step mode a request ends
after one tick, four groups are resident, and each tick is reported by itself. Each key has one of
the given number of adapters, or none, of which the worker holds eight; before every batch or tick
the next four to load are asked for, and one of those is loaded in place of another. With
``--mixed`` requests have adapters of their own, so many in a batch at most. Also prints what adding
to the queue and aborting from it cost. The last lines say how flat the cost is over the depths;
note that a shallow queue with many keys can't fill its batches, and a batch has a cost of its own.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
from collections import deque
from dataclasses import dataclass
from time import process_time
from typing import Literal, get_args

from omni_engine.engine.batching import PolicyName
from omni_engine.engine.scheduler import (
    RequestScheduler,
    RequestStatus,
    SchedulerConfig,
    WorkerSlot,
)
from omni_engine.engine.step_scheduler import StepAssignment, StepScheduler

Mode = Literal["request", "step"]
Arrival = tuple[str, tuple[str, int], str | None, tuple[str, ...]]

MAX_LORAS = 8
UPCOMING = 4
DONE = RequestStatus.FINISHED_COMPLETED


@dataclass
class Cost:
    mode: Mode
    policy: PolicyName
    depth: int
    keys: int
    adapters: int
    batch: float
    cycle_us: float
    add_us: float
    abort_us: float


class Device:
    """Which adapters the worker holds: some of those that were named as upcoming."""

    def __init__(self) -> None:
        self.held: deque[str] = deque(maxlen=MAX_LORAS)
        self.slot = WorkerSlot("worker-0", None)

    def load(self, upcoming: list[tuple[str, ...]]) -> None:
        """Load the first adapter that is not there."""
        missing = (digest for weights in upcoming for digest in weights if digest not in self.held)
        if (digest := next(missing, None)) is not None:
            self.held.append(digest)
            self.slot = WorkerSlot("worker-0", None, frozenset(self.held))


class RequestMode:
    """Runs batches of the request scheduler at once."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = RequestScheduler(config)
        self.device = Device()

    def run_some(self) -> int:
        """Run a batch; return how many requests ended."""
        self.device.load(self.scheduler.upcoming(UPCOMING))
        [batch] = self.scheduler.schedule([self.device.slot], 0.0)
        for request_id in batch.request_ids:
            self.scheduler.finish(request_id, DONE, 0.0)
        return len(batch.request_ids)


class StepMode:
    """Runs the step scheduler's plans one at a time; each request ends after one tick."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = StepScheduler(config)
        self.device = Device()
        self.plans: deque[StepAssignment] = deque()
        self.members: dict[int, list[str]] = {}

    def run_some(self) -> int:
        """Run a tick; return how many requests ended."""
        scheduler = self.scheduler
        self.device.load(scheduler.upcoming(UPCOMING))
        for plan in scheduler.schedule([self.device.slot], 0.0):
            self.members.setdefault(plan.group_id, []).extend(plan.new_ids)
            if plan.ticks:
                self.plans.append(plan)
        plan = self.plans.popleft()
        ended = self.members.pop(plan.group_id, [])
        for request_id in ended:
            scheduler.finish(request_id, DONE, 0.0)
        scheduler.on_tick(self.device.slot.worker_id, plan.plan_id, bool(ended), 30.0, True, 0.0)
        return len(ended)


class Load:
    """A scheduler held at a constant number of waiting requests with random keys."""

    def __init__(
        self,
        mode: Mode,
        policy: PolicyName,
        keys: int,
        adapters: int,
        mixed: int | None,
        seed: int = 0,
    ) -> None:
        config = SchedulerConfig(policy=policy, max_skip_ms=1e9, max_mixed_adapters=mixed)
        self.mixed = mixed is not None
        self.runner = RequestMode(config) if mode == "request" else StepMode(config)
        self.scheduler = self.runner.scheduler
        self.rng = random.Random(seed)
        self.keys = [("shape", number) for number in range(keys)]
        self.adapters = [None, *(f"adapter-{number}" for number in range(adapters))]
        self.serial = 0

    def draw(self, count: int) -> list[Arrival]:
        """Prepare ``count`` arrivals, so that drawing them isn't timed."""
        arrivals = []
        for serial in range(self.serial, self.serial + count):
            key = self.keys[int(self.rng.random() * len(self.keys))]
            draw = int(self.rng.random() * len(self.adapters)) if self.mixed else key[1]
            adapter = self.adapters[draw % len(self.adapters)]
            weights = () if adapter is None else (adapter,)
            arrivals.append((f"request-{serial}", key, None if self.mixed else adapter, weights))
        self.serial += count
        return arrivals

    def add(self, arrivals: list[Arrival]) -> float:
        start = process_time()
        for request_id, key, adapter, weights in arrivals:
            self.scheduler.add(request_id, key=key, adapter=adapter, weights=weights, now=0.0)
        return process_time() - start

    def cycle(self, arrivals: list[Arrival]) -> tuple[float, int]:
        """Run as many requests as arrive; return the seconds it took and the number of batches."""
        scheduler, run_some, batches = self.scheduler, self.runner.run_some, 0
        incoming = iter(arrivals)
        left = len(arrivals)
        start = process_time()
        while left > 0:
            ended = run_some()
            batches += ended > 0
            left -= ended
            for _ in range(ended):
                if (arrival := next(incoming, None)) is None:
                    break
                request_id, key, adapter, weights = arrival
                scheduler.add(request_id, key=key, adapter=adapter, weights=weights, now=0.0)
        return process_time() - start, batches

    def abort(self, request_ids: list[str]) -> float:
        start = process_time()
        for request_id in request_ids:
            self.scheduler.abort(request_id, 0.0)
        return process_time() - start


def measure(
    mode: Mode, policy: PolicyName, depth: int, keys: int, adapters: int, args: argparse.Namespace
) -> Cost:
    requests, repeats = args.requests, args.repeats
    load = Load(mode, policy, keys, adapters, args.mixed)
    prepared = load.draw(depth)
    gc.collect()
    add_s = load.add(prepared)
    # A cyclic collection over the benchmark's own lists would be charged to whoever runs then.
    del prepared
    gc.collect()
    rounds = [load.cycle(load.draw(requests)) for _ in range(repeats)]
    latest = range(max(0, load.serial - depth // 2), load.serial)
    drawn = load.rng.sample(latest, min(len(latest), requests))
    named = [f"request-{serial}" for serial in drawn]
    victims = [one for one in named if load.scheduler.status_of(one) is RequestStatus.WAITING]
    abort_s = load.abort(victims)
    return Cost(
        mode=mode,
        policy=policy,
        depth=depth,
        keys=keys,
        adapters=adapters,
        batch=requests * repeats / sum(batches for _, batches in rounds),
        cycle_us=min(seconds for seconds, _ in rounds) / requests * 1e6,
        add_us=add_s / depth * 1e6,
        abort_us=abort_s / len(victims) * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[10**3, 10**5, 10**6])
    parser.add_argument("--keys", type=int, nargs="+", default=[1, 100, 10**4])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 7, 10**4])
    parser.add_argument("--mixed", type=int, help="adapters per batch; mixes them")
    parser.add_argument("--requests", type=int, default=5_000, help="per timed round")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, of which the best counts")
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=get_args(Mode))
    args = parser.parse_args()
    print("mode     policy   waiting    keys  adapters  mean batch  us/request   us/add  us/abort")
    flat: list[str] = []
    for mode, policy, keys, adapters in itertools.product(
        args.modes, get_args(PolicyName), args.keys, args.adapters
    ):
        if adapters > keys and args.mixed is None:
            continue  # as many adapters as keys at most
        costs = []
        for depth in args.depths:
            cost = measure(mode, policy, depth, keys, adapters, args)
            costs.append(cost)
            print(
                f"{cost.mode:8} {cost.policy:8} {cost.depth:7} {cost.keys:7}  {cost.adapters:8}"
                f"  {cost.batch:10.2f}"
                f"  {cost.cycle_us:10.2f}  {cost.add_us:7.2f}  {cost.abort_us:8.2f}",
                flush=True,
            )
        cycle = [cost.cycle_us for cost in costs]
        flat.append(
            f"{mode}, {policy}, {keys} keys, {adapters} adapters:"
            f" {min(cycle):.2f} to {max(cycle):.2f} us/request,"
            f" deepest / shallowest {cycle[-1] / cycle[0]:.2f}"
        )
    print("\n".join(["", *flat]))


if __name__ == "__main__":
    main()
