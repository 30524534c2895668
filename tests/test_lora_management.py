"""Adapters loaded, listed, pinned and unloaded while an engine runs, over a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import BROKEN, broken_adapter, random_adapter
from diffusers import QwenImagePipeline
from raw_client import RawClient
from test_cli import run_command

from omni_engine import (
    AsyncOmniClient,
    DiffusionOutput,
    LoRAInfo,
    LoRARequest,
    Omni,
    OmniClient,
    OmniDiffusionSamplingParams,
)
from omni_engine.engine.handles import RequestHandle
from omni_engine.protocol.adapters import AdapterReport
from omni_engine.protocol.errors import (
    AdapterError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnknownAdapterError,
    UnknownModelError,
)
from omni_engine.protocol.lora_info import LoRAHolder, LoRAUse
from omni_engine.stages.bundled import MODEL_DIR

PROMPT = "a large red square on a white background"
PINNED = 2
"""Adapters that can be pinned with ``max_loras`` 3."""

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one folder from which adapters may be loaded."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def omni(start_engine: Callable[..., Omni], folder: Path) -> Omni:
    """One worker, one batch at a time, the bundled styles and room for two more."""
    return start_engine(
        max_num_seqs=4,
        threads=1,
        lora_dirs=[folder],
        lora_modules=[
            {"name": "outline", "path": "bundled:outline"},
            {"name": "night", "path": "bundled:night"},
        ],
        default_lora={"name": "outline", "scale": 0.5},
        max_loras=3,
    )


@pytest.fixture(scope="module")
def pipe() -> QwenImagePipeline:
    return QwenImagePipeline.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def make(pipe: QwenImagePipeline, folder: Path) -> Make:
    """Write an adapter into the folder; options are those of ``random_adapter``."""

    def write(name: str, seed: int, **options: Any) -> Path:
        path = folder / f"{name}.safetensors"
        new = random_adapter(pipe, folder / f"{name}.new", seed=seed, **options)
        return new.replace(path)

    return write


@pytest.fixture(autouse=True)
def forget_everything(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unload after every test what it has loaded."""
    yield
    if "omni" in request.fixturenames:
        omni: Omni = request.getfixturevalue("omni")
        for info in omni.loras():
            if info.name not in ("outline", "night"):
                omni.unload_lora(info.name)
            elif info.pin:
                omni.pin_lora(info.name, False)


def params(*asked: str | LoRARequest, **fields: Any) -> OmniDiffusionSamplingParams:
    """Parameters of a small quick picture under adapters; the bare model if none is named."""
    loras = [LoRARequest(one) if isinstance(one, str) else one for one in asked]
    small = {"height": 32, "width": 32, "num_inference_steps": 2, "seed": 3}
    return OmniDiffusionSamplingParams(**{**small, "lora_request": loras, **fields})


def draw(omni: Omni, *asked: str | LoRARequest, **fields: Any) -> DiffusionOutput:
    (output,) = omni.generate(PROMPT, params(*asked, **fields))
    return output.raise_for_error()


def pixels(output: DiffusionOutput) -> np.ndarray[Any, Any]:
    assert output.images is not None
    return output.images[0]


def applied(output: DiffusionOutput) -> list[tuple[str, str, float]]:
    return [(lora.name, lora.digest, lora.scale) for lora in output.applied_loras]


def named(omni: Omni | OmniClient, name: str) -> LoRAInfo:
    (info,) = [info for info in omni.loras() if info.name == name]
    return info


def until(omni: Omni, what: str, holds: Callable[[], bool], timeout_s: float = 60) -> None:
    """Ask the engine again and again until something holds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come about: {omni.loras()}"


@contextmanager
def busy(omni: Omni, *asked: str | LoRARequest) -> Iterator[RequestHandle]:
    """Keep the worker at one request that is far from its end, for as long as this is entered."""
    handle = omni.submit(PROMPT, params(*asked, num_inference_steps=1000))
    try:
        assert any(event.step for event in handle.events()), "it ended early"
        yield handle
        assert not handle.done
    finally:
        handle.abort()
        assert handle.result(60).aborted


# -- loading


def test_a_loaded_adapter_is_used_listed_and_gone_after_unloading(omni: Omni, make: Make) -> None:
    path = make("fresh", seed=1, rank=3)
    info = omni.load_lora("fresh", "fresh.safetensors", default_scale=0.5)
    assert (info.name, info.path, info.state, info.error) == ("fresh", str(path), "ready", None)
    assert (info.model, info.default_scale, info.pin, info.preload) == (
        "bundled",
        0.5,
        False,
        False,
    )
    assert info.report is not None
    assert (info.report.format, info.report.ranks) == ("peft", [3])
    assert set(info.report.layers) == {"transformer"}
    assert info.report.digest == info.digest
    assert (info.requests, info.last_used_s) == (LoRAUse(0, 0, 0), None)
    output = draw(omni, "fresh")
    assert applied(output) == [("fresh", info.digest, 0.5)]
    assert (pixels(output) != pixels(draw(omni))).any()
    used = named(omni, "fresh")
    assert used.requests == LoRAUse(1, 0, 0)
    assert used.last_used_s is not None
    until(omni, "its being held", lambda: any(h.device for h in named(omni, "fresh").held))
    gone = omni.unload_lora("fresh")
    assert (gone.name, gone.requests.waiting, gone.requests.running) == ("fresh", 0, 0)
    assert "fresh" not in [info.name for info in omni.loras()]
    with pytest.raises(UnknownAdapterError, match="fresh"):
        draw(omni, "fresh")
    with pytest.raises(UnknownAdapterError, match="fresh") as caught:
        omni.unload_lora("fresh")
    assert caught.value.field == "name"


def test_loading_from_a_folder_and_by_absolute_path(omni: Omni, make: Make, folder: Path) -> None:
    inside = folder / "one"
    inside.mkdir(exist_ok=True)
    shutil.copy(make("x", seed=2), inside / "pytorch_lora_weights.safetensors")
    relative, absolute = omni.load_lora("a", "one"), omni.load_lora("b", inside)
    assert relative.path == absolute.path == str(inside / "pytorch_lora_weights.safetensors")
    assert relative.digest == absolute.digest


def test_loading_what_comes_with_the_bundled_model(omni: Omni) -> None:
    info = omni.load_lora("dark", "bundled:night")
    assert info.digest == named(omni, "night").digest
    with pytest.raises(OmniError, match=r"nigth.*bundled:night"):
        omni.load_lora("darker", "bundled:nigth")


@pytest.mark.parametrize(
    "place",
    ["../outside.safetensors", "link.safetensors", "linked/outside.safetensors", "ABSOLUTE",
     "one/../../outside.safetensors", "/proc/self/mem", "/dev/zero"],
)  # fmt: skip
def test_paths_outside_the_folders_are_refused(
    omni: Omni, make: Make, folder: Path, place: str
) -> None:
    outside = folder.parent / "outside.safetensors"
    shutil.copy(make("x", seed=2), outside)
    (folder / "one").mkdir(exist_ok=True)
    for link, target in (("link.safetensors", outside), ("linked", folder.parent)):
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(target)
    with pytest.raises(InvalidRequestError, match="lora_dirs") as caught:
        omni.load_lora("escaped", place.replace("ABSOLUTE", str(outside)))
    assert caught.value.field == "path"
    assert str(folder) in str(caught.value.expected)
    assert [info.name for info in omni.loras()] == ["outline", "night"]


def test_a_link_that_stays_inside_is_followed(omni: Omni, make: Make, folder: Path) -> None:
    path = make("x", seed=2)
    link = folder / "inner.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    assert omni.load_lora("inner", "inner.safetensors").path == str(path)


def test_without_folders_nothing_can_be_loaded(pattern_engine: Omni, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(InvalidRequestError, match="lora_dirs"):
        pattern_engine.load_lora("x", tmp_path / "x.safetensors")
    assert pattern_engine.loras() == []


BROKEN_WORDS = {
    "pickle": "not a safetensors file",
    "pickle_renamed": "zip archive, as torch.save writes pickles",
    "truncated": "cut short",
    "header_only": "cut short",
    "garbage": "no safetensors file",
    "endless_header": "no safetensors file",
    "empty_file": "no safetensors file",
    "git_lfs_pointer": "Git LFS pointer",
    "no_tensors": "no tensors at all",
    "no_lora": "no LoRA weights",
    "wrong_prefix": "none of its",
    "partial": "layers match the model; without a match",
    "other_architecture": "shape",
    "uneven_ranks": "ranks don't fit",
    "up_without_down": "up weights without down",
    "nan": "NaN or infinity",
    "infinite": "NaN or infinity",
    "dora": "DoRA",
    "lora_bias": "LoRA with biases",
    "weight_difference": "weight differences",
    "lokr": "LoKr",
    "loha": "LoHa",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_in_words_and_registers_nothing(
    omni: Omni, make: Make, folder: Path, kind: str
) -> None:
    path = broken_adapter(kind, make("x", seed=2), folder)
    with pytest.raises(OmniError) as caught:
        omni.load_lora("broken", path.name)
    assert caught.value.code in ("adapter_unusable", "invalid_request")
    assert BROKEN_WORDS[kind] in str(caught.value)
    assert (caught.value.field, caught.value.value) == ("path", path.name)
    assert [info.name for info in omni.loras()] == ["outline", "night"]
    with pytest.raises(UnknownAdapterError):
        draw(omni, "broken")


def test_a_file_that_is_not_there_is_refused(omni: Omni) -> None:
    with pytest.raises(OmniError, match=r"nowhere\.safetensors"):
        omni.load_lora("nowhere", "nowhere.safetensors")


def test_a_name_in_use_is_refused_unless_it_is_to_be_replaced(omni: Omni, make: Make) -> None:
    make("first", seed=1)
    make("second", seed=2)
    first = omni.load_lora("mine", "first.safetensors")
    with pytest.raises(InvalidRequestError, match="mine") as caught:
        omni.load_lora("mine", "second.safetensors")
    assert caught.value.field == "name"
    assert named(omni, "mine").digest == first.digest
    second = omni.load_lora("mine", "second.safetensors", default_scale=0.25, replace=True)
    assert second.digest != first.digest
    assert applied(draw(omni, "mine")) == [("mine", second.digest, 0.25)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("name", name) for name in ("", " x", "x" * 201, 5)),
        *(("path", path) for path in ("", 5, "x" * 5000, "a\0b")),
        *(("default_scale", scale) for scale in ("1", 101, math.nan, True)),
        ("pin", 1),
        ("preload", "yes"),
        ("replace", 0),
        ("model", 5),
    ],
)
def test_fields_of_load_lora_are_checked_on_arrival(
    omni: Omni, make: Make, field: str, value: object
) -> None:
    make("x", seed=2)
    body: dict[str, Any] = {"name": "x", "path": "x.safetensors", field: value}
    with RawClient(omni.endpoint) as raw:
        answer = raw.call("load_lora", **body)
    assert answer["type"] == "error", answer
    assert answer["error"]["field"] == field
    assert [info.name for info in omni.loras()] == ["outline", "night"]


def test_an_unknown_model_is_refused(omni: Omni) -> None:
    for call in (
        lambda: omni.loras("bundeld"),
        lambda: omni.load_lora("x", "x", model="bundeld"),
        lambda: omni.unload_lora("night", model="bundeld"),
        lambda: omni.pin_lora("night", model="bundeld"),
    ):
        with pytest.raises(UnknownModelError, match="bundled"):
            call()


def test_a_request_sent_right_after_the_load_waits_for_the_verdict(omni: Omni, make: Make) -> None:
    make("soon", seed=5)
    request = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 1,
        "lora_request": {"name": "soon"},
    }
    with RawClient(omni.endpoint) as raw:
        load = raw.send("load_lora", name="soon", path="soon.safetensors")
        raw.submit({"request_id": "early", "prompt": PROMPT, "sampling_params": request})
        output = raw.output("early")
        assert output["error"] is None
        loaded = raw.reply(load)["lora"]
    assert [lora["digest"] for lora in output["applied_loras"]] == [loaded["digest"]]


# -- replacing and unloading under traffic


def test_requests_taken_in_before_a_replacement_keep_the_old_content(
    omni: Omni, make: Make
) -> None:
    make("style", seed=10)
    old = omni.load_lora("style", "style.safetensors")
    old_pixels = pixels(draw(omni, "style"))
    running = omni.submit(PROMPT, params("style", num_inference_steps=40))
    assert any(event.step for event in running.events())
    running_alone = params("style", num_inference_steps=40)
    with busy(omni, "style"):
        waiting = omni.submit(PROMPT, params("style"))
        assert next(waiting.events()).status == "waiting", "the engine has looked at the old file"
        make("style", seed=11)
        new = omni.load_lora("style", "style.safetensors", replace=True)
        assert new.digest != old.digest
        later = omni.submit(PROMPT, params("style"))
    kept, fresh = waiting.result(60).raise_for_error(), later.result(60).raise_for_error()
    assert applied(kept) == [("style", old.digest, 1.0)]
    np.testing.assert_array_equal(pixels(kept), old_pixels)
    assert applied(fresh) == [("style", new.digest, 1.0)]
    assert (pixels(fresh) != old_pixels).any()
    first = running.result(60).raise_for_error()
    assert applied(first) == [("style", old.digest, 1.0)]
    make("style", seed=10)
    back = omni.load_lora("style", "style.safetensors", replace=True)
    assert back.digest == old.digest
    (again,) = omni.generate(PROMPT, running_alone)
    np.testing.assert_array_equal(pixels(again.raise_for_error()), pixels(first))


def test_a_file_replaced_on_disk_is_noticed_and_a_broken_one_does_no_harm(
    omni: Omni, make: Make, folder: Path
) -> None:
    path = make("edited", seed=20)
    old = omni.load_lora("edited", "edited.safetensors")
    before = draw(omni, "edited")
    make("edited", seed=21)
    after = draw(omni, "edited")
    new = named(omni, "edited")
    assert applied(after) == [("edited", new.digest, 1.0)]
    assert new.digest != old.digest
    assert (pixels(after) != pixels(before)).any()
    broken_adapter("nan", path, folder).replace(path)
    still = draw(omni, "edited")
    assert applied(still) == applied(after)
    np.testing.assert_array_equal(pixels(still), pixels(after))
    shown = named(omni, "edited")
    assert (shown.state, shown.digest) == ("ready", new.digest)
    assert shown.error is not None
    assert "nan" in str(shown.error).lower()
    path.unlink()
    np.testing.assert_array_equal(pixels(draw(omni, "edited")), pixels(after))
    make("edited", seed=20)
    np.testing.assert_array_equal(pixels(draw(omni, "edited")), pixels(before))
    assert named(omni, "edited").error is None


def test_unloading_lets_waiting_and_running_requests_end(omni: Omni, make: Make) -> None:
    make("leaving", seed=30)
    digest = omni.load_lora("leaving", "leaving.safetensors").digest
    expected = pixels(draw(omni, "leaving"))
    with busy(omni, "leaving"):
        waiting = [omni.submit(PROMPT, params("leaving")) for _ in range(2)]
        listed = named(omni, "leaving").requests
        assert listed.total == 4
        assert listed.waiting + listed.running == 3
        left = omni.unload_lora("leaving").requests
        assert left.waiting + left.running == 3
        assert left.running >= 1
        with pytest.raises(UnknownAdapterError):
            draw(omni, "leaving")
    for handle in waiting:
        output = handle.result(60).raise_for_error()
        assert applied(output) == [("leaving", digest, 1.0)]
        np.testing.assert_array_equal(pixels(output), expected)
    until(omni, "its being dropped", lambda: holds_only_what_has_a_name(omni))


def holds_only_what_has_a_name(omni: Omni) -> bool:
    """Whether every content in the worker's memory is a registered one."""
    (worker,) = omni.status()["stages"][0]["workers"]
    known = omni.loras()
    return all(
        worker["adapters"][tier]
        == len({i.digest for i in known for h in i.held if getattr(h, tier)})
        for tier in ("device", "host")
    )


def test_the_default_adapter_can_not_be_unloaded(omni: Omni) -> None:
    with pytest.raises(InvalidRequestError, match="default_lora"):
        omni.unload_lora("outline")
    (output,) = omni.generate(PROMPT, params(lora_request=None))
    assert [lora.name for lora in output.raise_for_error().applied_loras] == ["outline"]


# -- memory


def test_two_names_of_one_content_share_memory_and_batches(omni: Omni, make: Make) -> None:
    path = make("twin", seed=40)
    shutil.copy(path, path.with_name("copy.safetensors"))
    one = omni.load_lora("one", "twin.safetensors")
    other = omni.load_lora("other", "copy.safetensors")
    assert one.digest == other.digest
    outputs = omni.generate([PROMPT] * 2, [params("one"), params("other")])
    assert [applied(output.raise_for_error())[0][0] for output in outputs] == ["one", "other"]
    assert [output.metrics.max_batch_size for output in outputs] == [2, 2]
    np.testing.assert_array_equal(pixels(outputs[0]), pixels(outputs[1]))
    until(omni, "its being held", lambda: named(omni, "one").held != ())
    assert named(omni, "one").held == named(omni, "other").held
    assert holds_only_what_has_a_name(omni), "one content is in memory once"
    omni.unload_lora("one")
    assert applied(draw(omni, "other")) == [("other", one.digest, 1.0)]


def test_one_name_at_two_scales_is_two_identities(omni: Omni) -> None:
    asked = [params(LoRARequest("night", scale)) for scale in (1.0, 0.5)]
    outputs = omni.generate([PROMPT] * 2, asked)
    assert [output.raise_for_error().metrics.max_batch_size for output in outputs] == [1, 1]
    assert [applied(output)[0][2] for output in outputs] == [1.0, 0.5]
    assert (pixels(outputs[0]) != pixels(outputs[1])).any()


def test_one_name_at_two_scales_shares_a_mixed_batch(start_own_engine: Callable[..., Omni]) -> None:
    omni = start_own_engine(max_num_seqs=4, threads=1, mixed_lora=True)
    scales = [params(LoRARequest("night", scale)) for scale in (1.0, 0.5)]
    alone = [pixels(omni.generate(PROMPT, one)[0].raise_for_error()) for one in scales]
    outputs = omni.generate([PROMPT] * 3, [*scales, params()])
    assert [output.raise_for_error().metrics.max_batch_size for output in outputs] == [3, 3, 3]
    for output, expected in zip(outputs, alone, strict=False):
        assert np.abs(pixels(output).astype(int) - expected).max() <= 1
    assert applied(outputs[2]) == []


def test_pins_keep_adapters_on_the_device_and_leave_room(omni: Omni, make: Make) -> None:
    names = ["a", "b", "c", "d"]
    for seed, name in enumerate(names, 50):
        make(name, seed=seed)
        omni.load_lora(name, f"{name}.safetensors", pin=name == "a")
    assert omni.pin_lora("b").pin
    assert [named(omni, name).pin for name in names] == [True, True, False, False]
    with pytest.raises(LimitExceededError, match=f"at most {PINNED} pinned") as caught:
        omni.pin_lora("c")
    assert caught.value.field == "pin"
    with pytest.raises(LimitExceededError, match=f"at most {PINNED} pinned"):
        omni.load_lora("e", "d.safetensors", pin=True)
    for name in (*names, "c", "d", "night", "outline"):
        draw(omni, name)
    until(omni, "the last one's being held", lambda: on_device(omni, "outline"))
    assert on_device(omni, "a")
    assert on_device(omni, "b")
    assert not omni.pin_lora("a", False).pin
    assert omni.pin_lora("c").pin
    with pytest.raises(UnknownAdapterError, match="nigth") as caught:
        omni.pin_lora("nigth")
    assert caught.value.field == "name"


def on_device(omni: Omni, name: str) -> bool:
    return any(holder.device for holder in named(omni, name).held)


def test_preloaded_adapters_are_held_before_anybody_asks(omni: Omni, make: Make) -> None:
    make("ahead", seed=60)
    assert omni.load_lora("ahead", "ahead.safetensors", preload=True).preload
    until(omni, "its being held", lambda: named(omni, "ahead").held != ())
    assert named(omni, "ahead").requests.total == 0


# -- other ways to ask


def test_the_asynchronous_client(omni: Omni, make: Make) -> None:
    make("awaited", seed=70)

    async def manage() -> None:
        async with AsyncOmniClient(omni.endpoint) as client:
            info = await client.load_lora("awaited", "awaited.safetensors", timeout_s=60)
            assert info.state == "ready"
            assert (await client.pin_lora("awaited")).pin
            assert not (await client.pin_lora("awaited", False)).pin
            listed = await client.loras()
            assert [one.name for one in listed] == ["outline", "night", "awaited"]
            with pytest.raises(InvalidRequestError, match="awaited"):
                await client.load_lora("awaited", "awaited.safetensors")
            assert (await client.unload_lora("awaited")).name == "awaited"

    asyncio.run(manage())


def test_the_command_line(omni: Omni, make: Make, tmp_path: Path) -> None:
    make("typed", seed=80, rank=5)
    at = ["--connect", omni.endpoint]
    loaded = run_command("loras", "load", "typed", "typed.safetensors", "--scale", "-0.5", *at)
    assert (loaded.code, loaded.err) == (0, "")
    assert loaded.out.startswith("typed is ready: ")
    assert "rank 5, peft" in loaded.out
    shown = run_command("loras", *at)
    (line,) = [line for line in shown.out.splitlines() if "typed" in line]
    for text in ("ready", "-0.5", "rank 5", "never", "no", named(omni, "typed").digest[:16]):
        assert text in line
    listed = json.loads(run_command("loras", "list", "--json", *at).out)
    assert [LoRAInfo.from_wire(one).name for one in listed] == ["outline", "night", "typed"]
    assert run_command("loras", "pin", "typed", *at).out == "typed is pinned\n"
    pinned = json.loads(run_command("loras", "unpin", "typed", "--json", *at).out)
    assert (pinned["name"], pinned["pin"]) == ("typed", False)
    drawn = run_command("generate", PROMPT, "-o", str(tmp_path), "--steps", "1", "--json",
                        "--lora", "typed", "--lora", "night:0.5", *at)  # fmt: skip
    (item,) = json.loads(drawn.out)["results"]
    scales = {lora["name"]: lora["scale"] for lora in item["applied_loras"]}
    assert scales == {"typed": -0.5, "night": 0.5}
    again = run_command("loras", "load", "typed", "typed.safetensors", *at)
    assert (again.code, again.out) == (2, "")
    assert "[invalid_request]" in again.err
    outside = run_command("loras", "load", "escaped", "../x.safetensors", *at)
    assert outside.code == 2
    assert "lora_dirs" in outside.err
    gone = run_command("loras", "unload", "typed", *at)
    assert gone.out == "typed is unloaded; 0 waiting and 0 running requests use it to their end\n"
    unknown = run_command("loras", "unload", "typed", *at)
    assert (unknown.code, unknown.out) == (2, "")
    assert "[unknown_adapter]" in unknown.err


def test_an_adapter_of_the_working_directory_is_named_with_a_dot(
    omni: Omni, make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("here", seed=90)
    monkeypatch.chdir(folder)
    loaded = run_command("loras", "load", "here", "./here.safetensors", "--json", "--connect",
                         omni.endpoint)  # fmt: skip
    assert json.loads(loaded.out)["path"] == str(folder / "here.safetensors")


def test_what_is_told_of_an_adapter_crosses_the_wire_unchanged() -> None:
    report = AdapterReport("d", "kohya", {"unet": 3}, [4, 8], ["to_q"], 100)
    error = AdapterError("bad", field="lora_modules", value="x")
    whole = LoRAInfo("m", "n", "/p", "ready", error, "d", 0.5, True, False, report,
                     LoRAUse(3, 1, 1), 2.5, (LoRAHolder("w", True, False),))  # fmt: skip
    bare = LoRAInfo("m", "n", "/p", "checking", None, None, 1.0, False, True, None, LoRAUse(),
                    None, ())  # fmt: skip
    assert LoRAInfo.from_wire(bare.to_wire()) == bare
    back = LoRAInfo.from_wire({**whole.to_wire(), "added_later": 1})
    assert str(back.error) == str(error)
    assert back.to_wire() == whole.to_wire()
