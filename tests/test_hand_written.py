"""Hand-written pipelines: the contract, what is checked, and how they are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support_pipelines import (
    HalfStepped,
    NoForward,
    PatternPipeline,
    SerialPipeline,
    Undeclared,
)
from tiny_flow import TinyFlow

from omni_engine import DiffusionOutput, DiffusionRequestBatch, Omni, OmniDiffusionSamplingParams
from omni_engine.engine.devices import available_devices, worker_device
from omni_engine.engine.endpoints import EndpointLock
from omni_engine.protocol.errors import (
    ConfigError,
    PipelineContractError,
    UnsupportedOptionError,
)
from omni_engine.protocol.requests import build_request
from omni_engine.stages.contracts import check_contract, check_results
from omni_engine.worker.declared import declared_capabilities

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
OPTIONS: dict[str, Any] = {"lora_modules": [], "default_sampling_params": {}, "max_num_seqs": 4}


def batch(*ids: str) -> DiffusionRequestBatch:
    params = OmniDiffusionSamplingParams(seed=1)
    return DiffusionRequestBatch(
        tuple(build_request(f"prompt {i}", params, request_id=i) for i in ids)
    )


def test_batch_gives_what_a_pipeline_reads() -> None:
    two = batch("a", "b")
    assert two.num_reqs == 2
    assert two.request_ids == ("a", "b")
    assert two.prompts == ("prompt a", "prompt b")
    assert [params.seed for params in two.sampling_params_list] == [1, 1]
    assert batch("a").sampling_params.seed == 1
    with pytest.raises(ValueError, match="too many values"):
        two.sampling_params  # noqa: B018


class InstanceLoad(PatternPipeline):
    def load(self, context: Any) -> Any:  # type: ignore[override]
        return self


class OddFlag(PatternPipeline):
    supports_request_batch = "yes"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("cls", "message"),
    [(NoForward, "lacks forward"), (object, "lacks load, forward"),
     (InstanceLoad, "must be a classmethod"), (OddFlag, "must be a bool")],
)  # fmt: skip
def test_contract_is_checked_from_the_class(cls: type[Any], message: str) -> None:
    with pytest.raises(PipelineContractError, match=message):
        check_contract(cls, step_execution=False)


def test_a_complete_class_passes() -> None:
    check_contract(PatternPipeline, step_execution=False)
    check_contract(SerialPipeline, step_execution=False)


STEPS_ARE_MISSING = "can't be stepped: it lacks "
ALL_STEPS = "prepare_encode, denoise_step, step_scheduler, post_decode"


@pytest.mark.parametrize(
    ("cls", "message", "way_out"),
    [
        (PatternPipeline, STEPS_ARE_MISSING + ALL_STEPS, "or leave step_execution false"),
        (HalfStepped, STEPS_ARE_MISSING + "step_scheduler, post_decode", "docs/pipelines.md"),
        (Undeclared, "does not declare that it can be stepped", "Declare it, or leave"),
    ],
)
def test_the_stepwise_contract_is_checked_from_the_class(
    cls: type[Any], message: str, way_out: str
) -> None:
    with pytest.raises(PipelineContractError, match=message) as caught:
        check_contract(cls, step_execution=True)
    assert caught.value.field == "step_execution"
    assert way_out in str(caught.value)


def test_a_declared_contract_is_checked_even_if_the_stage_does_not_step() -> None:
    with pytest.raises(PipelineContractError, match="it lacks step_scheduler") as caught:
        check_contract(HalfStepped, step_execution=False)
    assert "or leave supports_step_execution out" in str(caught.value)
    check_contract(Undeclared, step_execution=False)


def test_steps_alone_are_a_complete_pipeline() -> None:
    class StepsOnly:
        supports_step_execution = True
        load = classmethod(lambda cls, context: cls())
        prepare_encode = denoise_step = step_scheduler = post_decode = print

    check_contract(StepsOnly, step_execution=True)
    check_contract(StepsOnly, step_execution=False)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ("PatternPipeline", STEPS_ARE_MISSING + ALL_STEPS),
        ("HalfStepped", STEPS_ARE_MISSING + "step_scheduler, post_decode"),
    ],
)
def test_an_engine_refuses_to_step_what_has_no_steps_before_loading_it(
    pipeline: str, message: str
) -> None:
    """The second raises if it is loaded."""
    with pytest.raises(PipelineContractError, match=message) as caught:
        Omni("bundled", pipeline=f"support_pipelines:{pipeline}", devices="cpu",
             step_execution=True, **OPTIONS)  # fmt: skip
    assert caught.value.field == "step_execution"
    assert f"support_pipelines:{pipeline}" in str(caught.value)
    assert "leave step_execution false" in str(caught.value)


def test_deterministic_mode_is_refused_for_forwards_of_ones_own() -> None:
    with pytest.raises(UnsupportedOptionError, match="its forwards are its own") as caught:
        Omni("bundled", pipeline="support_pipelines:PatternPipeline", devices="cpu",
             deterministic=True, **OPTIONS)  # fmt: skip
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (None, "did not return a list"),
        ([1, 2], "did not return a list"),
        ([DiffusionOutput("a")], "wrong number"),
        ([DiffusionOutput("b"), DiffusionOutput("a")], "another order"),
        ([DiffusionOutput("a", images=[]), DiffusionOutput("b")], "number of pictures"),
    ],
)
def test_results_are_checked(results: Any, message: str) -> None:
    with pytest.raises(PipelineContractError, match=message):
        check_results(batch("a", "b"), results)


def test_capabilities_are_read_from_attributes() -> None:
    found = declared_capabilities(PatternPipeline())
    assert found.pipeline == "PatternPipeline"
    assert found.supports_request_batch
    assert found.per_request == {"num_outputs_per_prompt", "negative_prompt", "raise_text"}
    assert found.defaults["height"] == 16
    assert "does not declare" in declared_capabilities(SerialPipeline()).batching_note


class WithForward(TinyFlow):
    def forward(self, batch: Any) -> Any:
        raise NotImplementedError


def test_capabilities_of_stepped_pipelines() -> None:
    """A pipeline with steps alone runs its request batches by them; TinyFlow is a torch module."""
    found = declared_capabilities(TinyFlow())
    assert (found.supports_step_execution, found.supports_request_batch) == (True, True)
    assert found.batching_note == "stepped: the pipeline's own denoise_step"
    assert found.per_request == {"guidance_scale"}
    both = declared_capabilities(WithForward())
    assert (both.supports_step_execution, both.supports_request_batch) == (True, False)
    assert "does not declare supports_request_batch; stepped:" in both.batching_note
    both = declared_capabilities(declaring(WithForward, supports_request_batch=True))
    assert both.supports_request_batch
    assert both.batching_note.startswith("the pipeline's own forward(batch); stepped: ")
    alone = declared_capabilities(declaring(TinyFlow, exclusive=True))
    assert (alone.exclusive, alone.supports_request_batch) == (True, False)
    assert "exclusive" in alone.batching_note
    serial = declared_capabilities(declaring(TinyFlow, supports_request_batch=False))
    assert not serial.supports_request_batch
    assert "request by request without step execution" in serial.batching_note


def declaring(cls: type[Any], **attributes: Any) -> Any:
    return type("Declaring", (cls,), attributes)()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size_multiple", "8"),
        ("size_multiple", 0),
        ("makes_video", 1),
        ("extra_args", "abc"),
        ("per_request", {1, 2}),
        ("defaults", {"heigth": 64}),
        ("defaults", {"height": -64}),
        ("supports_step_execution", "yes"),
        ("exclusive", None),
        ("batching_note", None),
    ],
)
def test_wrong_declarations_are_refused(name: str, value: Any) -> None:
    pipeline = PatternPipeline()
    setattr(pipeline, name, value)
    with pytest.raises(PipelineContractError, match=name) as caught:
        declared_capabilities(pipeline)
    assert caught.value.field == name


def test_a_pipeline_without_the_flag_runs_request_by_request(
    start_own_engine: Callable[..., Omni],
) -> None:
    omni = start_own_engine("bundled", pipeline="support_pipelines:SerialPipeline", **OPTIONS)
    outputs = omni.generate(["a", "b", "c"])
    assert [output.raise_for_error().metrics.max_batch_size for output in outputs] == [1, 1, 1]
    (stage,) = omni.status()["stages"]
    assert stage["effective_max_num_seqs"] == 1
    assert "does not declare supports_request_batch" in stage["batching"]


def offer(name: str, target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that offers a pipeline, as far as worker processes can tell."""
    info = folder / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[omni_engine.pipelines]\n{name} = {target}\n")
    support = Path(__file__).parent / "support"
    monkeypatch.setenv("PYTHONPATH", f"{support}:{EXAMPLES}:{folder}")


def test_a_pipeline_named_by_entry_point(
    start_own_engine: Callable[..., Omni], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer("pattern-by-name", "support_pipelines:PatternPipeline", tmp_path, monkeypatch)
    omni = start_own_engine("bundled", pipeline="pattern-by-name", **OPTIONS)
    assert omni.generate("a")[0].ok
    with pytest.raises(Exception, match="pattern-by-name") as caught:
        Omni("bundled", pipeline="pattern-by-nam", devices="cpu", **OPTIONS)
    assert "no installed package offers a pipeline named 'pattern-by-nam'" in str(caught.value)


def test_the_example_is_served_by_entry_point_and_in_yaml_stepped_and_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two modes of one pipeline, side by side, give the same pictures."""
    offer("tiny-flow", "tiny_flow:TinyFlow", tmp_path, monkeypatch)
    (tmp_path / "stages.yaml").write_text("""
stage_args:
  - stage_id: 0
    name: stepped
    engine_args: {model: bundled, pipeline: "tiny_flow:TinyFlow", step_execution: true,
                  max_num_seqs: 4}
    runtime: {devices: cpu, threads: 1}
  - stage_id: 1
    name: batched
    engine_args: {model: bundled, pipeline: tiny-flow, max_num_seqs: 4}
    runtime: {devices: cpu, threads: 1}
""")
    params = [
        OmniDiffusionSamplingParams(seed=i, num_inference_steps=3 + i, guidance_scale=1.0 + i,
                                    num_outputs_per_prompt=1 + i % 2, output_type="latent")
        for i in range(4)
    ]  # fmt: skip
    prompts = [f"picture {i}" for i in range(4)]
    with Omni(config=tmp_path / "stages.yaml") as omni:
        stepped = omni.generate(prompts, params, model="stepped")
        batched = omni.generate(prompts, params, model="batched")
        stages = omni.status()["stages"]
        assert [stage["effective_max_num_seqs"] for stage in stages] == [4, 4]
        assert {stage["batching"] for stage in stages} == {
            "stepped: the pipeline's own denoise_step"
        }
    for i, (one, other) in enumerate(zip(stepped, batched, strict=True)):
        assert one.raise_for_error().latents is not None
        assert one.latents.shape == (1 + i % 2, 4, 8, 8)
        np.testing.assert_allclose(one.latents, other.raise_for_error().latents, atol=1e-5)
        assert one.metrics.num_steps == one.metrics.num_forwards == 3 + i
    assert max(output.metrics.max_batch_size for output in stepped) > 1


def test_two_models_side_by_side(start_own_engine: Callable[..., Omni], tmp_path: Path) -> None:
    stage = (
        "  - stage_id: {i}\n    name: {name}\n    engine_args:\n      model: bundled\n"
        "      pipeline: support_pipelines:{cls}\n    runtime: {{devices: cpu}}\n"
    )
    text = "stage_args:\n" + "".join(
        stage.format(i=i, name=name, cls=cls)
        for i, (name, cls) in enumerate([("one", "PatternPipeline"), ("two", "SerialPipeline")])
    )
    (tmp_path / "stages.yaml").write_text(text)
    with Omni(config=tmp_path / "stages.yaml") as omni:
        by_default = omni.generate(["a", "b"])
        chosen = omni.generate(["a", "b"], model="two")
        (wrong,) = omni.generate("a", model="tow")
        workers = [{output.metrics.worker for output in out} for out in (by_default, chosen)]
        assert workers == [{"stage0-worker0"}, {"stage1-worker0"}]
        assert wrong.error is not None
        assert (wrong.error.code, wrong.error.field) == ("unknown_model", "model")
        assert "Did you mean 'two'?" in str(wrong.error)
        assert [model["name"] for model in omni.client.models()] == ["one", "two"]


class FakeDev:
    names: ClassVar = ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "tty0"]


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    for name in FakeDev.names:
        (tmp_path / name).touch()
    return tmp_path


def test_devices_are_found_without_torch(dev: Path, tmp_path_factory: Any) -> None:
    assert available_devices({}, dev) == ["cuda:0", "cuda:1", "cuda:2"]
    assert available_devices({"CUDA_VISIBLE_DEVICES": "2,0"}, dev) == ["cuda:0", "cuda:1"]
    assert available_devices({"CUDA_VISIBLE_DEVICES": ""}, dev) == []
    assert available_devices({}, tmp_path_factory.mktemp("empty")) in ([], ["mps"])


def test_a_worker_sees_only_its_own_device() -> None:
    second = worker_device("cuda:1", {})
    assert (second.torch_name, second.environment) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "1"})
    restricted = worker_device("cuda:1", {"CUDA_VISIBLE_DEVICES": "4,7"})
    assert restricted.environment == {"CUDA_VISIBLE_DEVICES": "7"}
    assert worker_device("cpu", {}).environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_one_engine_per_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/folder/engine"
    with EndpointLock(endpoint):
        assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match="another engine serves there"):
            EndpointLock(endpoint).__enter__()
    assert not (tmp_path / "folder").exists()


def test_pictures_are_views_of_what_was_received(client: Any) -> None:
    (output,) = client.generate("a")
    assert isinstance(output.images[0], np.ndarray)
    assert not output.images[0].flags.owndata
