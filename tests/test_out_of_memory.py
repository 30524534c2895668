"""Memory that runs out: recognised, halved, remembered; who is too large even alone fails alone."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_stepped import Counting, request
from tiny_models import tiny_stable_diffusion

from omni_engine.protocol.outputs import DiffusionOutput
from omni_engine.protocol.plans import BatchPlan
from omni_engine.stages.contracts import DiffusionRequestBatch, StepBatch, StepRequestState
from omni_engine.worker.abort import AbortFlags
from omni_engine.worker.adapter_access import NoAdapters
from omni_engine.worker.certification import make_stepper
from omni_engine.worker.cooperative import CooperativeStepper
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.memory import MemoryCaps, is_out_of_memory
from omni_engine.worker.request_runner import RequestRunner
from omni_engine.worker.retries import SharedRun
from omni_engine.worker.step_loop import StepLoop

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate"
                 " memory: you tried to allocate 4 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]  # fmt: skip
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("the model is out of memory lane"),
    OSError(errno.ENOENT, "No such file"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_memory_that_ran_out_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_what_torchs_cpu_allocator_really_raises_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


class Device:
    """Runs lists of row counts and remembers which; runs out of memory beyond its room."""

    def __init__(self, room: int, memory: MemoryCaps | None = None) -> None:
        self.room, self.ran = room, list[list[int]]()
        self.memory = memory or MemoryCaps()

    def attempt(self, rows: Sequence[int]) -> list[str] | BaseException:
        self.ran.append(list(rows))
        if sum(rows) > self.room:
            return torch.OutOfMemoryError("CUDA out of memory")
        return [f"made {n}" for n in rows]

    def run(self, *rows: int) -> list[Any]:
        self.ran.clear()
        return SharedRun("a test", "Thing 8x8", self.attempt, int, self.memory).run(rows)


def test_a_run_is_halved_until_it_fits_and_split_from_then_on() -> None:
    device = Device(room=3)
    assert device.run(*[1] * 8) == ["made 1"] * 8
    assert device.ran == [[1] * 8, [1] * 4, [1] * 2, [1] * 2, [1] * 2, [1] * 2]
    assert device.memory.shown() == {"Thing 8x8": 2}
    assert device.run(1, 1, 1, 1, 1) == ["made 1"] * 5
    assert device.ran == [[1, 1], [1, 1], [1]]


def test_the_largest_run_that_worked_is_the_limit_even_if_it_worked_before() -> None:
    device = Device(room=6)
    device.run(*[1] * 5)
    device.run(*[1] * 8)
    assert device.memory.shown() == {"Thing 8x8": 5}
    device.room = 3  # somebody else takes memory now
    device.run(*[1] * 5)
    assert device.memory.shown() == {"Thing 8x8": 3}


def test_an_item_is_never_split_and_rows_are_counted() -> None:
    device = Device(room=4)
    assert device.run(2, 2, 2) == ["made 2"] * 3
    assert device.memory.shown() == {"Thing 8x8": 4}
    device.run(1, 2, 2, 4)
    assert device.ran == [[1, 2], [2], [4]]


def test_one_that_is_too_large_alone_gets_the_error_and_limits_nobody() -> None:
    device = Device(room=4)
    made = device.run(1, 1, 9, 1)
    assert [isinstance(result, torch.OutOfMemoryError) for result in made] == [0, 0, 1, 0]
    assert device.memory.shown() == {}


def test_each_new_limit_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(room=3)
    with caplog.at_level(logging.WARNING, "omni_engine.worker.memory"):
        for _ in range(3):
            device.run(*[1] * 8)
    assert len([r for r in caplog.records if "at most" in r.getMessage()]) == 1


def test_kinds_of_forwards_have_limits_of_their_own_and_are_not_endless() -> None:
    memory = MemoryCaps()
    for size in range(3000):
        memory.note_failed(f"Thing {size}", 8, 4)
        memory.note_worked(f"Thing {size}", 4)
    assert len(memory.shown()) == 1024
    assert memory.limit("Thing 0") is None
    assert memory.limit("Thing 2999") == 4


def test_other_errors_run_each_alone_and_teach_nothing() -> None:
    ran: list[list[int]] = []

    def attempt(items: Sequence[int]) -> list[int] | BaseException:
        ran.append(list(items))
        return ValueError("no twos") if 2 in items else list(items)

    memory = MemoryCaps()
    results = SharedRun("a test", "kind", attempt, lambda _: 1, memory).run([1, 2, 3, 4])
    assert ran == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert [isinstance(result, ValueError) for result in results] == [False, True, False, False]
    assert memory.shown() == {}


# -- where forwards are shared


class Cramped(Counting):
    """Has memory for two pictures."""

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        made = super().denoise_step(batch, states)
        if len(states) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made


def test_a_hand_written_step_is_halved_once_and_then_split() -> None:
    pipeline, memory = Cramped(), MemoryCaps()
    loop = StepLoop(pipeline, lambda _: False, memory=memory)
    loop.join([request(name, steps=2) for name in "abcd"])
    outputs: list[DiffusionOutput] = []
    while len(loop):
        outputs += loop.tick()
    assert all(output.ok for output in outputs)
    assert [len(members) for _, members in pipeline.batches] == [4, 2, 2, 2, 2]
    assert {output.metrics.max_batch_size for output in outputs} == {2}
    assert memory.shown() == {"Cramped": 2}


def test_a_hand_written_batch_is_halved_once_and_then_split() -> None:
    sizes: list[int] = []

    class Pipeline:
        supports_request_batch = True

        def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
            sizes.append(batch.num_reqs)
            if sum(request.num_outputs for request in batch.requests) > 4:
                raise MemoryError
            return [
                DiffusionOutput(r.request_id, images=[np.zeros((8, 8, 3), np.uint8)] * 2)
                for r in batch.requests
            ]

    memory = MemoryCaps()
    runner = RequestRunner(Pipeline(), NoAdapters(), AbortFlags(), "w", lambda _: None, memory)
    for _ in range(2):
        plan = BatchPlan(0, tuple(request(name, n=2) for name in "abcd"), (None,) * 4)
        assert all(output.ok for output in runner.run(plan))
    assert sizes == [4, 2, 2, 2, 2]
    assert memory.shown() == {"Pipeline": 4}


def crowded_unet(room: int) -> tuple[Any, list[int]]:
    """A pipeline whose denoiser has memory for so many rows, and what was tried."""
    pipe, rows = tiny_stable_diffusion(), list[int]()
    pipe.set_progress_bar_config(disable=True)
    original = pipe.unet.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(args[0] if args else kwargs["sample"]))
        if rows[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args, **kwargs)

    pipe.unet.forward = forward
    return pipe, rows


def run_calls(stepper: CooperativeStepper, number: int) -> list[Any]:
    arguments = {"prompt": "a cat", "num_inference_steps": 1, "guidance_scale": 3.0,
                 "height": 16, "width": 16, "output_type": "np"}  # fmt: skip
    calls = [
        stepper.start(arguments | {"generator": torch.Generator().manual_seed(i)}, i, f"r{i}")
        for i in range(number)
    ]
    stepper.run()
    return [call.error if call.error is not None else call.result.images[0] for call in calls]


def test_a_shared_forward_is_halved_and_each_call_gets_its_own_part() -> None:
    torch.set_num_threads(1)
    pipe, rows = crowded_unet(room=4)
    memory = MemoryCaps()
    stepper = make_stepper(pipe, FusionReport(True, ""), memory=memory)
    together = run_calls(stepper, 4)
    assert rows == [8, 4, 4]
    assert memory.shown() == {"UNet2DConditionModel 8x8": 4}
    rows.clear()
    run_calls(stepper, 3)
    assert rows == [4, 2], "split before it fails"
    for seed, picture in enumerate(together):
        generator = torch.Generator().manual_seed(seed)
        alone = pipe("a cat", num_inference_steps=1, guidance_scale=3.0, height=16, width=16,
                     output_type="np", generator=generator).images[0]  # fmt: skip
        np.testing.assert_allclose(picture, alone, atol=1e-4)


def test_forwards_of_one_size_are_not_halved_and_say_what_to_change() -> None:
    """With ``deterministic`` a half would be filled up to the same size again."""
    torch.set_num_threads(1)
    pipe, rows = crowded_unet(room=4)
    stepper = make_stepper(pipe, FusionReport(True, ""), pad_calls_to=4)
    errors = run_calls(stepper, 3)
    assert rows == [8]
    assert all("max_num_seqs" in str(error) for error in errors)
    assert [error.code for error in errors] == ["out_of_memory"] * 3
