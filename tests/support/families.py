"""Tiny random pipelines of many families, and what sharing forwards does to their results.

``python -m families`` from this folder runs them all and prints the table of docs/families.md.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import torch
from families_image import IMAGE_FAMILIES
from families_language import LANGUAGE_FAMILIES
from families_parts import STEPS, Family
from families_qwen import QWEN_FAMILIES
from families_unet import UNET_FAMILIES
from families_video import VIDEO_FAMILIES

from omni_engine.worker.certification import certify
from omni_engine.worker.cooperative import CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities
from omni_engine.worker.views import denoisers, make_view

FAMILIES: dict[str, Family] = {
    **QWEN_FAMILIES,
    **UNET_FAMILIES,
    **IMAGE_FAMILIES,
    **LANGUAGE_FAMILIES,
    **VIDEO_FAMILIES,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run of a family's requests, alone and together, found.

    Attributes:
        pipeline: name of the class.
        difference: largest difference between alone and together, of full scale.
        changes: how much another prompt, seed and, if there is one, picture change a result.
        forwards: forwards of all requests together.
        calls: forwards the requests asked for.
        fallbacks: shared forwards that failed.
        verdict: of certification; None where it isn't run.
    """

    pipeline: str
    difference: float
    changes: dict[str, float]
    forwards: int
    calls: int
    fallbacks: int
    verdict: FusionReport | None


def measure(family: Family) -> Measured:
    with family.context():
        pipe = family.pipeline()
        requests = [family.request(index) for index in range(len(STEPS))]
        expected = [alone(pipe, request, seed) for seed, request in enumerate(requests)]
        stepper = CooperativeStepper(pipe, denoisers(pipe))
        made, calls = together(stepper, requests)
        return Measured(
            type(pipe).__name__,
            max(apart(a, b) for a, b in zip(made, expected, strict=True)),
            _changes(pipe, family, requests[1], expected[1]),
            stepper.forwards,
            calls,
            stepper.fallbacks,
            _verdict(pipe.to(dtype=torch.float32)) if family.certified else None,
        )


def _verdict(pipe: Any) -> FusionReport:
    return certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))


def alone(pipe: Any, request: dict[str, Any], seed: int) -> torch.Tensor:
    """What plain diffusers makes of a request."""
    torch.manual_seed(seed)
    return _result(make_view(pipe)(**request, generator=torch.Generator().manual_seed(seed)))


def together(
    stepper: CooperativeStepper, requests: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], int]:
    """The requests' results, and how many forwards they asked for."""
    calls = []
    for seed, request in enumerate(requests):
        arguments = {**request, "generator": torch.Generator().manual_seed(seed)}
        calls.append(stepper.start(arguments, seed, str(seed)))
    stepper.run()
    stepper.close()
    for call in calls:
        if call.error is not None:
            raise call.error
    return [_result(call.result) for call in calls], sum(call.counts.forwards for call in calls)


def _changes(
    pipe: Any, family: Family, request: dict[str, Any], expected: torch.Tensor
) -> dict[str, float]:
    others = {"prompt": {"prompt": family.prompts[4]}}
    others |= {name: {name: value} for name, value in family.own(3).items()}
    changes = {name: apart(alone(pipe, {**request, **other}, 1), expected)
               for name, other in others.items()}  # fmt: skip
    return changes | {"seed": apart(alone(pipe, request, 9), expected)}


def _result(output: Any) -> torch.Tensor:
    found = next(iter(output.values()))
    if isinstance(found, list):
        return torch.stack([torch.as_tensor(np.asarray(item)) for item in found])
    return torch.as_tensor(found)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, as a part of full scale; not a number counts as infinite."""
    full_scale = other.abs().max().item()
    difference = (one - other).abs().max().item() / full_scale
    return difference if difference == difference else float("inf")


def row(name: str, family: Family, found: Measured) -> str:
    """A row of the table in docs/families.md."""
    dtype = "float64" if family.float64 else "float32"
    cells = [
        name,
        found.pipeline,
        "yes" if found.forwards < found.calls else "no",
        f"{found.forwards} for {found.calls}",
        f"{found.difference:.0e} ({dtype})",
        family.why_alone or family.note,
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        "| family | pipeline class | shares forwards | forwards for calls | max difference | note |"
    )
    print("|---|---|---|---|---|---|")
    for name in sys.argv[1:] or FAMILIES:
        print(row(name, FAMILIES[name], measure(FAMILIES[name])), flush=True)
