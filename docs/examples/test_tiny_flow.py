import pytest
from tiny_flow import TinyFlow

from omni_engine import OmniDiffusionSamplingParams
from omni_engine.protocol.requests import build_request
from omni_engine.stages.contracts import LoadContext
from omni_engine.worker.conformance import CHECKS, check_conformance

PIPELINE = TinyFlow.load(LoadContext(model="", device="cpu", dtype="float32"))


def make_request(i):
    """Requests of one size; everything that may differ among requests of a group differs."""
    params = OmniDiffusionSamplingParams(
        seed=i, num_inference_steps=2 + i % 4, guidance_scale=1.0 + i % 3, output_type="latent"
    )
    return build_request(f"prompt {i}: {'a cat and ' * i}a dog", params)


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check):
    check_conformance(PIPELINE, make_request, tolerance=1e-5, checks=[check])
