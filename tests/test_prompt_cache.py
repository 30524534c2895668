"""Text encoders: newcomers share their forwards, and prompts that come again are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_stable_diffusion

from omni_engine.worker.adapter_access import NoAdapters
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.cooperative import CooperativeCall, CooperativeStepper
from omni_engine.worker.fusion import Call
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.process_state import TorchModes
from omni_engine.worker.prompt_cache import PromptCache

MODULE = torch.nn.Identity()


def call(tokens: list[int], **more: Any) -> Call:
    ids = torch.tensor([tokens])
    return Call(MODULE, {"input_ids": ids, **more}, 1, {}, TorchModes.current())


def test_the_least_recently_used_goes_first() -> None:
    cache = PromptCache(2)
    first, second, third = (cache.key(call([n]), None) for n in range(3))
    cache.put(first, (torch.ones(1),))
    cache.put(second, (torch.ones(2),))
    assert cache.get(first) is not None
    cache.put(third, (torch.ones(3),))
    assert cache.get(second) is None
    assert cache.get(first)[0].shape == (1,)
    assert (cache.hits, cache.misses) == (2, 1)


def test_a_key_tells_tokens_options_and_adapters_apart() -> None:
    cache = PromptCache(8)
    mask = torch.ones(1, 2)
    keys = {
        cache.key(call([1, 2]), None),
        cache.key(call([1, 3]), None),
        cache.key(call([1, 2]), ("digest", 0.5)),
        cache.key(call([1, 2], attention_mask=mask), None),
        cache.key(call([1, 2], attention_mask=mask * 0), None),
        cache.key(call([1, 2], output_hidden_states=True), None),
    }
    assert len(keys) == 6
    assert cache.key(call([1, 2]), None) in keys


def test_what_is_remembered_belongs_to_nobody() -> None:
    """Not to who put it in, not to who got it, not to the batch it is a part of."""
    cache, key = PromptCache(8), PromptCache(8).key(call([1]), None)
    batch = torch.zeros(1000, 4)
    part = batch[:1]
    cache.put(key, {"last": part, "all": (part,)})
    part += 1
    got = cache.get(key)
    assert got["last"].untyped_storage().nbytes() == 16
    got["last"] += 5
    assert float(cache.get(key)["all"][0].sum()) == 0


def test_memory_is_bounded_in_bytes_and_zero_keeps_nothing() -> None:
    cache = PromptCache(100, max_bytes=1000)
    for tokens in range(10):
        cache.put(cache.key(call([tokens]), None), torch.zeros(100))
    assert len(cache) == 2
    assert PromptCache(0).key(call([1]), None) is None
    cache.put(cache.key(call([77]), None), object())
    assert cache.get(cache.key(call([77]), None)) is None


@pytest.fixture(scope="module")
def sd() -> Any:
    torch.set_num_threads(1)
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(dtype=torch.float64)


def run(sd: Any, prompts: list[str], stepper: CooperativeStepper) -> list[torch.Tensor]:
    calls: list[CooperativeCall] = []
    for seed, prompt in enumerate(prompts):
        arguments = {
            "prompt": prompt,
            "negative_prompt": "ugly",
            "height": 16,
            "width": 16,
            "num_inference_steps": 2,
            "output_type": "pt",
            "generator": torch.Generator().manual_seed(seed),
        }
        calls.append(stepper.start(arguments, seed, str(seed)))
    stepper.run()
    for done in calls:
        if done.error is not None:
            raise done.error
    return [done.result.images for done in calls]


def test_encoders_and_decoders_are_shared_and_exact(sd: Any) -> None:
    prompts = ["a cat", "a dog", "a small red circle", "a cat"]
    forwards = {"encode": 0, "decode": 0}
    encoded: list[int] = []

    def count(name: str) -> Any:
        return lambda *_: forwards.update({name: forwards[name] + 1})

    hooks = [
        sd.text_encoder.encoder.register_forward_hook(count("encode")),
        sd.vae.decoder.register_forward_hook(count("decode")),
        sd.text_encoder.encoder.register_forward_hook(lambda *a: encoded.append(len(a[2][0]))),
    ]
    alone = make_stepper(sd, FusionReport(False, ""))
    expected = [run(sd, [prompt], alone)[0] for prompt in prompts[:1]]
    alone.close()
    separate = dict(forwards)
    forwards.update(encode=0, decode=0)
    encoded.clear()
    shared = make_stepper(sd, FusionReport(True, ""), prompt_cache_size=8)
    first = run(sd, prompts, shared)
    assert separate == {"encode": 2, "decode": 1}, "for one request"
    assert forwards == {"encode": 2, "decode": 1}, "for all four"
    assert encoded == [3, 1], "rows: three different prompts, one negative prompt"
    second = run(sd, prompts, shared)
    assert forwards == {"encode": 2, "decode": 2}, "nothing is encoded twice"
    shared.close()
    for hook in hooks:
        hook.remove()
    for once, again in zip(first, second, strict=True):
        assert torch.equal(once, again)
    torch.testing.assert_close(first[0], expected[0], rtol=0, atol=1e-12)
    assert not torch.equal(first[0], first[3]), "equal prompts, but other seeds"


class OneAdapter(NoAdapters):
    """Tells of an adapter that has a part for one component."""

    component = ""

    def identity(self, request_id: str | None, component: str | None) -> Any:
        return (("digest", 1.0),) if component == self.component else None


def test_an_adapter_of_the_encoder_has_prompts_of_its_own(sd: Any) -> None:
    adapters = OneAdapter()
    stepper = make_stepper(sd, FusionReport(True, ""), prompt_cache_size=8, adapters=adapters)
    run(sd, ["a cat"], stepper)
    before = stepper.prompts.misses
    adapters.component = "unet"
    run(sd, ["a cat"], stepper)
    assert stepper.prompts.misses == before, "it does not change the encoder"
    adapters.component = "text_encoder"
    run(sd, ["a cat"], stepper)
    assert stepper.prompts.misses == before + 2
    adapters.component = ""
    run(sd, ["a cat"], stepper)
    assert stepper.prompts.misses == before + 2
    stepper.close()
