"""Pipelines for the fuzz tests: they take everything, and nothing that gets through does harm."""

from __future__ import annotations

from typing import ClassVar

from gated_pipelines import GatedSteps
from support_pipelines import PatternPipeline


class PicturesIn(PatternPipeline):
    """Takes pictures, and extra arguments that do no harm."""

    inputs: ClassVar = {"image", "mask_image"}
    extra_args = frozenset({"note", "weights"})
    per_request: ClassVar = {"num_outputs_per_prompt", "negative_prompt", "note"}


class SteppedPicturesIn(GatedSteps):
    """The same, stepped."""

    inputs: ClassVar = PicturesIn.inputs
    extra_args = PicturesIn.extra_args
    per_request: ClassVar = {"negative_prompt", "note"}
