"""Requests of many families as both modes run them: each gets what plain diffusers makes of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from families import FAMILIES, HEADER, Measured, measure, measure_shapes, row
from families_served import STEPS, Ran

pytestmark = pytest.mark.slow

TOLERANCES = {True: 1e-12, False: 1e-4}
"""Of full scale, in float64 and in float32."""

DOCUMENT = Path(__file__).parents[1] / "docs" / "families.md"


@functools.cache
def measured(name: str) -> Measured:
    torch.set_num_threads(1)
    return measure(FAMILIES[name])


def ran(name: str, mode: str) -> Ran:
    found: Ran = getattr(measured(name), mode)
    return found


every_family = pytest.mark.parametrize("name", FAMILIES)
both_modes = pytest.mark.parametrize("mode", ["waves", "steps"])


@both_modes
@every_family
def test_results_equal_plain_diffusers(name: str, mode: str) -> None:
    found = ran(name, mode)
    assert found.difference <= TOLERANCES[FAMILIES[name].float64]
    assert found.fallbacks == 0


@both_modes
@every_family
def test_decoded_results_equal_plain_diffusers(name: str, mode: str) -> None:
    assert ran(name, mode).decoded <= TOLERANCES[FAMILIES[name].float64]


@every_family
def test_every_input_changes_the_result(name: str) -> None:
    """Otherwise equal results would prove nothing."""
    changes, family = measured(name).changes, FAMILIES[name]
    expected = {"prompt", "seed", *family.own(0)}
    expected |= {family.guidance} if family.guidance is not None else set()
    expected |= {"negative_prompt"} if family.negative else set()
    assert expected <= set(changes)
    assert all(5e-4 < change < float("inf") for change in changes.values()), changes


@both_modes
@every_family
def test_requests_share_forwards(name: str, mode: str) -> None:
    found, family = ran(name, mode), FAMILIES[name]
    if family.why_alone is not None:
        assert found.forwards == found.calls
        return
    assert found.forwards <= found.optimum + family.beyond[mode == "steps"]
    assert found.rows / found.forwards > (2 if mode == "waves" else 1.5)


@every_family
def test_in_step_mode_every_request_joins_others_under_way(name: str) -> None:
    assert ran(name, "steps").overlaps == len(STEPS) - 1


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.certified])
def test_certification_agrees(name: str) -> None:
    verdict = measured(name).verdict
    assert verdict is not None
    assert verdict.fused == (FAMILIES[name].why_alone is None), verdict.note


# -- the document


def documented() -> dict[str, dict[str, str]]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert tuple(rows[0]) == HEADER
    return {cells[0]: dict(zip(HEADER, cells, strict=True)) for cells in rows[2:]}


def test_the_document_has_a_row_for_every_family() -> None:
    assert list(documented()) == list(FAMILIES)


@every_family
def test_the_documents_row_is_what_a_run_gives(name: str) -> None:
    cells = dict(zip(HEADER, row(name, FAMILIES[name], measured(name)), strict=True))
    theirs = documented()[name]
    for column in ("pipeline class", "request mode", "step mode", "fused", "notes"):
        assert theirs[column] == cells[column], column
    assert theirs["certified at load"].split(",")[0] == cells["certified at load"].split(",")[0]


# -- shapes of equal token count


@pytest.mark.parametrize("name", ["flux", "qwen_image", "flux2", "stable_diffusion"])
def test_shapes_of_equal_token_count_are_told_apart(name: str) -> None:
    waves, steps, expected = measure_shapes(FAMILIES[name])
    assert len({made.numel() for made in expected.values()}) == 1
    for found in (waves, steps):
        assert found.difference <= TOLERANCES[FAMILIES[name].float64]
        assert found.fallbacks == 0
        assert found.forwards < found.calls, "requests of one shape share"
