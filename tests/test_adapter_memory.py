"""Adapters in memory: hard limits, who is loaded when, and that nobody waits for others' loads."""

from __future__ import annotations

import queue
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from made_adapters import MadeLibrary, activation, adapter, made_weights, small_pipe

from omni_engine.protocol.adapters import (
    ADAPTER_CHECK,
    ADAPTER_CHECKED,
    ADAPTER_DROP,
    ADAPTER_PIN,
    ADAPTER_PREFETCH,
    ADAPTERS_HELD,
    AdaptersHeld,
)
from omni_engine.protocol.errors import AdapterError
from omni_engine.worker.adapter_runtime import AdapterRuntime

WAIT_S = 60.0


class Served:
    """A small pipeline under a runtime whose messages are kept."""

    def __init__(self, dtype: torch.dtype = torch.float32, **limits: int) -> None:
        self.pipe = small_pipe()
        modules = {"transformer": self.pipe.transformer}
        self.library = MadeLibrary(make=lambda name: made_weights(modules, name, dtype=dtype))
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.reports: list[AdaptersHeld] = []
        options = {"max_loras": 2, "max_cpu_loras": 4, **limits}
        self.runtime = AdapterRuntime(self.pipe, self.library, send=self.messages.put, **options)

    def message(self, kind: str, **fields: Any) -> None:
        assert self.runtime.on_message({"type": kind, **fields})

    def prefetch(self, *names: str) -> None:
        wire = [{"name": n, "path": "", "digest": n, "default_scale": 1.0} for n in names]
        self.message(ADAPTER_PREFETCH, adapters=wire)

    def assign(self, *names: str) -> None:
        """Assign to requests of the adapters' names."""
        for name in names:
            self.runtime.assign(name, activation(*((one, 1.0) for one in name.split("+"))))

    def use(self, *names: str) -> None:
        """Run a forward of each, one after the other, and release it."""
        for name in names:
            self.assign(name)
            self.run(name)
            self.runtime.release([name])

    def run(self, name: str) -> None:
        with self.runtime.rows("transformer", [(name, 1)]):
            self.pipe.transformer(torch.ones(1, 8))

    def done(self) -> AdaptersHeld:
        """Wait until everything asked for so far is done; returns what is held then."""
        number = len(self.reports) + self.messages.qsize()
        self.message(ADAPTER_CHECK, check_id=number, name="last", path="")
        while (message := self.messages.get(timeout=WAIT_S))["type"] != ADAPTER_CHECKED:
            self.reports.append(AdaptersHeld.from_wire(message))
        return self.runtime.held()

    def last_report(self) -> AdaptersHeld:
        """Wait until what was reported last is what is held."""
        while not self.reports or self.reports[-1] != self.runtime.held():
            message = self.messages.get(timeout=WAIT_S)
            if message["type"] == ADAPTERS_HELD:
                self.reports.append(AdaptersHeld.from_wire(message))
        return self.reports[-1]


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Two adapters fit on the device and four in host memory, unless the test says otherwise."""
    made = Served(**getattr(request, "param", {}))
    yield made
    made.library.gate.set()
    made.runtime.close()


def limits(**numbers: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("served", [numbers], indirect=True, ids=[""])


def test_the_least_recently_used_go_first(served: Served) -> None:
    served.use("a", "b", "a", "c")
    assert served.runtime.held().device == ["a", "c"]
    served.use("d", "e", "f")
    held = served.runtime.held()
    assert held.device == ["e", "f"]
    assert held.host == ["c", "d", "e", "f"]
    served.use("c", "a", "e")
    held = served.runtime.held()
    assert served.library.log == list("abcdefa"), "c and e came from memory"
    assert (held.loads, held.host_hits, held.device_hits) == (7, 2, 1)
    assert held.evictions == 7


@limits(max_loras=4, max_cpu_loras=32)
def test_five_hundred_adapters_stay_within_the_limits(served: Served) -> None:
    one = made_weights({"transformer": served.pipe.transformer}, "one").num_bytes
    drawn = random.Random(3)
    wanted = [f"a{min(int(drawn.paretovariate(0.6)), 500)}" for _ in range(1500)]
    for name in wanted:
        served.use(name)
        held = served.runtime.held()
        assert len(held.device) <= 4
        assert len(held.host) <= 32
        assert held.device_bytes == len(held.device) * one
        assert held.host_bytes == len(held.host) * one
    served.done()
    assert len(set(wanted)) > 100
    assert all(len(report.device) <= 4 and len(report.host) <= 32 for report in served.reports)
    held = served.runtime.held()
    assert held.loads == len(served.library.log) - 1, "the last one is the check"
    assert held.device_hits + held.host_hits + held.loads == len(wanted)
    kept = [t for t in all_tensors() if t.shape in {(4, 8), (4, 16)}]
    assert len(kept) <= 2 * (32 + 4), "nothing else keeps weights"


def all_tensors() -> list[torch.Tensor]:
    import gc

    gc.collect()
    return [found for found in gc.get_objects() if type(found) is torch.Tensor]


@limits(max_loras=3, max_cpu_loras=2)
def test_host_memory_may_be_smaller_than_the_device(served: Served) -> None:
    served.use("a", "b", "c", "d")
    held = served.runtime.held()
    assert (held.device, held.host) == (["b", "c", "d"], ["c", "d"])


def test_tiers_share_memory_where_the_dtype_is_the_same(served: Served) -> None:
    served.use("a")
    placed = served.runtime._bank.device("a")
    host = served.runtime._bank.host("a")
    assert placed is not None
    assert host is not None
    down = host.layers["transformer.0"].down
    assert placed.layers["transformer"]["0"].down.data_ptr() == down.data_ptr()


def test_identities_of_one_content_share_its_memory(served: Served) -> None:
    served.use("a")
    before = served.runtime.held().device_bytes
    for scale in (0.5, 2.0):
        served.runtime.assign(f"at {scale}", activation(("a", scale)))
    halves, doubles = (served.runtime.identity(f"at {scale}", None) for scale in (0.5, 2.0))
    assert halves != doubles
    with served.runtime.rows("transformer", [("at 0.5", 1), ("at 2.0", 1)]):
        half, double = served.pipe.transformer(torch.ones(2, 8))
    assert not torch.equal(half, double)
    held = served.runtime.held()
    assert (held.device, held.device_bytes, held.loads) == (["a"], before, 1)


@limits(dtype=torch.float16)
def test_the_device_holds_the_models_dtype_and_the_host_the_files(served: Served) -> None:
    served.use("a")
    held = served.runtime.held()
    assert held.device_bytes == 2 * held.host_bytes


def test_pinned_adapters_stay(served: Served) -> None:
    served.message(ADAPTER_PIN, digests=["a"])
    served.use("a", "b", "c", "d", "e", "f")
    held = served.runtime.held()
    assert held.device == ["a", "f"]
    assert held.host == ["a", "d", "e", "f"]
    served.message(ADAPTER_PIN, digests=[])
    served.use("b")
    assert served.runtime.held().device == ["f", "b"]


def test_pins_that_fill_the_device_keep_the_limit(served: Served) -> None:
    served.use("a", "b")
    served.message(ADAPTER_PIN, digests=["a", "b"])
    served.assign("c")
    assert served.runtime.is_ready("c")
    with pytest.raises(AdapterError, match="don't fit on the device beside"):
        served.run("c")
    assert served.runtime.held().device == ["a", "b"]


def test_a_failed_load_is_that_requests_error_and_is_tried_anew(served: Served) -> None:
    served.use("a", "b")
    served.library.broken.add("c")
    served.assign("c")
    with pytest.raises(AdapterError, match="c is broken"):
        served.runtime.wait_ready("c")
    assert served.runtime.is_ready("c"), "nothing to wait for"
    with pytest.raises(AdapterError, match="c is broken"):
        served.run("c")
    assert served.library.log == ["a", "b", "c"], "one request, one try"
    assert served.runtime.held().device == ["a", "b"], "nothing left for one that never came"
    served.library.broken.clear()
    served.runtime.release(["c"])
    served.use("c")
    assert served.runtime.held().device == ["b", "c"]


def test_an_error_of_another_kind_is_wrapped_and_the_thread_lives_on(served: Served) -> None:
    def make(name: str) -> Any:
        raise ZeroDivisionError("by zero")

    make_before, served.library._make = served.library._make, make
    served.assign("a")
    with pytest.raises(AdapterError, match="'a' could not be loaded: ZeroDivisionError: by zero"):
        served.runtime.wait_ready("a")
    served.library._make = make_before
    served.use("a")


def test_nobody_waits_for_the_loads_of_others(served: Served) -> None:
    served.use("a")
    served.library.gate.clear()
    served.assign("a", "slow")
    assert served.runtime.is_ready("a")
    assert not served.runtime.is_ready("slow")
    served.run("a")
    assert not served.runtime.is_ready("slow")
    served.library.gate.set()
    served.runtime.wait_ready("slow")
    assert served.runtime.is_ready("slow")
    assert served.library.log == ["a", "slow"], "asked for several times, loaded once"


@limits(max_loras=8)
def test_the_urgent_ones_are_loaded_first(served: Served) -> None:
    served.library.gate.clear()
    served.prefetch("under way")
    assert served.library.entered.wait(WAIT_S)
    served.message(ADAPTER_CHECK, check_id=1, name="file", path="")
    served.prefetch("later", "soon", "now")
    served.runtime.expect([activation(("soon", 1.0)), None, activation(("planned", 1.0))])
    served.assign("now")
    served.library.gate.set()
    served.done()
    expected = ["under way", "now", "soon", "planned", "later", "check file", "check last"]
    assert served.library.log == expected


def test_prefetches_never_displace_what_requests_use(served: Served) -> None:
    served.assign("a", "b")
    served.runtime.wait_ready("a")
    served.runtime.wait_ready("b")
    served.prefetch("c")
    served.runtime.expect([activation(("d", 1.0))])
    held = served.done()
    assert held.device == ["a", "b"]
    assert held.host == ["a", "b", "d", "c"]
    served.runtime.release(["a"])
    served.prefetch("c")
    assert served.done().device == ["b", "c"]


def test_a_request_without_room_gets_it_when_others_end(served: Served) -> None:
    served.assign("a", "b")
    served.runtime.wait_ready("a")
    served.runtime.wait_ready("b")
    served.assign("c")
    assert served.done().device == ["a", "b"]
    assert not served.runtime.is_ready("c")
    served.runtime.release(["a"])
    assert served.done().device == ["b", "c"]
    assert served.runtime.is_ready("c")
    served.assign("d")
    assert not served.runtime.is_ready("d")
    served.runtime.wait_ready("d")
    assert served.runtime.held().device == ["c", "d"], "one that is waited for displaces others"
    assert not served.runtime.is_ready("b")


def test_what_ended_requests_needed_is_not_loaded(served: Served) -> None:
    served.use("a")
    served.library.gate.clear()
    served.library.entered.clear()
    served.assign("b")
    assert served.library.entered.wait(WAIT_S)
    served.assign("c", "d", "e")
    served.runtime.release(["c", "e"])
    served.library.gate.set()
    assert served.done().device == ["b", "d"]
    assert served.library.log[:-1] == ["a", "b", "d"]
    served.assign("f")
    served.done()
    served.runtime.release(["f", "b"])
    assert served.done().device == ["b", "d"], "f came too late for anyone"
    served.use("c", "f")


def test_what_runs_is_never_displaced(served: Served) -> None:
    served.assign("a", "b", "c")
    with served.runtime.rows("transformer", [("a", 1)]):
        served.runtime.wait_ready("b")
        served.runtime.wait_ready("c")
        assert served.runtime.held().device == ["a", "c"]
        with served.runtime.rows("transformer", [("b", 1)]):
            assert set(served.runtime.held().device) == {"a", "b"}


def test_dropped_adapters_are_forgotten_when_nobody_needs_them(served: Served) -> None:
    served.use("a")
    served.assign("b")
    served.runtime.wait_ready("b")
    served.message(ADAPTER_DROP, digests=["a", "b"])
    held = served.runtime.held()
    assert (held.device, held.host) == (["b"], ["b"])
    served.run("b")
    served.runtime.release(["b"])
    held = served.last_report()
    assert (held.device, held.host, held.device_bytes) == ([], [], 0)
    served.use("b")
    assert served.runtime.held().device == ["b"], "registered anew"


def test_checks_are_answered(served: Served) -> None:
    served.library.broken.add("bad")
    for check_id, name in enumerate(("good", "bad")):
        served.message(ADAPTER_CHECK, check_id=check_id, name=name, path=f"/{name}")
    good, bad = (served.messages.get(timeout=WAIT_S) for _ in range(2))
    assert (good["type"], good["check_id"], good["error"]) == (ADAPTER_CHECKED, 0, None)
    assert good["report"]["layers"] == {"transformer": 1}
    assert (bad["check_id"], bad["report"]) == (1, None)
    assert bad["error"]["code"] == "adapter_unusable"
    assert bad["error"]["message"] == "/bad is broken"
    assert not served.runtime.on_message({"type": "batch"})


def test_what_is_held_is_reported_after_loads_and_when_counters_change(served: Served) -> None:
    served.use("a")
    first = served.last_report()
    assert (first.device, first.activations, first.loads) == (["a"], 1, 1)
    for _ in range(20):
        served.use("a")
    assert served.last_report().device_hits == 20


def test_another_file_of_the_same_content_will_do(served: Served) -> None:
    gone = adapter("gone")
    served.library.broken.add("gone")
    served.library.gate.clear()
    served.prefetch("a")
    assert served.library.entered.wait(WAIT_S)
    copy = type(gone)("copy", "copy.safetensors", gone.digest)
    for name, one in (("first", gone), ("second", copy)):
        served.runtime.assign(name, type(activation(("x", 1.0)))((one,), (1.0,)))
    served.library.gate.set()
    served.runtime.wait_ready("first")
    served.run("second")
    assert served.library.log == ["a", "gone", "copy"]


def test_random_use_keeps_every_promise(served: Served) -> None:
    """Any mix of plans, prefetches, pins, drops and forwards; what is needed is always there."""
    drawn = random.Random(11)
    names, running = [f"n{i}" for i in range(9)], set[str]()
    done: Counter[str] = Counter()
    for _ in range(600):
        name = drawn.choice(names)
        match drawn.randrange(7):
            case 0:
                served.prefetch(name)
            case 1:
                served.runtime.expect([activation((name, 1.0))])
            case 2:
                served.message(ADAPTER_PIN, digests=[name] * drawn.randrange(2))
            case 3:
                served.message(ADAPTER_DROP, digests=[name])
            case 4 if running:
                served.runtime.release([ended := drawn.choice(sorted(running))])
                running.remove(ended)
            case _:
                if name not in running:
                    served.assign(name)
                    running.add(name)
                served.run(name)
                done[name] += 1
                assert name in served.runtime.held().device
        held = served.runtime.held()
        assert len(held.device) <= 2
        assert len(held.host) <= 4
    assert min(done.values()) > 5
    served.done()
