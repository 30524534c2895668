"""Tiny random pipelines of many families, and how their requests fare in both modes.

``python -m families`` from this folder runs them all and prints the table of docs/families.md.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import Any

import torch
from families_image import IMAGE_FAMILIES
from families_language import LANGUAGE_FAMILIES
from families_parts import Family
from families_qwen import QWEN_FAMILIES
from families_served import (
    UNGUIDED,
    Made,
    Ran,
    Wanted,
    all_in_double,
    alone,
    apart,
    batch_in,
    made_alone,
    run_steps,
    run_waves,
    shapes_of,
    wanted_of,
)
from families_unet import UNET_FAMILIES
from families_video import VIDEO_FAMILIES

from omni_engine.worker.certification import certify
from omni_engine.worker.cooperative import CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.signatures import diffusers_capabilities

FAMILIES: dict[str, Family] = {
    **QWEN_FAMILIES,
    **UNET_FAMILIES,
    **IMAGE_FAMILIES,
    **LANGUAGE_FAMILIES,
    **VIDEO_FAMILIES,
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run of a family's requests found.

    Attributes:
        pipeline: name of the class.
        waves: in request mode.
        steps: in step mode.
        changes: how much another prompt, seed, guidance and, if there are any, negative prompt and
            pictures change a result.
        verdict: of certification; None where it isn't run.
    """

    pipeline: str
    waves: Ran
    steps: Ran
    changes: dict[str, float]
    verdict: FusionReport | None


def measure(family: Family) -> Measured:
    with family.context():
        pipe = family.pipeline()
        verdict = _verdict(pipe.to(dtype=torch.float32)) if family.certified else None
    with family.context(), all_in_double(family):
        pipe.to(dtype=torch.float64 if family.float64 else torch.float32)
        requests = wanted_of(family)
        expected = made_alone(pipe, requests)
        report = verdict or FusionReport(True, "")
        return Measured(
            type(pipe).__name__,
            run_waves(pipe, requests, report, expected),
            run_steps(pipe, requests, report, expected),
            _changes(pipe, family, requests[1], expected),
            verdict,
        )


def measure_shapes(family: Family) -> tuple[Ran, Ran, Made]:
    """Both modes' runs of two shapes of equal token count, and what diffusers makes alone."""
    with family.context():
        pipe = family.pipeline()
        requests, report = shapes_of(family), FusionReport(True, "")
        expected = made_alone(pipe, requests)
        waves, steps = (run(pipe, requests, report, expected) for run in (run_waves, run_steps))
        return waves, steps, expected


def _verdict(pipe: Any) -> FusionReport:
    return certify(pipe, diffusers_capabilities(pipe, FusionReport(False, "")))


def _changes(pipe: Any, family: Family, wanted: Wanted, expected: Made) -> dict[str, float]:
    """Changes of request 1; its second output has another seed only."""
    request, result = wanted.arguments, expected[1, 0]
    others: dict[str, Any] = {"prompt": family.prompts[4], **family.own(UNGUIDED)}
    guidance = {family.guidance, "guidance_scale_2"} & set(request)
    others |= dict.fromkeys(sorted(guidance), 5.5)
    if "negative_prompt" in request:
        others["negative_prompt"] = family.prompts[0]
    changes = {
        name: apart(alone(pipe, {**request, name: other}, wanted.seed)[0], result)
        for name, other in others.items()
    }
    return changes | {"seed": apart(expected[1, 1], result)}


def together(
    stepper: CooperativeStepper, requests: list[dict[str, Any]]
) -> tuple[list[torch.Tensor], int]:
    """What a stepper makes of calls of its pipeline, and how many forwards they asked for."""
    calls = []
    for seed, request in enumerate(requests):
        arguments = {**request, "generator": torch.Generator().manual_seed(seed)}
        calls.append(stepper.start(arguments, seed, str(seed)))
    stepper.run()
    stepper.close()
    for call in calls:
        if call.error is not None:
            raise call.error
    return [batch_in(call.result) for call in calls], sum(call.counts.forwards for call in calls)


# -- the table


HEADER = (
    "family", "pipeline class", "request mode", "step mode", "fused", "max difference",
    "certified at load", "notes",
)  # fmt: skip


def row(name: str, family: Family, found: Measured) -> list[str]:
    """Cells of a family's row in docs/families.md."""
    waves, steps = found.waves, found.steps
    dtype = "float64" if family.float64 else "float32"
    return [
        name,
        found.pipeline,
        f"{waves.forwards} for {waves.calls}",
        f"{steps.forwards} for {steps.calls}, {steps.rows / steps.forwards:.1f} rows",
        "yes" if steps.forwards < steps.calls else "no",
        f"{max(waves.difference, steps.difference):.0e} ({dtype})",
        _certified(found.verdict),
        family.why_alone or family.note,
    ]


def line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _certified(verdict: FusionReport | None) -> str:
    if verdict is None:
        return "not run"
    differs = re.search(r"by (\S+) at most", verdict.finding)
    return f"yes, {differs[1]}" if verdict.fused and differs else f"no: {verdict.finding}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(line(HEADER))
    print(line(["---"] * len(HEADER)))
    for name in sys.argv[1:] or FAMILIES:
        print(line(row(name, FAMILIES[name], measure(FAMILIES[name]))), flush=True)
