"""What heartbeats tell: for how long a worker's threads have not got on, and when they wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from fault_pipelines import STEPS
from support_stepped import Counting, request
from waiting import wait_for

from omni_engine import Omni, OmniDiffusionSamplingParams
from omni_engine.protocol.adapters import Adapter, AdapterActivation, AdapterReport
from omni_engine.worker.adapter_runtime import AdapterRuntime
from omni_engine.worker.adapter_weights import AdapterWeights
from omni_engine.worker.progress import Progress, main_thread
from omni_engine.worker.step_loop import StepLoop
from omni_engine.worker.suspension import Role, SuspensionPoint


def last_mark() -> float:
    """When the main thread last got on, to the millisecond."""
    return time.monotonic() - main_thread.working_ms() / 1000 + 0.001


def test_a_thread_that_waits_is_not_working_and_has_got_on_when_that_is_over() -> None:
    progress = Progress()
    with progress.waiting():
        time.sleep(0.02)
        assert progress.working_ms() == 0
        ended = time.monotonic()
    assert progress.working_ms() <= (time.monotonic() - ended) * 1000
    marked = time.monotonic()
    progress.mark()
    assert progress.working_ms() <= (time.monotonic() - marked) * 1000
    time.sleep(0.02)
    assert progress.working_ms() >= 20


@pytest.mark.parametrize(("role", "method"), [(Role.ENCODE, "forward"), (Role.DENOISE, "forward"),
                                              (Role.DECODE, "decode")])  # fmt: skip
def test_every_forward_that_starts_or_ends_is_progress_outside_of_requests_too(
    role: Role, method: str
) -> None:
    began: list[float] = []

    class Module(torch.nn.Module):
        def forward(self, sample: torch.Tensor) -> torch.Tensor:
            began.append(last_mark())
            time.sleep(0.01)
            began.append(time.monotonic())
            return sample

        decode = forward

    module = Module()
    point = SuspensionPoint(module, role)
    before = time.monotonic()
    getattr(module, method)(torch.zeros(1, 2))
    assert began[0] >= before
    assert last_mark() >= began[1]
    point.remove()


@pytest.mark.parametrize("place", ["prepare_encode", "denoise_step", "step_scheduler",
                                   "post_decode"])  # fmt: skip
def test_every_call_of_a_hand_written_pipelines_methods_is_progress(place: str) -> None:
    marks: list[bool] = []

    class Slow(Counting):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name != place:
                return found

            def slow(*arguments: Any) -> Any:
                before = time.monotonic()
                made = found(*arguments)
                marks.append(last_mark() <= before + 0.002)
                return made

            return slow

    loop = StepLoop(Slow(), lambda _: False)
    loop.join([request("a", steps=1)])
    before = time.monotonic()
    while len(loop):
        loop.tick()
    assert all(marks)
    assert marks
    assert last_mark() >= before


class Library:
    """Gives an adapter that changes nothing, once it may."""

    def __init__(self, seen: Callable[[], None]) -> None:
        self._seen = seen

    def check(self, name: str, path: str) -> AdapterReport:
        raise NotImplementedError

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        self._seen()
        return AdapterWeights(adapter.digest, {})


class Bare:
    """A pipeline without anything that adapters could change."""

    components: ClassVar[dict[str, Any]] = {}


def test_a_load_that_a_forward_waits_for_is_the_loaders_work() -> None:
    found: dict[str, float] = {}

    def look() -> None:
        time.sleep(0.05)
        wait_for(lambda: main_thread.working_ms() == 0)
        found.update(main=main_thread.working_ms(), loader=runtime.loading_ms())

    runtime = AdapterRuntime(Bare(), Library(look), max_loras=1, max_cpu_loras=1)
    assert runtime.loading_ms() == 0
    runtime.assign("r", AdapterActivation((Adapter("x", "/nowhere", "digest"),), (1.0,)))
    runtime.wait_ready("r")
    assert found["main"] == 0
    assert found["loader"] >= 50
    wait_for(lambda: runtime.loading_ms() == 0)
    runtime.close()


def test_status_tells_for_how_long_a_worker_has_not_got_on(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine("bundled", pipeline=STEPS, step_execution=True, threads=1,
                            lora_modules=[], worker_startup_timeout_s=60,
                            default_sampling_params={"height": 16, "width": 16})  # fmt: skip

    def working_ms() -> float:
        found: float = omni.status()["stages"][0]["workers"][0]["working_ms"]
        return found

    omni.generate("a cat", OmniDiffusionSamplingParams(num_inference_steps=2))
    wait_for(lambda: working_ms() == 0)
    omni.client.submit("a cat [hang]")
    wait_for(lambda: working_ms() > 2500)
