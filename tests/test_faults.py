"""What a pipeline can do wrong, through a real engine: the culprit fails, everybody else is right.

``fault_pipelines`` lists the marks. Hand-written pipelines run in both modes, and so does a
diffusers one, whose faults lie in the modules that all requests share.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from conftest import engines, started_processes
from fault_pipelines import DIFFUSERS, LOAD_VARIABLE, REQUESTS, STEPS
from support_pipelines import pattern
from tiny_models import save_tiny_stable_diffusion
from waiting import wait_for

from omni_engine import Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.protocol.outputs import DiffusionOutput

CULPRIT = 2
"""Which of the requests has the mark."""


class Served(NamedTuple):
    """An engine for one kind of pipeline."""

    omni: Omni
    is_diffusers: bool

    def run(self, prompts: list[str], size: int = 16) -> list[DiffusionOutput]:
        params = [OmniDiffusionSamplingParams(seed=i, height=size, width=size)
                  for i in range(len(prompts))]  # fmt: skip
        return self.omni.generate(prompts, params, timeout_s=120)

    def assert_right(self, output: DiffusionOutput, prompt: str, seed: int, size: int = 16) -> None:
        """Compare with what the request gives when nobody disturbs it."""
        (picture,) = output.raise_for_error().images or ()
        if not self.is_diffusers:
            np.testing.assert_array_equal(picture, pattern(prompt, seed, size, size))
            return
        params = OmniDiffusionSamplingParams(seed=seed, height=size, width=size)
        (alone,) = self.omni.generate(prompt, params)[0].raise_for_error().images or ()
        assert picture.std() > 10, "nothing is on it"
        # Sums round differently in company: one step of 255 at most.
        assert np.abs(picture.astype(int) - alone.astype(int)).max() <= 1

    def assert_right_but_the_culprit(self, outputs: list[DiffusionOutput]) -> None:
        for seed, output in enumerate(outputs):
            if seed != CULPRIT:
                self.assert_right(output, f"a cat {seed}", seed)

    def assert_healthy(self) -> None:
        """The same worker as at the start serves everybody."""
        assert all(output.ok for output in self.run(["x", "y", "z"]))
        (worker,) = self.omni.status()["stages"][0]["workers"]
        assert worker["state"] in ("idle", "busy")
        assert worker["restarts"] == 0


def marked(mark: str) -> list[str]:
    return [f"a cat {i}" + f" [{mark}]" * (i == CULPRIT) for i in range(5)]


KINDS = {
    "requests": (REQUESTS, False),
    "steps in request mode": (STEPS, False),
    "steps": (STEPS, True),
    "diffusers in request mode": (DIFFUSERS, False),
    "diffusers": (DIFFUSERS, True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_stable_diffusion(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[Served]:
    pipeline, stepped = KINDS[request.param]
    is_diffusers = pipeline == DIFFUSERS
    defaults: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 3}
    if is_diffusers:
        defaults["guidance_scale"] = 1.0  # one row for each picture
    with engines() as start:
        omni = start(str(model) if is_diffusers else "bundled", pipeline=pipeline,
                     step_execution=stepped, max_num_seqs=5, threads=1, lora_modules=[],
                     default_sampling_params=defaults)  # fmt: skip
        yield Served(omni, is_diffusers)


RAISES = [
    "raise-encode",
    "raise-forward",
    "raise-step",
    "raise-decode",
    "raise-encode=GeneratorExit",
    "raise-forward=KeyboardInterrupt",
    "raise-step=SystemExit",
    "raise-decode=KeyboardInterrupt",
]


@pytest.mark.parametrize("mark", RAISES)
def test_what_one_request_raises_is_its_own_error(served: Served, mark: str) -> None:
    outputs = served.run(marked(mark))
    error = outputs[CULPRIT].error
    assert error is not None
    place, _, kind = mark.removeprefix("raise-").partition("=")
    assert error.code == "model_error"
    assert f"{kind or 'RuntimeError'}: the {place} fails as marked" in str(error)
    served.assert_right_but_the_culprit(outputs)
    served.assert_healthy()


def test_a_failing_text_encoder_fails_its_request_only(served: Served) -> None:
    if not served.is_diffusers:
        pytest.skip("hand-written pipelines have no shared encoder")
    outputs = served.run(marked("raise-encoder"))
    assert "the encoder fails as marked" in str(outputs[CULPRIT].error)
    served.assert_right_but_the_culprit(outputs)


def test_a_result_that_is_no_number_is_an_error_and_no_black_picture(served: Served) -> None:
    outputs = served.run(marked("nan"))
    error = outputs[CULPRIT].error
    assert error is not None
    assert error.code == "model_error"
    assert "NaN" in str(error)
    assert "float32" in str(error.hint)
    served.assert_right_but_the_culprit(outputs)
    served.assert_healthy()


@pytest.mark.parametrize("mark", ["wrong-count", "unserialisable"])
def test_a_result_of_the_wrong_kind_is_its_requests_error(served: Served, mark: str) -> None:
    outputs = served.run(marked(mark))
    error = outputs[CULPRIT].error
    assert error is not None
    is_model = served.is_diffusers and mark == "wrong-count"
    assert error.code == ("model_error" if is_model else "pipeline_contract")
    served.assert_right_but_the_culprit(outputs)
    served.assert_healthy()


@pytest.mark.parametrize("mark", ["oom-at=1", "raise-step=MemoryError"])
def test_a_request_too_large_even_alone_fails_alone(served: Served, mark: str) -> None:
    prompts = [f"a cat {i}" + f" [{mark}]" * (i == CULPRIT) for i in range(5)]
    outputs = served.run(prompts, size=32)
    error = outputs[CULPRIT].error
    assert error is not None
    assert error.code == "out_of_memory"
    assert "smaller picture" in str(error.hint)
    for seed in (0, 1, 3, 4):
        served.assert_right(outputs[seed], prompts[seed], seed, size=32)
    served.assert_healthy()
    caps = served.omni.status()["stages"][0]["workers"][0]["memory_caps"]
    assert not [kind for kind in caps if "32x32" in kind], "it says nothing about the others"


def test_memory_that_runs_out_is_tried_in_halves_and_the_limit_is_shown(served: Served) -> None:
    prompts = [f"a dog {i} [oom-at=3]" for i in range(5)]
    for _ in range(2):
        outputs = served.run(prompts, size=24)
        for seed, output in enumerate(outputs):
            served.assert_right(output, prompts[seed], seed, size=24)
        assert {output.metrics.max_batch_size for output in outputs} <= {1, 2}
    kind = "UNet2DConditionModel 12x12" if served.is_diffusers else " 24x24"
    caps = wait_for(lambda: {k: v for k, v in memory_caps(served.omni).items() if kind in k})
    assert list(caps.values()) == [2]
    served.assert_healthy()


def test_a_decode_that_runs_out_of_memory_is_halved_too(served: Served) -> None:
    if not served.is_diffusers:
        pytest.skip("hand-written pipelines decode one by one")
    prompts = [f"a bird {i} [oom-decode-at=3]" for i in range(5)]
    for seed, output in enumerate(served.run(prompts, size=8)):
        served.assert_right(output, prompts[seed], seed, size=8)
    caps = wait_for(lambda: {k: v for k, v in memory_caps(served.omni).items() if "Autoenc" in k})
    assert caps == {"AutoencoderKL 4x4": 2}


def memory_caps(omni: Omni) -> dict[str, int]:
    caps: dict[str, int] = omni.status()["stages"][0]["workers"][0]["memory_caps"]
    return caps


# -- ends of the worker


@pytest.mark.slow
@pytest.mark.parametrize("mark", ["exit=9", "segfault", "hang", "hang-in-c", "hold-gil=60"])
@pytest.mark.parametrize(("pipeline", "stepped"), [(REQUESTS, False), (STEPS, True)])
def test_a_request_that_ends_its_worker_fails_alone_and_its_mates_are_run_again(
    start_own_engine: Callable[..., Omni],
    capfd: pytest.CaptureFixture[str],
    mark: str,
    pipeline: str,
    stepped: bool,
) -> None:
    omni = start_own_engine("bundled", pipeline=pipeline, step_execution=stepped, max_num_seqs=5,
                            threads=1, lora_modules=[], worker_stall_timeout_s=2,
                            worker_heartbeat_timeout_s=3,
                            default_sampling_params={"height": 16, "width": 16})  # fmt: skip
    served = Served(omni, is_diffusers=False)
    outputs = served.run(marked(mark))
    error = outputs[CULPRIT].error
    assert error is not None
    assert error.code == "worker_died_repeatedly"
    served.assert_right_but_the_culprit(outputs)
    assert all(output.ok for output in served.run(["x", "y", "z"]))
    omni.close()
    if mark in ("segfault", "hang", "hang-in-c"):
        assert "fault_pipelines.py" in capfd.readouterr().err, "the stack tells where it was"


def test_a_slow_step_is_no_stall(start_own_engine: Callable[..., Omni]) -> None:
    """Each step takes less than the limit, the request more."""
    omni = start_own_engine("bundled", pipeline=STEPS, step_execution=True, max_num_seqs=2,
                            threads=1, lora_modules=[], worker_stall_timeout_s=2,
                            default_sampling_params={"height": 16, "width": 16})  # fmt: skip
    params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=5)
    omni.generate("a cat [sleep=0.8]", params)[0].raise_for_error()
    assert omni.status()["stages"][0]["workers"][0]["restarts"] == 0


# -- the engine's end while its worker loads


@pytest.fixture
def start_loading(
    start_own_engine: Callable[..., Omni], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Omni]:
    """Start an engine, and don't wait for its worker."""
    monkeypatch.setattr(OmniClient, "wait_until_ready", lambda *_: None)
    return lambda: start_own_engine("bundled", pipeline=STEPS, lora_modules=[], threads=1,
                                    default_sampling_params={})  # fmt: skip


def worker_of(omni: Omni) -> psutil.Process | None:
    """Return an engine's only worker, once it has been started."""
    return next(iter(psutil.Process(omni._engine.pid).children()), None)


def assert_gone_after_kill(omni: Omni) -> None:
    """Two seconds are promised; a loaded test machine gets five."""
    worker, folder = worker_of(omni), Path(omni.endpoint.removeprefix("ipc://")).parent
    assert worker is not None
    os.kill(omni._engine.pid, signal.SIGKILL)
    wait_for(lambda: worker.pid not in started_processes(), 5)
    assert not folder.exists()


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_leaves_its_killed_engine_at_any_moment_of_loading(
    start_loading: Callable[..., Omni], seed: int
) -> None:
    omni = start_loading()
    wait_for(lambda: worker_of(omni))
    time.sleep(random.Random(seed).uniform(0.05, 4))  # the moment is what varies
    assert_gone_after_kill(omni)


@pytest.mark.parametrize("mark", ["hang", "hang-in-c"])
def test_a_worker_that_hangs_while_loading_leaves_its_killed_engine(
    start_loading: Callable[..., Omni], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: str
) -> None:
    hangs = tmp_path / "hangs"
    monkeypatch.setenv(LOAD_VARIABLE, f"[once={hangs}][{mark}]")
    omni = start_loading()
    wait_for(hangs.exists, 60)
    assert_gone_after_kill(omni)


# -- the log


@pytest.mark.parametrize("stepped", [False, True])
def test_a_failed_request_has_one_line_in_the_log_with_its_id_and_where_it_failed(
    start_own_engine: Callable[..., Omni], capfd: pytest.CaptureFixture[str], stepped: bool
) -> None:
    omni = start_own_engine("bundled", pipeline=STEPS, step_execution=stepped, max_num_seqs=5,
                            threads=1, lora_modules=[],
                            default_sampling_params={"height": 16, "width": 16})  # fmt: skip
    outputs = omni.generate(marked("raise-step"))
    omni.close()  # what it has written has come through then
    log = capfd.readouterr().err
    failed = outputs[CULPRIT].request_id
    lines = [line for line in log.splitlines() if f"request {failed} failed" in line]
    assert len(lines) == 1
    assert "model_error: the pipeline failed: RuntimeError: the step fails as marked" in lines[0]
    assert "in step_scheduler" in log
    assert not [o for o in outputs if o.ok and f"request {o.request_id} failed" in log]
