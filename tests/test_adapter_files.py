"""Adapter files: what diffusers' loaders make of them, what is refused, what the store keeps."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import BROKEN, broken_adapter, random_adapter
from diffusers import QwenImagePipeline
from families import FAMILIES
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from omni_engine.protocol.adapters import Adapter
from omni_engine.protocol.errors import AdapterError
from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR
from omni_engine.worker.adapter_file import MAX_BYTES
from omni_engine.worker.adapter_library import AdapterLibrary
from omni_engine.worker.adapter_store import AdapterStore
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights

ENCODERS = ("text_encoder", "text_encoder_2")
DENOISERS = ("unet", "transformer")
SCALE = 0.75
"""A power of two's multiple: PEFT multiplies in another order."""


def bundled() -> Any:
    return QwenImagePipeline.from_pretrained(MODEL_DIR)


def family(name: str) -> Callable[[], Any]:
    return lambda: FAMILIES[name].pipeline().to(dtype=torch.float32)


PIPELINES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "bundled": (bundled, DENOISERS),
    "stable_diffusion": (family("stable_diffusion"), (*DENOISERS, *ENCODERS)),
    "sdxl": (family("sdxl"), (*DENOISERS, *ENCODERS)),
    "flux": (family("flux"), (*DENOISERS, "text_encoder")),
    "wan": (family("wan"), DENOISERS),
}
"""What builds a pipeline, and the components that its adapters change."""


@pytest.fixture(scope="module")
def qwen() -> Any:
    return bundled()


@pytest.fixture
def library(qwen: Any, tmp_path: Path) -> AdapterLibrary:
    return AdapterLibrary(qwen, tmp_path / "cache")


@pytest.fixture
def good(qwen: Any, tmp_path: Path) -> Path:
    return random_adapter(qwen, tmp_path / "good.safetensors")


def fetch(library: AdapterLibrary, path: Path) -> AdapterWeights:
    report = library.check("a", path)
    return library.fetch(Adapter("a", str(path), report.digest))


def update(base: nn.Module, weights: LayerWeights, x: torch.Tensor, scale: float) -> torch.Tensor:
    """What a layer and its update make of x."""
    if isinstance(base, nn.Conv2d):
        down = functional.conv2d(x, weights.down, None, base.stride, base.padding)
        return base(x) + functional.conv2d(down, weights.up) * (weights.scaling * scale)
    down = functional.linear(x, weights.down)
    return base(x) + functional.linear(down, weights.up) * (weights.scaling * scale)


def assert_as_peft_computes(pipe: Any, weights: AdapterWeights, components: set[str]) -> None:
    """Compare each layer of a pipeline that diffusers loaded an adapter into."""
    found = set()
    for component in components:
        for path, layer in getattr(pipe, component).named_modules():
            if not isinstance(layer, LoraLayer) or not layer.lora_A:
                continue
            base = layer.get_base_layer()
            generator = torch.Generator().manual_seed(len(found))
            width = base.weight.shape[1]
            shape = (2, width, 5, 5) if isinstance(base, nn.Conv2d) else (2, 3, width)
            x = torch.randn(shape, generator=generator)
            name = f"{component}.{path}"
            with torch.no_grad():
                expected = layer(x)
                assert torch.equal(update(base, weights.layers[name], x, SCALE), expected), name
                assert not torch.equal(base(x), expected), "it has an effect"
            found.add(name)
    assert found == set(weights.layers)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        (name, format)
        for name in PIPELINES
        for format in ("peft", "diffusers", "kohya")
        if format != "kohya" or name not in ("flux", "wan")  # theirs have the original's names
    ],
)
def test_converted_weights_compute_what_diffusers_computes(
    name: str, format: str, tmp_path: Path
) -> None:
    build, components = PIPELINES[name]
    pipe = build()
    path = random_adapter(
        pipe, tmp_path / "one.safetensors", components=components, format=format, alpha=3, seed=5
    )
    library = AdapterLibrary(pipe, tmp_path / "cache")
    report = library.check("one", path)
    there = {component for component in components if getattr(pipe, component, None) is not None}
    assert report.format == format
    assert report.ranks == [4]
    assert set(report.layers) == there
    pipe.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="one")
    pipe.set_adapters(["one"], [SCALE])
    weights = library.fetch(Adapter("one", str(path), report.digest))
    assert weights.components == there
    assert_as_peft_computes(pipe, weights, there)


def test_convolutions_and_each_layers_rank_and_alpha(tmp_path: Path) -> None:
    pipe = family("sdxl")()
    one, other = (
        random_adapter(
            pipe, tmp_path / f"{kind.__name__}.safetensors", rank=rank, alpha=alpha, format="kohya",
            components=("unet",),
            layers=lambda path, layer, kind=kind: isinstance(layer, kind) and "add_" not in path,
        )
        for kind, rank, alpha in ((nn.Conv2d, 2, 1.0), (nn.Linear, 3, 6.0))
    )  # fmt: skip
    path = tmp_path / "both.safetensors"
    save_file(load_file(one) | load_file(other), path)
    library = AdapterLibrary(pipe, tmp_path / "cache")
    assert library.check("both", path).ranks == [2, 3]
    weights = fetch(library, path)
    pipe.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="both")
    pipe.set_adapters(["both"], [SCALE])
    assert_as_peft_computes(pipe, weights, {"unet"})
    assert {layer.scaling for layer in weights.layers.values()} == {0.5, 2.0}


def test_settings_in_the_file_count_as_diffusers_counts_them(qwen: Any, tmp_path: Path) -> None:
    path = random_adapter(qwen, tmp_path / "plain.safetensors")
    settings = {
        "transformer.r": 4,
        "transformer.lora_alpha": 6,
        "transformer.use_rslora": True,
        "transformer.alpha_pattern": {r"transformer_blocks\.0\.attn\.to_q": 12},
        "transformer.target_modules": ["to_q", "to_k", "to_v"],
        "transformer.bias": "none",
        "transformer.lora_dropout": 0.1,
        "transformer.init_lora_weights": "gaussian",
    }
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(settings)})
    weights = fetch(AdapterLibrary(qwen, tmp_path / "cache"), path)
    layers = weights.layers
    assert layers["transformer.transformer_blocks.0.attn.to_q"].scaling == 6.0
    assert layers["transformer.transformer_blocks.1.attn.to_q"].scaling == 3.0
    pipe = bundled()
    pipe.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="a")
    pipe.set_adapters(["a"], [SCALE])
    pipe.transformer.eval()  # diffusers leaves dropout on
    assert_as_peft_computes(pipe, weights, {"transformer"})


ORIGINAL_NAMES = {
    "flux": {
        "lora_unet_double_blocks_0_img_attn_qkv": (32, 96),
        "lora_unet_double_blocks_0_txt_attn_proj": (32, 32),
        "lora_unet_double_blocks_0_img_mlp_2": (128, 32),
        "lora_unet_single_blocks_0_linear2": (160, 32),
    },
    "wan": {
        "diffusion_model.blocks.0.self_attn.q": (24, 24),
        "diffusion_model.blocks.1.cross_attn.o": (24, 24),
        "diffusion_model.blocks.1.ffn.0": (24, 32),
    },
}
"""Layers as the families' original implementations name them: width in and out."""


@pytest.mark.parametrize("name", ORIGINAL_NAMES)
def test_names_of_the_original_implementations(name: str, tmp_path: Path) -> None:
    pipe, path = family(name)(), tmp_path / "original.safetensors"
    generator, tensors = torch.Generator().manual_seed(3), {}
    for layer, (inner, out) in ORIGINAL_NAMES[name].items():
        tensors[f"{layer}.lora_down.weight"] = torch.randn(4, inner, generator=generator)
        tensors[f"{layer}.lora_up.weight"] = torch.randn(out, 4, generator=generator)
        tensors[f"{layer}.alpha"] = torch.tensor(2.0)
    save_file(tensors, path)
    weights = fetch(AdapterLibrary(pipe, tmp_path / "cache"), path)
    pipe.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="a")
    pipe.set_adapters(["a"], [SCALE])
    assert_as_peft_computes(pipe, weights, {"transformer"})


def test_what_diffusers_adds_without_effect_is_left_out(tmp_path: Path) -> None:
    pipe = family("wan_image_to_video")()
    config = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")}
    wider = type(pipe.transformer)(**{**config, "added_kv_proj_dim": 24})
    pipe.register_modules(transformer=wider)
    path = random_adapter(
        pipe, tmp_path / "a.safetensors", layers=lambda path, _: path.endswith("to_k")
    )
    weights = fetch(AdapterLibrary(pipe, tmp_path / "cache"), path)
    pipe.load_lora_weights(tmp_path, weight_name=path.name, adapter_name="a")
    assert not pipe.transformer.blocks[0].attn2.add_k_proj.lora_B["a"].weight.any()
    assert {path.rpartition(".")[2] for path in weights.layers} == {"to_k"}


def test_a_file_for_both_experts(tmp_path: Path) -> None:
    pipe = family("wan22")()
    high, low, both = (tmp_path / f"{name}.safetensors" for name in ("high", "low", "both"))
    random_adapter(pipe, high, seed=1, alpha=2)
    random_adapter(pipe, low, seed=2, rank=2)
    second = {key.replace("transformer.", "transformer_2."): t for key, t in load_file(low).items()}
    save_file(load_file(high) | second, both)
    weights = fetch(AdapterLibrary(pipe, tmp_path / "cache"), both)
    save_file(load_file(high), high)  # without its alpha, as in the file for both
    pipe.load_lora_weights(tmp_path, weight_name=high.name, adapter_name="a")
    pipe.load_lora_weights(
        tmp_path, weight_name=low.name, adapter_name="a", load_into_transformer_2=True
    )
    pipe.set_adapters(["a"], [SCALE])
    assert_as_peft_computes(pipe, weights, {"transformer", "transformer_2"})


def test_weights_keep_the_files_dtype_and_have_memory_of_their_own(
    qwen: Any, tmp_path: Path
) -> None:
    library = AdapterLibrary(qwen, tmp_path / "cache")
    for dtype in (torch.float16, torch.bfloat16):
        path = random_adapter(qwen, tmp_path / "half.safetensors", dtype=dtype)
        report, weights = library.check("a", path), fetch(library, path)
        for layer in weights.layers.values():
            for tensor in (layer.down, layer.up):
                assert tensor.dtype == dtype
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert weights.num_bytes == report.num_bytes
        double = weights.to("cpu", lambda _: torch.float64)
        assert double.num_bytes == 4 * weights.num_bytes


EXPECTED = {
    "pickle": ("zip archive", "Pickle files are never read"),
    "pickle_renamed": ("zip archive", "Pickle files are never read"),
    "truncated": ("cut short", "complete file"),
    "header_only": ("cut short", "complete file"),
    "garbage": ("100 bytes", "no safetensors file"),
    "endless_header": ("no safetensors file",),
    "empty_file": ("0 bytes", "no safetensors file"),
    "git_lfs_pointer": ("Git LFS pointer",),
    "no_tensors": ("no LoRA weights", "no tensors at all"),
    "no_lora": ("no LoRA weights", "transformer.proj_out.weight"),
    "wrong_prefix": ("none of its", "other.transformer_blocks.0.attn", "such as transformer."),
    "partial": ("of its", "layers match the model", "no.such.layer"),
    "other_architecture": ("another shape", "down (4, ", "another size or architecture"),
    "uneven_ranks": ("ranks don't fit", "rank 5", "up 4"),
    "up_without_down": ("1 layers have up weights without down",),
    "nan": ("1 of its", "NaN", "lora_B"),
    "infinite": ("infinity", "lora_B"),
    "dora": ("DoRA", "lora_magnitude_vector"),
    "lora_bias": ("LoRA with biases", "lora_B.bias"),
    "weight_difference": ("weight differences", "diff_b"),
    "lokr": ("LoKr",),
    "loha": ("LoHa",),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_refused_with_the_reason(
    kind: str, library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    path = broken_adapter(kind, good, tmp_path)
    with pytest.raises(AdapterError) as caught:
        library.check("styl", path)
    text = str(caught.value)
    assert "adapter 'styl' can't be used" in text
    for part in EXPECTED[kind]:
        assert part in text
    assert caught.value.code == "adapter_unusable"


def test_a_good_file_passes(library: AdapterLibrary, good: Path) -> None:
    report = library.check("good", good)
    assert report.layers == {"transformer": 32}
    assert report.modules == [
        "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v",
    ]  # fmt: skip


def refused(library: AdapterLibrary, path: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        library.check("a", path)
    return str(caught.value)


def test_what_is_no_file_is_refused(library: AdapterLibrary, tmp_path: Path) -> None:
    assert "No such file" in refused(library, tmp_path / "gone.safetensors")
    assert "can't be read" in refused(library, tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "is no file" in refused(library, tmp_path / "pipe.safetensors")


def test_headers_of_any_content_are_refused(library: AdapterLibrary, tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    for header in (
        b"{}", b"{", b'{"a": 1}', b'{"a": {"data_offsets": 3}}', b'{"a": {"data_offsets": []}}',
        b'{"x.lora_A.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        b'{"x.lora_A.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 0]},'
        b' "x.lora_B.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 0]}}',
        b"{" * 5000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ):  # fmt: skip
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        refused(library, path)


def test_a_huge_file_is_refused_before_it_is_read(
    library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "huge.safetensors"
    path.write_bytes(good.read_bytes())
    os.truncate(path, 1 << 42)
    assert "damaged: its tensors end at byte" in refused(library, path)
    side = (MAX_BYTES >> 2) // 4
    end = 4 * 4 * side
    header = json.dumps(
        {
            "x.lora_A.weight": {"dtype": "F32", "shape": [4, side], "data_offsets": [0, end]},
            "x.lora_B.weight": {"dtype": "F32", "shape": [side, 4], "data_offsets": [end, 2 * end]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 2 * end)
    assert "its file has 8.0 GiB" in refused(library, path)


def test_settings_that_are_no_plain_lora_are_refused(
    library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    path, targets = tmp_path / "odd.safetensors", '"transformer.target_modules": ["to_q"]'
    for settings, reason in (
        ("no json", "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"transformer.use_dora": true}', "use_dora"),
        ('{"transformer.init_lora_weights": "pissa"}', "pissa"),
        ('{"transformer.peft_type": "LOHA"}', "LOHA"),
        ('{"transformer.nonsense": 1}', "nonsense"),
        (f'{{{targets}, "transformer.r": 3}}', "its settings say rank 3, its weights 4"),
        (f'{{{targets}, "transformer.r": 4, "transformer.lora_alpha": NaN}}', "a scale of nan"),
    ):
        save_file(load_file(good), path, {"lora_adapter_metadata": settings})
        assert reason in refused(library, path)


def test_layers_that_the_converter_drops_are_missed(tmp_path: Path) -> None:
    pipe = family("sdxl")()
    path = random_adapter(pipe, tmp_path / "a.safetensors", components=("unet",), format="kohya")
    tensors = load_file(path)
    stem = next(iter(tensors)).partition(".")[0]
    lost = "lora_unet_middle_block_1_proj_in"  # diffusers drops old names among new ones
    for side in ("lora_down", "lora_up"):
        tensors[f"{lost}.{side}.weight"] = tensors[f"{stem}.{side}.weight"].clone()
    save_file(tensors, path)
    text = refused(AdapterLibrary(pipe, tmp_path / "cache"), path)
    count = len(tensors) // 2
    assert f"{count - 1} of its {count} layers match" in text
    assert lost in text


def test_layers_that_are_no_linear_ones_are_refused(
    library: AdapterLibrary, qwen: Any, tmp_path: Path
) -> None:
    norm = next(p for p, m in qwen.transformer.named_modules() if type(m).__name__ == "RMSNorm")
    stem, path = f"transformer.{norm}", tmp_path / "norm.safetensors"
    weights = {"lora_A.weight": torch.ones(2, 8), "lora_B.weight": torch.ones(8, 2)}
    save_file({f"{stem}.{side}": tensor for side, tensor in weights.items()}, path)
    assert f"changes {stem}, which is a RMSNorm" in refused(library, path)


def test_a_pipeline_without_a_loader(good: Path, tmp_path: Path) -> None:
    library = AdapterLibrary(family("pixart_sigma")(), tmp_path / "cache")
    assert "PixArtSigmaPipeline has no loader for LoRA adapters" in refused(library, good)


def test_the_pipeline_other_threads_and_random_numbers_are_left_alone(
    qwen: Any, good: Path, tmp_path: Path
) -> None:
    registered = nn.Module.register_parameter
    seen: list[bool] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(nn.Module.register_parameter is registered)
            seen.append(nn.Linear(1, 1).weight.device.type == "cpu")

    before = [(name, id(module)) for name, module in qwen.transformer.named_modules()]
    library = AdapterLibrary(qwen, tmp_path / "cache")
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        while not seen:
            pass
        library.check("a", good)
    finally:
        done.set()
        watcher.join()
    assert all(seen)
    state = torch.get_rng_state()
    AdapterLibrary(qwen, tmp_path / "other").check("a", good)
    assert torch.equal(state, torch.get_rng_state())
    assert [(name, id(module)) for name, module in qwen.transformer.named_modules()] == before
    assert all(parameter.device.type == "cpu" for parameter in qwen.transformer.parameters())


def stored_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache").rglob("*.safetensors")
    return path


def same(one: AdapterWeights, other: AdapterWeights) -> bool:
    return list(one.layers) == list(other.layers) and all(
        torch.equal(a.down, b.down) and torch.equal(a.up, b.up) and a.scaling == b.scaling
        for a, b in zip(one.layers.values(), other.layers.values(), strict=True)
    )


def test_content_outlives_its_file(qwen: Any, good: Path, tmp_path: Path) -> None:
    library = AdapterLibrary(qwen, tmp_path / "cache")
    report, weights = library.check("a", good), fetch(library, good)
    registered = Adapter("a", str(good), report.digest)
    random_adapter(qwen, good, seed=9)
    assert same(library.fetch(registered), weights)
    good.unlink()
    again = AdapterLibrary(qwen, tmp_path / "cache")
    assert same(again.fetch(registered), weights)
    stored_file(tmp_path).unlink()
    with pytest.raises(AdapterError, match="No such file"):
        again.fetch(registered)


def test_a_changed_file_is_no_replacement_for_lost_content(
    library: AdapterLibrary, qwen: Any, good: Path, tmp_path: Path
) -> None:
    registered = Adapter("a", str(good), library.check("a", good).digest)
    stored_file(tmp_path).unlink()
    random_adapter(qwen, good, seed=9)
    with pytest.raises(AdapterError, match="has changed since it was registered"):
        library.fetch(registered)


def test_the_store_answers_for_a_content_of_any_name(
    library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    first = library.check("a", good)
    os.utime(stored_file(tmp_path), (1, 1))
    copied = good.rename(tmp_path / "renamed.safetensors")
    assert library.check("b", copied) == first
    assert stored_file(tmp_path).stat().st_mtime > 1, "it counts as used"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-8],
        lambda data: data[:40],
        lambda _: b"",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data.replace(b'"version":"2"', b'"version":"0"'),
        lambda data: data.replace(b'\\": 1.0', b'\\": 7.0', 1),
    ],
    ids=["cut", "header", "empty", "bit", "version", "scaling"],
)
def test_a_damaged_store_file_is_made_anew(
    damage: Callable[[bytes], bytes], library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    report, weights = library.check("a", good), fetch(library, good)
    path = stored_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    assert same(library.fetch(Adapter("a", str(good), report.digest)), weights)
    path.write_bytes(damage(whole))
    assert library.check("a", good) == report
    assert same(fetch(library, good), weights)
    assert path.stat().st_size == len(whole)


def test_it_works_without_a_place_for_the_store(
    qwen: Any, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    library = AdapterLibrary(qwen, tmp_path / "file")
    kept = fetch(AdapterLibrary(qwen, tmp_path / "cache"), good)
    assert same(fetch(library, good), kept)
    assert same(fetch(library, good), kept)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the adapter store is done without" in warning.getMessage()


def test_models_of_one_shape_share_what_is_stored_and_others_do_not(
    qwen: Any, library: AdapterLibrary, good: Path, tmp_path: Path
) -> None:
    report = library.check("a", good)
    finetune = bundled()
    with torch.no_grad():
        for parameter in finetune.transformer.parameters():
            parameter.add_(1)
    good.unlink()
    registered = Adapter("a", str(good), report.digest)
    weights = AdapterLibrary(finetune, tmp_path / "cache").fetch(registered)
    assert same(weights, library.fetch(registered))
    with pytest.raises(AdapterError):
        AdapterLibrary(family("flux")(), tmp_path / "cache").fetch(registered)


def test_sweep_keeps_what_was_used_last(
    library: AdapterLibrary, qwen: Any, good: Path, tmp_path: Path
) -> None:
    digests = []
    for index in range(3):
        random_adapter(qwen, good, seed=index)
        digests.append(library.check("a", good).digest)
        (path,) = (tmp_path / "cache").rglob(f"{digests[-1]}.safetensors")
        os.utime(path, (100 + index, 100 + index))
    size = path.stat().st_size
    library.fetch(Adapter("a", str(good), digests[0]))  # the oldest is the one used last now
    part = path.with_name(".left.part")
    part.write_bytes(b"half")
    os.utime(part, (1, 1))
    AdapterLibrary(qwen, tmp_path / "cache", limit_bytes=2 * size)
    assert {p.name for p in path.parent.iterdir()} == {
        f"{digests[index]}.safetensors" for index in (0, 2)
    }
    AdapterStore(None, "x").sweep()
    AdapterStore(tmp_path / "nowhere", "x").sweep()


def test_bundled_adapters(library: AdapterLibrary) -> None:
    for path in sorted(ADAPTER_DIR.glob("*.safetensors")):
        report = library.check(path.stem, path)
        assert report.format == "peft"
        assert set(report.layers) == {"transformer"}
        assert "to_out.0" in report.modules
        assert "to_q" in report.modules
