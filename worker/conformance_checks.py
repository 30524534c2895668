"""The checks of ``conformance``: each takes a ``Suite`` and raises an AssertionError."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from omni_engine.stages.contracts import STEP_METHODS, DiffusionRequestBatch
from omni_engine.worker.conformance_suite import NUMBER, Suite, apart, distance, pictures_of
from omni_engine.worker.conformance_trial import Injection, Reference
from omni_engine.worker.declared import has_forward
from omni_engine.worker.process_state import RandomState
from omni_engine.worker.wave import WavePipeline

# -- results


def _requests_differ(suite: Suite) -> None:
    requests = [suite.request(index) for index in range(NUMBER)]
    for what, values in (
        ("prompts", {request.prompt for request in requests}),
        ("seeds", {request.seed for request in requests}),
        ("steps", {suite.alone(index).metrics.num_steps for index in range(NUMBER)}),
    ):
        assert len(values) > 1, f"make_request(0) to make_request(5) have the same {what}"


def _company_changes_nothing(suite: Suite) -> None:
    trial = suite.trial()
    first, second, *others = suite.requests()
    trial.join([first, second])
    for late in others:
        trial.tick()
        trial.join([late])
    suite.assert_as_alone(trial.run())


def _groups_take_turns(suite: Suite) -> None:
    if suite.exclusive:
        return
    trial = suite.trial()
    trial.join(suite.requests()[::2], group=0)
    trial.join(suite.requests()[1::2], group=1)
    suite.assert_as_alone(trial.run())


def _prompt_and_seed_matter(suite: Suite) -> None:
    request, prompt = suite.request(0), suite.request(1).prompt
    expected = suite.run_one(request)
    for what, other in (
        ("prompt", dataclasses.replace(request, prompt=prompt)),
        ("seed", suite.request(0, seed=request.seed + 1)),
    ):
        difference = apart(suite.run_one(other), expected)
        assert difference > suite.tolerance, f"another {what} gives the same picture"


def _picture_i_uses_seed_plus_i(suite: Suite) -> None:
    both = suite.request(0, num_outputs_per_prompt=2)
    pictures = pictures_of(suite.run_one(both))
    assert len(pictures) == 2, f"{len(pictures)} pictures for num_outputs_per_prompt = 2"
    for i, picture in enumerate(pictures):
        single = suite.request(0, num_outputs_per_prompt=1, seed=both.seed + i)
        (expected,) = pictures_of(suite.run_one(single))
        difference = distance(picture, expected)
        assert difference <= suite.tolerance, (
            f"picture {i} of 2 differs by {difference:.1e} from that of seed + {i} alone"
        )


def _same_request_same_bytes(suite: Suite) -> None:
    seen = []
    for state in (1, 2):
        torch.manual_seed(state)
        np.random.seed(state)  # the state that an unseeded draw would use
        pictures = pictures_of(suite.run_one(suite.request(0)))
        seen.append([picture.tobytes() for picture in pictures])
    assert seen[0] == seen[1], "the same request twice differs: something is not seeded by it"


def _global_random_state_is_left_alone(suite: Suite) -> None:
    before = RandomState.current().cpu
    suite.run(suite.requests())
    untouched = torch.equal(before, RandomState.current().cpu)
    assert untouched, "torch's global random state was changed: use a generator per state"


def _request_mode_equals_step_mode(suite: Suite) -> None:
    forward: Callable[..., Any] = WavePipeline(
        suite.pipeline, lambda _: False, one_at_a_time=suite.exclusive
    ).forward
    batches = [suite.requests()]
    if has_forward(suite.pipeline):
        forward = suite.pipeline.forward
        batches = [[request] for request in suite.requests()]
        if suite.capabilities.supports_request_batch:
            batches = [suite.alike()]
    for batch in batches:
        stepped = suite.run(batch)
        for output in forward(DiffusionRequestBatch(tuple(batch))):
            what = f"{output.request_id} in a request batch"
            suite.assert_same(output.raise_for_error(), stepped[output.request_id], what)


def _previews_change_nothing(suite: Suite) -> None:
    if not hasattr(suite.pipeline, "preview"):
        return
    without = suite.run(suite.requests())
    shown = suite.run(dataclasses.replace(r, preview_every=1) for r in suite.requests())
    for request_id, output in shown.items():
        assert apart(output, without[request_id]) == 0, f"previews changed {request_id}"


# -- steps


def _late_joiners_share_forwards(suite: Suite) -> None:
    if not suite.shares:
        return
    running = dataclasses.replace(suite.longest_first()[0], request_id="running")
    late = dataclasses.replace(running, request_id="late")
    trial = suite.trial()
    trial.join([running])
    trial.tick()
    outputs = trial.run([late])
    expected = suite.run_one(running).metrics.num_forwards
    for request_id in ("running", "late"):
        metrics = outputs[request_id].raise_for_error().metrics
        assert metrics.max_batch_size == 2, f"the {request_id} request shared no forward"
        assert metrics.num_forwards == expected, (
            f"the {request_id} request took {metrics.num_forwards} forwards, {expected} alone"
        )
    late_ticks = outputs["late"].metrics.num_forwards
    shared = (outputs["late"].metrics.mean_batch_size - 1) * late_ticks
    per_tick = expected / max(1, suite.run_one(running).metrics.num_steps)
    assert shared >= (late_ticks - per_tick) - 1e-6, "the late request shared too few forwards"


def _finishers_leave_at_once(suite: Suite) -> None:
    if suite.exclusive:
        return
    longest, *_, shortest = suite.longest_first()
    ticks_alone = suite.trial()
    ticks_alone.run([shortest])
    trial = suite.trial()
    trial.join([longest, shortest])
    held: list[tuple[str, Reference]] = []
    while shortest.request_id not in trial.outputs:
        held = trial.held_by(shortest.request_id)
        trial.tick()
    assert trial.ticks == ticks_alone.ticks, (
        f"{shortest.request_id} took {trial.ticks} ticks, {ticks_alone.ticks} alone"
    )
    _assert_dead(held, "that has ended")
    assert longest.request_id not in trial.outputs, "make_request(i) must give different steps"
    trial.run()


def _abort_touches_nobody(suite: Suite) -> None:
    requests = suite.longest_first()
    victim, *others = (request.request_id for request in requests)
    expected = suite.run(requests)
    trial = suite.trial()
    trial.join(requests)
    trial.tick()
    held = trial.held_by(victim)
    trial.abort(victim)
    trial.tick()
    assert victim in trial.outputs, "an aborted request must end at the next tick"
    assert trial.outputs[victim].aborted, "an aborted request must not complete"
    _assert_dead(held, "that was aborted, one tick later")
    outputs = trial.run()
    for request_id in others:
        output = outputs[request_id].raise_for_error()
        suite.assert_same(output, expected[request_id], f"{request_id} beside an aborted one")


def _failures_end_one_request(suite: Suite) -> None:
    requests = suite.requests()[:3]
    culprit = requests[1].request_id
    for method in STEP_METHODS:
        trial = suite.trial(Injection(method, culprit))
        outputs = dict(trial.run(requests))
        error = outputs.pop(culprit).error
        assert error is not None and "injected" in str(error), (  # noqa: PT018
            f"an error in {method}() was not reported: {error}"
        )
        for output in outputs.values():
            output.raise_for_error()
        suite.assert_as_alone(outputs)
        assert not trial.alive(), f"left after an error in {method}(): {trial.alive()}"


def _progress_ends_complete(suite: Suite) -> None:
    trial = suite.trial()
    outputs = trial.run(suite.requests())
    assert trial.watched.progress, "step_scheduler() was never called"
    for (request_id, row), record in trial.watched.progress.items():
        where = f"(step_index, num_steps) of {request_id}, picture {row}, was {record}"
        steps = [step for step, _ in record]
        assert steps == sorted(steps), f"{where}: step_index must never fall"
        assert len({total for _, total in record}) == 1, f"{where}: num_steps must not change"
        assert record[-1][0] == record[-1][1] > 0, f"{where}: it must end at num_steps"
        found = outputs[request_id].raise_for_error().metrics.num_steps
        assert found == record[-1][1], f"{where}, but the output says {found} steps"


def _nothing_is_left(suite: Suite) -> None:
    trial = suite.trial()
    for output in trial.run(suite.requests()).values():
        output.raise_for_error()
    assert not trial.alive(), (
        f"still referred to after their end: {', '.join(trial.alive())}; keep nothing of a "
        "request outside of its state, and no reference cycles in it"
    )


def _assert_dead(held: Iterable[tuple[str, Reference]], whose: str) -> None:
    alive = [what for what, reference in held if reference() is not None]
    assert not alive, f"a request {whose} still holds {', '.join(alive)}"


CHECKS: dict[str, Callable[[Suite], None]] = {
    check.__name__.strip("_"): check
    for check in (
        _requests_differ,
        _company_changes_nothing,
        _groups_take_turns,
        _prompt_and_seed_matter,
        _picture_i_uses_seed_plus_i,
        _same_request_same_bytes,
        _global_random_state_is_left_alone,
        _request_mode_equals_step_mode,
        _previews_change_nothing,
        _late_joiners_share_forwards,
        _finishers_leave_at_once,
        _abort_touches_nobody,
        _failures_end_one_request,
        _progress_ends_complete,
        _nothing_is_left,
    )
}
"""Name to check; see ``check_conformance``."""
