"""Requests of many families share forwards, and each gets what plain diffusers makes of it."""

from __future__ import annotations

import functools

import pytest
import torch
from families import FAMILIES, Measured, measure

TOLERANCES = {True: 1e-12, False: 1e-4}
"""Of full scale, in float64 and in float32."""


@functools.cache
def measured(name: str) -> Measured:
    torch.set_num_threads(1)
    return measure(FAMILIES[name])


every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_requests_together_equal_plain_diffusers(name: str) -> None:
    found = measured(name)
    assert found.difference <= TOLERANCES[FAMILIES[name].float64]
    assert found.fallbacks == 0


@every_family
def test_prompt_seed_and_pictures_change_the_result(name: str) -> None:
    """Otherwise equal results would prove nothing."""
    changes = measured(name).changes
    assert {"prompt", "seed"} <= set(changes)
    assert all(1e-3 < change < float("inf") for change in changes.values()), changes


@every_family
def test_requests_share_forwards(name: str) -> None:
    found = measured(name)
    if FAMILIES[name].why_alone is not None:
        assert found.forwards == found.calls
    else:
        assert found.forwards <= FAMILIES[name].forwards


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.certified])
def test_certification_agrees(name: str) -> None:
    verdict = measured(name).verdict
    assert verdict is not None
    assert verdict.fused == (FAMILIES[name].why_alone is None), verdict.note
