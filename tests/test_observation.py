"""What two probing calls tell about a model that no table knows."""

from __future__ import annotations

import logging
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from families import FAMILIES, alone, apart, together
from families_parts import STEPS, Family
from tiny_models import tiny_stable_diffusion

from omni_engine.worker import fusion, observation
from omni_engine.worker.call_rules import Kind
from omni_engine.worker.cooperative import CooperativeStepper
from omni_engine.worker.observation import observe, observed_rules
from omni_engine.worker.probe import probe_arguments
from omni_engine.worker.process_state import TorchModes
from omni_engine.worker.views import denoisers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def _no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((fusion, "RULES"), (fusion, "PADDED"), (observation, "RULES")):
        monkeypatch.setattr(module, name, {})


# -- families, as if no table knew them

UNOBSERVED = {
    "qwen_image_edit": "one picture for two prompts confuses its processor",
    "qwen_image_edit_plus": "it takes one prompt at a time",
}
RARELY_SHARED = {"pixart_sigma", "sana", "ltx", "lumina2", "glm_image"}
"""Their masks or tokens may be read by the first row only, for all that can be seen."""


def probe_of(family: Family, count: int) -> dict[str, Any]:
    request = family.request(0)
    lists = {name: [request[name]] * count for name in ("prompt", "negative_prompt")
             if name in request}  # fmt: skip
    generators = [torch.Generator().manual_seed(0) for _ in range(count)]
    return {**request, **lists, "generator": generators}


@pytest.mark.usefixtures("_no_table")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_exact_without_a_table(name: str) -> None:
    family = FAMILIES[name]
    with family.context():
        pipe = family.pipeline()
        found = observe(pipe, denoisers(pipe), lambda count: probe_of(family, count))
        requests = [family.request(index) for index in range(len(STEPS))]
        expected = [alone(pipe, request, seed) for seed, request in enumerate(requests)]
        stepper = CooperativeStepper(pipe, denoisers(pipe), observed=found)
        made, calls = together(stepper, requests)
    assert bool(found) == (name not in UNOBSERVED)
    tolerance = 1e-12 if family.float64 else 1e-4
    assert max(apart(a, b) for a, b in zip(made, expected, strict=True)) <= tolerance
    assert stepper.fallbacks == 0
    if name not in RARELY_SHARED:
        assert stepper.forwards < 0.6 * calls


# -- kinds


class Strange(ModelMixin, ConfigMixin):
    """Takes everything that observation has a word for."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, table: torch.Tensor, *, noise: torch.Tensor, **_: Any) -> torch.Tensor:
        return noise + table.sum() * self.weight


class StrangePipeline(DiffusionPipeline):
    def __init__(self, brain: Strange) -> None:
        super().__init__()
        self.register_modules(brain=brain)

    @torch.no_grad()
    def __call__(self, prompt: list[str], generator: Any = None, output_type: str = "np") -> Any:
        n = len(prompt)
        torch.manual_seed(7)
        torch.set_grad_enabled(True)
        self.brain(torch.ones(4, 3), **self.arguments(n), noise=torch.randn(2 * n, 3, 5))
        return prompt

    def arguments(self, n: int) -> dict[str, Any]:
        rows = 2 * n
        return {
            "when": torch.tensor(0.5),
            "time": torch.ones(1),
            "scales": torch.ones(rows),
            "frames": torch.ones(4 * rows, 5),
            "layers": torch.ones(6, rows, 5),
            "places": torch.zeros(rows, 3, dtype=torch.long),
            "mask": torch.ones(rows, 3, dtype=torch.bool),
            "text": [torch.ones(3, 5) for _ in range(rows)],
            "shapes": [[(1, 4, 4)] for _ in range(rows)],
            "sizes": [torch.zeros(2, dtype=torch.long) for _ in range(rows)],
            "residuals": [torch.ones(rows, 5), torch.ones(rows, 3, 2)],
            "added": {"embeds": torch.ones(rows, 5), "scale": 2.0, "nothing": None},
            "rope": (torch.ones(3, 4), torch.ones(3, 4)),
            "blend": {"embeds": torch.ones(rows, 5), "table": torch.ones(3, 4)},
            "prompts": tuple("x" * rows),
            "packed": torch.ones(1, 9 * rows, 5),
            "ends": torch.arange(rows + 1),
            "pairs": torch.ones(rows, rows),
            "count": rows,
            "loud": True,
            "nothing": None,
            "notes": object(),
        }


KINDS = {
    "table": Kind.SAME, "noise": Kind.ROWS, "when": Kind.EXPAND, "time": Kind.EXPAND,
    "scales": Kind.ROWS, "frames": Kind.ROWS, "layers": Kind.ROWS_1, "places": Kind.SAME_ROWS,
    "mask": Kind.SAME_ROWS, "text": Kind.ROW_LIST, "shapes": Kind.SAME_LIST,
    "sizes": Kind.SAME_LIST, "residuals": Kind.EACH, "added": Kind.EACH, "rope": Kind.SAME,
    "blend": Kind.OPAQUE, "prompts": Kind.OPAQUE, "packed": Kind.OPAQUE, "ends": Kind.OPAQUE,
    "pairs": Kind.OPAQUE, "count": Kind.OPAQUE, "loud": Kind.SAME, "notes": Kind.STATE,
}  # fmt: skip


def strange(cls: type[StrangePipeline] = StrangePipeline) -> Any:
    return cls(Strange())


def prompts(count: int) -> dict[str, Any]:
    return {"prompt": ["a"] * count}


def test_every_kind_is_recognised() -> None:
    pipe = strange()
    assert observe(pipe, [pipe.brain], prompts) == {pipe.brain: KINDS}


def test_observing_leaves_nothing_behind() -> None:
    pipe = strange()
    before, random = TorchModes.current(), torch.get_rng_state()
    observe(pipe, [pipe.brain], prompts)
    assert "forward" not in vars(pipe.brain)
    assert TorchModes.current() == before
    assert torch.equal(torch.get_rng_state(), random)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return Strange.forward(pipe.brain, *args, **kwargs)

    pipe.brain.forward = wrapper
    observe(pipe, [pipe.brain], prompts)
    assert vars(pipe.brain)["forward"] is wrapper


class OneByOne(StrangePipeline):
    def __call__(self, prompt: list[str], **options: Any) -> Any:
        return [super(OneByOne, self).__call__([one], **options) for one in prompt]


class Refusing(StrangePipeline):
    def __call__(self, prompt: list[str], **options: Any) -> Any:
        raise TypeError("one prompt only")


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(OneByOne, "no rows observed in the calls of Strange"),
     (Refusing, "Refusing can't be observed: TypeError: one prompt only")],
)  # fmt: skip
def test_nothing_is_observed_where_prompts_do_not_share_calls(
    cls: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = strange(cls)
    with caplog.at_level(logging.INFO, observation.__name__):
        assert observe(pipe, [pipe.brain], prompts) == {}
    assert reason in caplog.text
    assert "forward" not in vars(pipe.brain)


class FirstRowsTable(Strange):
    """Its first argument looks like rows; observation knows that it is none."""

    def forward(
        self, table: torch.Tensor, *, noise: torch.Tensor, when: torch.Tensor
    ) -> torch.Tensor:
        return noise * table[:1] + when.reshape(-1, 1)


def test_observed_rules_say_which_argument_has_the_rows() -> None:
    module = FirstRowsTable()
    given = {"table": torch.ones(4, 5), "noise": torch.ones(2, 5), "when": torch.tensor(0.5)}
    observed = {"table": Kind.SAME, "noise": Kind.ROWS, "when": Kind.EXPAND}
    assert fusion.CallReader(module, module.forward).read((), dict(given)).rows == 4
    call = fusion.CallReader(module, module.forward, observed).read((), dict(given))
    assert call.rows == 2
    assert call.kinds == observed


def test_an_observed_kind_is_not_forced_on_another_type() -> None:
    module = FirstRowsTable()
    observed = {"noise": Kind.ROWS, "when": Kind.ROWS, "table": Kind.EXPAND}
    reader = fusion.CallReader(module, module.forward, observed)
    call = reader.read((), {"table": torch.ones(4, 5), "noise": torch.ones(2, 5), "when": 7})
    assert call.kinds["when"] is Kind.SAME
    assert call.kinds["table"] is Kind.SAME


# -- probing calls built from a pipeline's signature


@pytest.mark.usefixtures("_no_table")
@pytest.mark.parametrize(
    "cls", [diffusers.StableDiffusionPipeline, diffusers.StableDiffusionImg2ImgPipeline]
)
def test_a_pipeline_can_be_probed_from_its_signature(cls: Any) -> None:
    pipe = tiny_stable_diffusion(cls)
    pipe.set_progress_bar_config(disable=True)
    found = observed_rules(pipe, [pipe.unet])[pipe.unet]
    assert found["sample"] is Kind.ROWS
    assert found["encoder_hidden_states"] is Kind.ROWS
    assert found["timestep"] is Kind.EXPAND


def test_what_the_table_knows_is_not_probed() -> None:
    pipe = tiny_stable_diffusion()
    assert observed_rules(pipe, [pipe.unet]) == {}


def test_probes_differ_in_the_number_of_prompts_only() -> None:
    pipe = tiny_stable_diffusion(diffusers.StableDiffusionImg2ImgPipeline)
    two, three = (probe_arguments(pipe, count) for count in (2, 3))
    assert set(two) == set(three)
    assert three["prompt"] == [*two["prompt"], two["prompt"][0]]
    assert [g.initial_seed() for g in three["generator"]] == [0, 0, 0]
    assert three["image"].size == two["image"].size
    assert three["output_type"] == "latent"
