"""Adapters in the forward: the bare model untouched, PEFT's results, each row under its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import random_adapter
from diffusers import QwenImagePipeline
from families_parts import double_stays_double
from made_adapters import (
    MadeLibrary,
    activation,
    made_weights,
    small_pipe,
    weights_of_file,
)
from tiny_models import tiny_stable_diffusion
from torch import Tensor, nn

from omni_engine.protocol.errors import AdapterError
from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR
from omni_engine.worker import adapter_bindings
from omni_engine.worker.adapter_runtime import AdapterRuntime
from omni_engine.worker.lora_layers import MixedRowsError
from omni_engine.worker.merged_adapter import MERGE_AFTER

Forward = Callable[[int], Tensor]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def bundled() -> Any:
    return QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=torch.float32)


def bundled_forward(pipe: Any, rows: int, *, alike: bool = False) -> Tensor:
    """One forward of the bundled denoiser; its rows differ unless they shall be alike."""
    generator = torch.Generator().manual_seed(7)
    dtype, made = pipe.transformer.dtype, 1 if alike else rows
    inputs = {
        "hidden_states": torch.randn(made, 16, 64, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(made, 5, 96, generator=generator).to(dtype),
        "encoder_hidden_states_mask": torch.ones(made, 5, dtype=torch.long),
        "timestep": torch.linspace(0.2, 0.8, made).to(dtype),
    }
    if alike:
        inputs = {name: torch.cat([value] * rows) for name, value in inputs.items()}
    shapes = [[(1, 4, 4)]] * rows
    result: Tensor = pipe.transformer(**inputs, img_shapes=shapes, return_dict=False)[0]
    return result


def unet_forward(pipe: Any, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    dtype = pipe.unet.dtype
    result: Tensor = pipe.unet(
        torch.randn(rows, 4, 8, 8, generator=generator).to(dtype),
        torch.linspace(10, 500, rows).to(dtype),
        torch.randn(rows, 6, 16, generator=generator).to(dtype),
        return_dict=False,
    )[0]
    return result


def small_forward(pipe: Any, rows: int) -> Tensor:
    x = torch.randn(rows, 3, 8, generator=torch.Generator().manual_seed(7))
    result: Tensor = pipe.transformer(x.to(pipe.transformer[0].weight.dtype))
    return result


class Adapted:
    """A pipeline under a runtime, with some adapters assigned to requests of their names."""

    def __init__(
        self, pipe: Any, component: str, weights: Any, requests: Mapping[str, Any], **options: Any
    ) -> None:
        limits = {"max_loras": 8, "max_cpu_loras": 8, **options}
        self.runtime = AdapterRuntime(pipe, MadeLibrary(weights), **limits)
        self.component = component
        for name, parts in requests.items():
            self.runtime.assign(name, activation(*parts) if parts else None)

    def __enter__(self) -> Adapted:
        return self

    def __exit__(self, *_: object) -> None:
        self.runtime.close()

    def run(self, forward: Callable[[], Tensor], *owners: tuple[str | None, int]) -> Tensor:
        with self.runtime.rows(self.component, owners):
            return forward()


def both_styles() -> list[Any]:
    return [weights_of_file(ADAPTER_DIR / f"{n}.safetensors", n, 2.0) for n in ("night", "outline")]


REQUESTS: dict[str, tuple[tuple[str, float], ...]] = {
    "night": (("night", 1.3),),
    "outline": (("outline", 0.7),),
    "both": (("night", 0.5), ("outline", -0.8)),
    "bare": (),
}


def test_the_bare_model_is_bit_identical_after_any_history(bundled: Any) -> None:
    before = bundled_forward(bundled, 2)
    with Adapted(bundled, "transformer", both_styles(), REQUESTS) as adapted:
        for request in ("night", "both", "outline"):
            changed = adapted.run(lambda: bundled_forward(bundled, 2), (request, 2))
            assert (changed - before).abs().max() > 0.1, "the adapter shows"
            adapted.run(lambda: bundled_forward(bundled, 2), (request, 1), ("bare", 1))
        assert torch.equal(adapted.run(lambda: bundled_forward(bundled, 2), ("bare", 2)), before)
        assert torch.equal(adapted.run(lambda: bundled_forward(bundled, 2), (None, 2)), before)
        assert torch.equal(bundled_forward(bundled, 2), before), "nothing stays bound"
    assert torch.equal(bundled_forward(bundled, 2), before)
    hooked = [m for m in bundled.transformer.modules() if "forward" in vars(m)]
    assert not hooked, "the hooks are gone"


def test_uniform_forwards_equal_peft_to_the_bit(bundled: Any) -> None:
    plain = copy.deepcopy(bundled)
    for name in ("night", "outline"):
        plain.load_lora_weights(ADAPTER_DIR, weight_name=f"{name}.safetensors", adapter_name=name)
    with Adapted(bundled, "transformer", both_styles(), REQUESTS) as adapted:
        for request, parts in REQUESTS.items():
            if parts:
                plain.set_adapters([name for name, _ in parts], [scale for _, scale in parts])
                expected = bundled_forward(plain, 2)
                got = adapted.run(lambda: bundled_forward(bundled, 2), (request, 2))
                assert torch.equal(got, expected), request


def is_layer(_: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


def test_convolutions_equal_peft_to_the_bit(tmp_path: Path) -> None:
    pipe, plain = tiny_stable_diffusion(), tiny_stable_diffusion()
    path = random_adapter(pipe, tmp_path / "all.safetensors", layers=is_layer, rank=4)
    plain.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="all")
    plain.set_adapters(["all"], [0.6])
    weights = [weights_of_file(path, "all", 1.0)]
    assert any(layer.down.ndim == 4 for layer in weights[0].layers.values())
    with Adapted(pipe, "unet", weights, {"all": (("all", 0.6),)}) as adapted:
        got = adapted.run(lambda: unet_forward(pipe, 2), ("all", 2))
        assert torch.equal(got, unet_forward(plain, 2))


def ranked(pipe: Any, *components: str) -> list[Any]:
    """Adapters of all layers of components, with different ranks."""
    modules = {name: pipe.components[name] for name in components}
    return [
        made_weights(modules, name, rank, seed=rank)
        for name, rank in (("night", 4), ("outline", 7), ("third", 1))
    ]


MIXED: dict[str, tuple[tuple[str, float], ...]] = {**REQUESTS, "third": (("third", 2.0),)}


def check_mixed(
    adapted: Adapted, forward: Forward, owners: list[tuple[str | None, int]], within: float
) -> None:
    """Each request's rows of a mixed forward equal those of a forward that is all its own."""
    rows = sum(number for _, number in owners)
    mixed = adapted.run(lambda: forward(rows), *owners)
    first = 0
    for owner, number in owners:
        alone = adapted.run(lambda: forward(rows), (owner, rows))
        mine = slice(first, first + number)
        if owner in (None, "bare"):
            assert torch.equal(mixed[mine], alone[mine])
        else:
            assert (mixed[mine] - alone[mine]).abs().max() <= within, owner
        first += number


ROWS: list[list[tuple[str | None, int]]] = [
    [("night", 1), ("outline", 1)],
    [("night", 2), ("bare", 2), ("both", 2), ("third", 2), ("outline", 2)],
    [("both", 1), (None, 2), ("night", 3)],
    [("bare", 1), ("both", 1)],
]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_mixed_rows_equal_rows_alone(dtype: torch.dtype, within: float) -> None:
    with double_stays_double():
        pipe = QwenImagePipeline.from_pretrained(MODEL_DIR, dtype=dtype)
        with Adapted(pipe, "transformer", ranked(pipe, "transformer"), MIXED) as adapted:
            for owners in ROWS:
                check_mixed(adapted, lambda rows: bundled_forward(pipe, rows), owners, within)


def test_mixed_convolutions_equal_rows_alone() -> None:
    with double_stays_double():
        pipe = tiny_stable_diffusion().to(dtype=torch.float64)
        with Adapted(pipe, "unet", ranked(pipe, "unet"), MIXED) as adapted:
            for owners in ROWS:
                check_mixed(adapted, lambda rows: unet_forward(pipe, rows), owners, 1e-11)


def test_mixed_rows_without_copies_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_bindings, "_MAX_STACKED_BYTES", 100)
    pipe = small_pipe(torch.float64)
    with Adapted(pipe, "transformer", ranked(pipe, "transformer"), MIXED) as adapted:
        for owners in ROWS:
            check_mixed(adapted, lambda rows: small_forward(pipe, rows), owners, 1e-13)


def test_exact_rows_depend_on_nothing_beside_them_by_a_bit(bundled: Any) -> None:
    """Neither on the adapters of the other calls nor on the place among them."""
    forward = lambda: bundled_forward(bundled, 4, alike=True)  # noqa: E731
    weights = ranked(bundled, "transformer")
    with Adapted(bundled, "transformer", weights, MIXED, exact_rows=True) as adapted:
        seen: dict[str, Tensor] = {}
        for names in itertools.islice(itertools.permutations(MIXED, 4), 0, 120, 17):
            made = adapted.run(forward, *[(name, 1) for name in names])
            for row, name in zip(made, names, strict=True):
                assert torch.equal(seen.setdefault(name, row), row)
        assert set(seen) == set(MIXED)
        for name, row in seen.items():
            for same in adapted.run(forward, *[(name, 1)] * 4):
                assert torch.equal(same, row), name


def test_an_overflowing_adapter_touches_its_own_rows_only() -> None:
    pipe = small_pipe(torch.float16)
    bad = made_weights({"transformer": pipe.transformer}, "bad", strength=3e4)
    good = made_weights({"transformer": pipe.transformer}, "good", rank=4, seed=1)
    requests = {"bad": (("bad", 50.0),), "good": (("good", 1.0),), "bare": ()}
    with Adapted(pipe, "transformer", [bad, good], requests) as adapted:
        owners = [("good", 1), ("bad", 1), ("bare", 1)]
        mixed = adapted.run(lambda: small_forward(pipe, 3), *owners)
        assert not mixed[1].isfinite().all()
        for place, name in ((0, "good"), (2, "bare")):
            alone = adapted.run(lambda: small_forward(pipe, 3), (name, 3))
            torch.testing.assert_close(mixed[place], alone[place], rtol=1e-2, atol=1e-2)


def test_weights_that_overflow_in_the_models_dtype_are_refused() -> None:
    pipe = small_pipe(torch.float16)
    modules = {"transformer": pipe.transformer}
    huge = made_weights(modules, "huge", strength=1e6, dtype=torch.float32)
    with (
        Adapted(pipe, "transformer", [huge], {"huge": (("huge", 1.0),)}) as adapted,
        pytest.raises(AdapterError, match=r"transformer\.0 overflow in float16"),
    ):
        adapted.runtime.wait_ready("huge")


def test_inputs_that_are_not_the_forwards_rows_are_refused_and_run_alone() -> None:
    pipe = small_pipe()
    weights = ranked(pipe, "transformer")
    x = torch.ones(3, 8)
    with Adapted(pipe, "transformer", weights, MIXED) as adapted:
        with pytest.raises(MixedRowsError, match="doesn't consist of the forward's 2 rows"):
            adapted.run(lambda: pipe.transformer(x), ("night", 1), ("outline", 1))
        alone = adapted.run(lambda: pipe.transformer(x), ("night", 2))
        assert not torch.equal(alone, pipe.transformer(x))


def test_more_adapters_than_fit_are_refused_together_but_not_alone() -> None:
    pipe = small_pipe()
    weights = ranked(pipe, "transformer")
    with Adapted(pipe, "transformer", weights, MIXED, max_loras=1) as adapted:
        forward = lambda: small_forward(pipe, 2)  # noqa: E731
        with pytest.raises(MixedRowsError, match="2 adapters don't fit"):
            adapted.run(forward, ("night", 1), ("outline", 1))
        with pytest.raises(AdapterError, match="2 adapters don't fit"):
            adapted.run(forward, ("both", 2))
        assert adapted.runtime.is_ready("both"), "running it tells why it can't"
        night, outline = (adapted.run(forward, (name, 2)) for name in ("night", "outline"))
        assert not torch.equal(night, outline)


def test_components_see_only_their_part() -> None:
    pipe = small_pipe()
    both = made_weights(pipe.components | {"tokenizer": nn.Identity()}, "both")
    inner = made_weights({"transformer": pipe.transformer}, "inner", seed=1)
    requests = {"a": (("both", 1.0),), "b": (("both", 1.0), ("inner", 1.0)), "bare": ()}
    with Adapted(pipe, "transformer", [both, inner], requests) as adapted:
        runtime = adapted.runtime
        for name in requests:
            runtime.wait_ready(name)
        assert runtime.identity("a", "text_encoder") == runtime.identity("b", "text_encoder")
        assert runtime.identity("a", "transformer") != runtime.identity("b", "transformer")
        assert runtime.identity("b", None) == activation(("both", 1.0), ("inner", 1.0)).identity
        assert runtime.identity("a", "vae") is None
        assert runtime.identity("bare", "transformer") is runtime.identity(None, None) is None
        x = torch.ones(2, 8)
        plain = pipe.text_encoder(x)
        with runtime.rows("text_encoder", [("a", 1), ("b", 1)]):
            encoded = pipe.text_encoder(x)
            untouched = pipe.transformer(x)
        assert torch.equal(encoded[0], encoded[1]), "one binding for both"
        assert not torch.equal(encoded, plain)
        assert torch.equal(untouched, pipe.transformer(x)), "other components aren't bound"
        applied = [(lora.name, lora.digest, lora.scale) for lora in runtime.applied("b")]
        assert applied == [("both", "both", 1.0), ("inner", "inner", 1.0)]
        assert runtime.applied("bare") == []


def test_rows_go_before_what_is_active_everywhere() -> None:
    pipe = small_pipe()
    with Adapted(pipe, "transformer", ranked(pipe, "transformer"), MIXED) as adapted:
        forward = lambda: small_forward(pipe, 2)  # noqa: E731
        night, bare = (adapted.run(forward, (name, 2)) for name in ("night", "bare"))
        with adapted.runtime.everywhere(activation(("night", 1.3))):
            assert torch.equal(forward(), night)
            assert torch.equal(adapted.run(forward, ("bare", 2)), bare)
            assert torch.equal(adapted.run(forward, ("outline", 1), ("bare", 1))[1], bare[1])
            assert torch.equal(forward(), night), "as before"
            with adapted.runtime.everywhere(None):
                assert torch.equal(forward(), bare)
        assert torch.equal(forward(), bare)


def test_an_error_in_a_forward_leaves_nothing_bound() -> None:
    pipe = small_pipe()
    with Adapted(pipe, "transformer", ranked(pipe, "transformer"), MIXED) as adapted:
        bare = small_forward(pipe, 2)
        with pytest.raises(RuntimeError, match="shapes"):
            adapted.run(lambda: pipe.transformer(torch.ones(2, 9)), ("night", 2))
        assert torch.equal(small_forward(pipe, 2), bare)


def test_an_unknown_request_is_an_error_not_the_bare_model() -> None:
    with (
        Adapted(small_pipe(), "transformer", [], {}) as adapted,
        pytest.raises(KeyError, match="'nobody' was not assigned"),
        adapted.runtime.rows("transformer", [("nobody", 1)]),
    ):
        pass


def test_switches_are_counted() -> None:
    pipe = small_pipe()
    with Adapted(pipe, "transformer", ranked(pipe, "transformer"), MIXED) as adapted:
        for name in ("bare", "night", "night", "both", "both", "bare", "bare"):
            adapted.run(lambda: small_forward(pipe, 2), (name, 2))
        assert adapted.runtime.held().activations == 3


# -- merged copies


def merged_after(adapted: Adapted, name: str, forward: Callable[[], Tensor]) -> Tensor:
    for _ in range(MERGE_AFTER):
        with adapted.runtime.rows(adapted.component, [(name, 2)]):
            pass
    return adapted.run(forward, (name, 2))


def test_an_adapter_that_runs_for_long_is_merged_into_a_copy(bundled: Any) -> None:
    forward = lambda: bundled_forward(bundled, 2)  # noqa: E731
    before = {name: weight.clone() for name, weight in bundled.transformer.named_parameters()}
    bare = forward()
    with Adapted(bundled, "transformer", both_styles(), REQUESTS, merge=True) as adapted:
        unmerged = adapted.run(forward, ("both", 2))
        merged = merged_after(adapted, "both", forward)
        assert not torch.equal(merged, unmerged), "another way to compute it"
        assert (merged - unmerged).abs().max() <= 3e-5
        assert torch.equal(adapted.run(forward, ("bare", 2)), bare)
        outline = adapted.run(forward, ("outline", 2))
        assert torch.equal(adapted.run(forward, ("both", 2)), merged), "it was kept meanwhile"
        merged_after(adapted, "outline", forward)
        assert torch.equal(adapted.run(forward, ("both", 2)), unmerged), "outline took its place"
        assert (adapted.run(forward, ("outline", 2)) - outline).abs().max() <= 3e-5
    for name, weight in bundled.transformer.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_a_merged_copy_goes_when_its_adapter_leaves_the_device() -> None:
    pipe = small_pipe()
    weights = ranked(pipe, "transformer")
    forward = lambda: small_forward(pipe, 2)  # noqa: E731
    with Adapted(pipe, "transformer", weights, MIXED, merge=True, max_loras=1) as adapted:
        unmerged = adapted.run(forward, ("night", 2))
        assert not torch.equal(merged_after(adapted, "night", forward), unmerged)
        adapted.run(forward, ("third", 2))
        assert torch.equal(adapted.run(forward, ("night", 2)), unmerged)


def test_nothing_is_merged_where_rows_must_be_exact() -> None:
    pipe = small_pipe()
    weights = ranked(pipe, "transformer")
    forward = lambda: small_forward(pipe, 2)  # noqa: E731
    options = {"merge": True, "exact_rows": True}
    with Adapted(pipe, "transformer", weights, MIXED, **options) as adapted:
        first = adapted.run(forward, ("night", 2))
        assert torch.equal(merged_after(adapted, "night", forward), first)
