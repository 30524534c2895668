"""``omni-engine parity``: pictures in company against pictures alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
from diffusers import StableDiffusionPAGPipeline
from support_pipelines import PatternPipeline
from tiny_models import save_tiny_stable_diffusion, tiny_stable_diffusion

from omni_engine.protocol.plans import WorkerSpec
from omni_engine.stages.config import EngineArgs
from omni_engine.stages.contracts import LoadContext, StepBatch, StepRequestState
from omni_engine.worker.parity import measure
from omni_engine.worker.parity_runs import Run, difference

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Blending:
    """A hand-written stepwise pipeline: every step pulls latents towards the seed's colour."""

    supports_step_execution = True
    supports_request_batch = False
    defaults: ClassVar = {"height": 8, "width": 8, "num_inference_steps": 4}

    @classmethod
    def load(cls, context: LoadContext) -> Blending:
        return cls()

    def prepare_encode(self, state: StepRequestState) -> None:
        params = state.request.sampling_params
        generator = torch.Generator().manual_seed(state.seed)
        state.latents = torch.rand(1, params.height, params.width, 3, generator=generator)
        state.num_steps = params.num_inference_steps or 1
        state.timesteps = torch.linspace(1, 0, state.num_steps)

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        return torch.sin(9 * batch.latents)

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        state.latents = (state.latents + 0.3 * noise_pred).clamp(0, 1)
        state.step_index += 1

    def post_decode(self, state: StepRequestState) -> Any:
        return state.latents[0].numpy()


class Leaking(Blending):
    """One picture's result depends on the others of its forward."""

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        return torch.sin(9 * (batch.latents - batch.latents.mean(0)))


class Exclusive(Leaking):
    """As it would be right: with one request at a time."""

    exclusive = True


class Breaking(Blending):
    """Steps only one picture at a time, and five steps only if nobody else is there."""

    live = 0

    def prepare_encode(self, state: StepRequestState) -> None:
        super().prepare_encode(state)
        if self.live and state.num_steps == 5:
            raise RuntimeError("five steps are too many")
        self.live += 1

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        if len(states) > 1:
            raise RuntimeError("one at a time, please")
        return super().denoise_step(batch, states)

    def post_decode(self, state: StepRequestState) -> Any:
        self.live -= 1
        return super().post_decode(state)


def measured(model: Path | str, requests: int = 3, dtype: str = "float32", **more: Any) -> Any:
    args = {**EngineArgs(model=str(model), **more).model_dump(mode="json"), "dtype": dtype}
    spec = WorkerSpec("parity", "", args, str(model), "cpu")
    found = measure(spec, requests, lambda _: None)
    json.dumps(found, allow_nan=False)
    return found, {mode["mode"]: mode for mode in found["modes"]}


# -- diffusers pipelines


@pytest.mark.parametrize("img2img", [False, True])
def test_a_pipeline_that_shares_makes_the_same_pictures(tmp_path: Path, img2img: bool) -> None:
    found, modes = measured(save_tiny_stable_diffusion(tmp_path, img2img=img2img), dtype="float64")
    assert found["passed"]
    assert found["fused"]
    assert found["rules"] == {"unet": "table"}
    assert "certified at load" in found["batching"]
    assert list(modes) == ["single", "list call", "stepped", "mixed"]
    single = modes["single"]
    assert single["verdict"] == "reference"
    assert single["forwards"] == single["calls"] > 0
    for name in ("stepped", "mixed"):
        assert modes[name]["verdict"] == "equal"
        assert modes[name]["difference"] < 1e-12
        assert modes[name]["forwards"] < modes[name]["calls"]
        assert modes[name]["time_ratio"] > 0
    assert modes["stepped"]["calls"] == single["calls"]
    assert 3 * modes["stepped"]["forwards"] == single["forwards"]
    assert modes["stepped"]["rows"] == 3 * single["rows"]
    assert not modes["list call"]["served"]


def test_a_pipeline_that_can_not_share_passes_unfused(tmp_path: Path) -> None:
    tiny_stable_diffusion(StableDiffusionPAGPipeline).save_pretrained(tmp_path)
    found, modes = measured(tmp_path)
    assert found["passed"]
    assert not found["fused"]
    assert "rewires its model" in found["batching"]
    for name in ("stepped", "mixed"):
        assert modes[name]["verdict"] == "equal"
        assert modes[name]["forwards"] == modes[name]["calls"] > 0


# -- hand-written pipelines


def test_a_hand_written_pipeline_is_compared_with_steps_alone() -> None:
    found, modes = measured("any", pipeline="test_parity:Blending")
    assert found["passed"]
    assert list(modes) == ["single", "stepped", "mixed"]
    assert (modes["single"]["forwards"], modes["single"]["rows"]) == (12, 1)
    assert (modes["stepped"]["forwards"], modes["stepped"]["rows"]) == (4, 3)
    assert modes["stepped"]["difference"] == 0
    assert modes["mixed"]["calls"] == 3 + 2 * 2 + 4
    assert modes["mixed"]["forwards"] == 5, "the third joins one tick later, for four steps"


def test_a_pipeline_that_mixes_rows_is_found_out() -> None:
    found, modes = measured("any", pipeline="test_parity:Leaking")
    assert not found["passed"]
    assert modes["stepped"]["verdict"] == modes["mixed"]["verdict"] == "differs"
    assert modes["stepped"]["difference"] > 0.01


def test_an_exclusive_pipeline_is_never_in_company() -> None:
    found, modes = measured("any", pipeline="test_parity:Exclusive")
    assert found["passed"]
    assert modes["stepped"]["forwards"] == modes["stepped"]["calls"]


def test_a_mode_that_fails_says_why_and_loses_no_other() -> None:
    found, modes = measured("any", requests=5, pipeline="test_parity:Breaking")
    assert modes["single"]["verdict"] == "reference"
    assert modes["stepped"]["verdict"] == "equal", "its members were run alone"
    assert modes["mixed"]["verdict"] == "fails"
    assert "five steps are too many" in modes["mixed"]["note"]
    assert not found["passed"]


def test_a_request_batch_pipeline_is_compared_batch_against_requests() -> None:
    found, modes = measured("any", pipeline="support_pipelines:PatternPipeline")
    assert found["passed"]
    assert list(modes) == ["single", "batch"]
    assert modes["batch"]["verdict"] == "equal"
    assert modes["batch"]["forwards"] is None


def test_the_example_of_the_documents_has_no_request_batch_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(TESTS.parent / "docs" / "examples"))
    found, modes = measured("any", pipeline="tiny_flow:TinyFlow")
    assert list(modes) == ["single", "stepped", "mixed"], "a module's own forward only raises"
    assert [mode["verdict"] for mode in modes.values()] == ["reference", "equal", "equal"]
    assert found["passed"]


def test_one_value_that_is_not_a_number_is_infinitely_far() -> None:
    good, bad = (Run({("a", 0): np.zeros(2), ("b", 0): np.array([0, b])}) for b in (0, np.nan))
    assert difference(good, good) == 0
    assert difference(good, bad) == float("inf")


class Positional(PatternPipeline):
    """What it draws depends on the place in the batch."""

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        for place, output in enumerate(outputs):
            output.images = [np.roll(image, place, axis=0) for image in output.images or ()]
            output.images = [image // (place + 1) for image in output.images]
        return outputs


def test_a_request_batch_that_depends_on_places_is_found_out() -> None:
    found, modes = measured("any", pipeline="test_parity:Positional")
    assert not found["passed"]
    assert modes["batch"]["verdict"] == "differs"


# -- the command


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "omni_engine.cli.main", "parity", *args]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*args), env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_bundled_model_passes() -> None:
    done = run("--requests", "2", "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    phases = ["loading", "certifying", "one by one", "lists", "together", "mixed"]
    for line, phase in zip(done.stderr.splitlines(), phases, strict=True):
        assert phase in line
    found = json.loads(done.stdout)
    modes = {mode["mode"]: mode for mode in found["modes"]}
    assert (found["pipeline"], found["fused"], found["passed"]) == ("QwenImagePipeline", True, True)
    assert found["dtype"] == "float32"
    for name in ("list call", "stepped", "mixed"):
        assert modes[name]["verdict"] == "equal"
        assert modes[name]["difference"] < 1e-4
        assert modes[name]["forwards"] < modes[name]["calls"]


def test_a_table_for_people_and_an_exit_code_for_scripts() -> None:
    failed = run("any/thing", "--pipeline", "test_parity:Leaking", "--device", "cpu")
    assert failed.returncode == 1
    for text in ("max difference", "forwards for calls", "4 for 16", "differs", "FAILED"):
        assert text in failed.stdout
    assert "in company differ from alone (stepped, mixed)" in failed.stdout


def test_a_mode_that_fails_is_not_said_to_differ() -> None:
    failed = run("any/thing", "--pipeline", "test_parity:Breaking", "--requests", "5")
    assert failed.returncode == 1
    assert "FAILED: requests can't be run (mixed)" in failed.stdout
    assert "differ from alone" not in failed.stdout


def test_a_model_that_can_not_be_loaded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDifusionPipeline"}')
    done = run(str(tmp_path), "--device", "cpu")
    assert done.returncode == 1
    assert "model_load" in done.stderr
    assert "StableDiffusionPipeline" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--requests", "1"], "--requests"), (["--device", "tpu"], "devices"),
     (["--dtype", "int8"], "--dtype"), (["/nowhere/at/all"], "model")],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(args: list[str], named: str) -> None:
    done = run(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr


def test_the_command_itself_imports_nothing_heavy() -> None:
    code = """
import sys
from omni_engine.cli.main import main
sys.argv[1:] = ["parity", "--help"]
try:
    main()
finally:
    print(sorted({"torch", "diffusers", "transformers", "zmq"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Examples" in done.stdout
    assert "exit code" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_measuring_process_ends_with_the_command(number: signal.Signals) -> None:
    process = subprocess.Popen(
        command("--device", "cpu"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert psutil.wait_procs(children, timeout=30)[1] == []
