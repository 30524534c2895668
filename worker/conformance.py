"""Checks that any pipeline under the stepwise contract must pass, hand-written or adapted.

In a pipeline's own tests::

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(check):
        check_conformance(pipeline, make_request, checks=[check])

Requests run in this process, on the runner and the loop of a worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from omni_engine.protocol.errors import OmniError
from omni_engine.worker.conformance_checks import CHECKS as CHECKS
from omni_engine.worker.conformance_suite import MakeRequest, Suite
from omni_engine.worker.process_state import RandomState

DEFAULT_TOLERANCE = 0.005
"""Of full scale: one level of a uint8 picture, which rounding in float32 may come to."""


class ConformanceError(AssertionError):
    """What a pipeline fails.

    Attributes:
        failures: check name to what was found.
    """

    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__("\n".join(f"{name}: {found}" for name, found in failures.items()))
        self.failures = failures


def check_conformance(
    pipeline: Any,
    make_request: MakeRequest,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    checks: Iterable[str] | None = None,
) -> None:
    """Check that a pipeline fulfils the stepwise contract.

    Args:
        pipeline: a loaded pipeline with the stepwise contract.
        make_request: for i from 0 to 5 a request of one size, each with its own prompt, seed and
            number of steps (3 or more for one of them), and different in all else that requests of
            one group may differ in. ``output_type="latent"`` allows the closest comparison.
        tolerance: how much company may change a result, as a part of full scale (255, or a
            tensor's largest value); 0: not by a bit.
        checks: names from ``CHECKS``; None for all.

    Raises:
        ConformanceError: an AssertionError that names every failed check and what it found.
    """
    suite = Suite(pipeline, make_request, tolerance)
    failures: dict[str, str] = {}
    for name in CHECKS if checks is None else checks:
        try:
            with _random_state_restored():
                CHECKS[name](suite)
        except (AssertionError, OmniError) as error:
            failures[name] = str(error)
    if failures:
        raise ConformanceError(failures)


@contextlib.contextmanager
def _random_state_restored() -> Iterator[None]:
    before, numpy_before = RandomState.current(), np.random.get_state()
    try:
        yield
    finally:
        before.apply()
        np.random.set_state(numpy_before)
