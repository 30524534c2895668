"""Whether requests under different adapters may share forwards is found out for each pipeline."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import FAMILIES

from omni_engine.worker.certification import certify
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.mixing_certification import MixingReport, certify_mixing
from omni_engine.worker.signatures import diffusers_capabilities


def mixing(name: str, **changed: Any) -> MixingReport:
    family = FAMILIES[name]
    with family.context():
        pipe = family.pipeline().to(dtype=torch.float32)
        before = {id(m): m.__dict__.get("forward") for m in modules(pipe)}
        capabilities = diffusers_capabilities(pipe, FusionReport(False, ""))
        report = dataclasses.replace(certify(pipe, capabilities), **changed)
        found = certify_mixing(pipe, report, capabilities)
        assert {id(m): m.__dict__.get("forward") for m in modules(pipe)} == before, "no hook stays"
    return found


def modules(pipe: Any) -> list[torch.nn.Module]:
    components = [c for c in pipe.components.values() if isinstance(c, torch.nn.Module)]
    return [module for component in components for module in component.modules()]


@pytest.mark.parametrize("name", ["stable_diffusion", "sdxl_controlnet", "flux"])
def test_models_whose_layers_keep_rows_together_mix(name: str) -> None:
    found = mixing(name)
    assert found.exact, found.note
    assert "share forwards" in found.note


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("z_image", "mixed forwards differ from single ones"),  # all tokens of a batch in one row
        ("qwen_image_21", "don't keep requests apart"),
    ],
)
def test_models_that_would_mix_up_rows_do_not(name: str, why: str) -> None:
    found = mixing(name)
    assert not found.exact
    assert why in found.note


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"fused": False}, "requests share no forwards"),
        ({"encoders": False}, "text encoders can't be suspended"),
    ],
)
def test_what_mixing_needs(changed: dict[str, bool], why: str) -> None:
    found = mixing("stable_diffusion", **changed)
    assert not found.exact
    assert why in found.note
