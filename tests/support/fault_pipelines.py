"""Pipelines that fail where a request's prompt says so, for tests of everything that may go wrong.

A prompt holds any number of marks, such as ``"a cat [raise-forward]"`` or ``"a dog [sleep=0.1]"``.
Prompts are no part of the compatibility key: marked requests share batches with unmarked ones.

Errors, of the request alone or of the call that holds it:

- ``[raise-encode]``, ``[raise-forward]``, ``[raise-step]``, ``[raise-decode]``: raises there, in
  ``raise-forward``'s case for everybody who shares the forward. ``=KIND`` chooses what:
  ``[raise-step=SystemExit]``; see ``KINDS``. ``[raise-encoder]``: in a diffusers pipeline's shared
  text encoder.
- ``[oom-at=3]``: a forward that holds the request and 3 rows or more runs out of memory; with 1 the
  request does not even fit alone. ``[oom-decode-at=3]``: likewise a diffusers pipeline's decode.
- ``[nan]``: the result is not a number.
- ``[wrong-count]``: a forward that holds the request returns one result too few.
- ``[unserialisable]``: the result holds what can't be sent.

Ends of the process, all inside a forward:

- ``[exit=9]``: ``os._exit(9)``.  ``[segfault]``: reads address 0.
- ``[hang]``: sleeps for ever, in Python.  ``[hang-in-c]``: in a C function that holds no lock.
- ``[hold-gil=5]``: sleeps 5 s in C and keeps Python's lock: no other thread runs meanwhile.
- ``[sleep=0.1]``: takes 0.1 s longer at every step.
- ``[once=/path]``: the prompt's other marks count only for who creates this file: the first try.

``FAULT_AT_LOAD`` in the environment holds marks (``sleep``, ``exit``, ``segfault``, ``hang``,
``hang-in-c``, ``hold-gil``, ``raise-encode``, ``once``) for the loading of the hand-written ones.

Hand-written: ``FaultRequests`` (``forward(batch)``) and ``FaultSteps`` (the stepwise contract; in
request mode run in waves of steps). Their pictures are those of ``pattern`` in support_pipelines.
``FaultyDiffusion`` is a Stable Diffusion for the folder of ``save_tiny_stable_diffusion``.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from support_pipelines import pattern

from omni_engine.protocol.outputs import DiffusionOutput, OutputMetrics
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.stages.contracts import (
    DiffusionRequestBatch,
    LoadContext,
    StepBatch,
    StepRequestState,
)

REQUESTS = "fault_pipelines:FaultRequests"
STEPS = "fault_pipelines:FaultSteps"
DIFFUSERS = "fault_pipelines:FaultyDiffusion"

LOAD_VARIABLE = "FAULT_AT_LOAD"

KINDS: dict[str, type[BaseException]] = {
    "RuntimeError": RuntimeError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}

_MARK = re.compile(r"\[([a-z-]+)(?:=([^\]]*))?\]")


class Marks(dict[str, str]):
    """A prompt's marks with their values."""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, prompt: str) -> Marks:
        """Read a prompt; the result for a prompt is one object, so that ``once`` counts it once."""
        marks = cls(_MARK.findall(prompt))
        if "once" in marks:
            try:
                os.close(os.open(marks["once"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                marks.clear()
        return marks

    def raise_in(self, place: str) -> None:
        """Raise if the request is to fail at a place."""
        if (kind := self.get(f"raise-{place}")) is not None:
            raise KINDS[kind or "RuntimeError"](f"the {place} fails as marked")

    def check_memory(self, rows: int, mark: str = "oom-at") -> None:
        """Run out of memory if a forward holds more rows than the request bears."""
        if rows >= int(self.get(mark, 1 << 30)):
            raise torch.OutOfMemoryError(f"CUDA out of memory, as marked: {rows} rows")

    def act(self) -> None:
        """Do what ends or delays a process."""
        time.sleep(float(self.get("sleep", 0)))
        if "exit" in self:
            os._exit(int(self["exit"]))
        if "segfault" in self:
            ctypes.string_at(0)
        if "hold-gil" in self:
            ctypes.PyDLL(None).usleep(int(float(self["hold-gil"]) * 1e6))
        while "hang" in self:
            time.sleep(3600)
        while "hang-in-c" in self:
            ctypes.CDLL(None).sleep(3600)


def run_forward(prompts: Iterable[str], rows: int) -> None:
    """Do what the marks of everybody in a forward say."""
    for marks in map(Marks.of, prompts):
        marks.act()
        marks.raise_in("forward")
        marks.check_memory(rows)


def at_load() -> None:
    """Do what the environment says."""
    marks = Marks.of(os.environ.get(LOAD_VARIABLE, ""))
    marks.raise_in("encode")
    marks.act()


def finished(prompt: str, seed: int, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Return the picture of a prompt, or what its marks make of it."""
    marks = Marks.of(prompt)
    marks.raise_in("decode")
    picture = pattern(prompt, seed, *size)
    if "nan" in marks:
        spoilt = (picture / 255).astype(np.float32)
        spoilt[0, 0, 0] = np.nan
        return spoilt
    return picture.astype(object) if "unserialisable" in marks else picture


def _size(request: DiffusionRequest) -> tuple[int, int]:
    params = request.sampling_params
    assert params.height is not None
    assert params.width is not None
    return params.height, params.width


class _Faulty:
    defaults: ClassVar = {"height": 16, "width": 16, "num_inference_steps": 4}
    size_multiple = 8

    @classmethod
    def load(cls, context: LoadContext) -> Any:
        at_load()
        return cls()


class FaultRequests(_Faulty):
    """Whole request batches."""

    supports_request_batch = True
    per_request: ClassVar = {"num_outputs_per_prompt", "negative_prompt"}

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        for prompt in batch.prompts:
            Marks.of(prompt).raise_in("encode")
        rows = sum(request.num_outputs for request in batch.requests)
        for _ in range(batch.sampling_params_list[0].num_inference_steps or 1):
            run_forward(batch.prompts, rows)
            for prompt in batch.prompts:
                Marks.of(prompt).raise_in("step")
        outputs = [self._output(request) for request in batch.requests]
        short = any("wrong-count" in Marks.of(prompt) for prompt in batch.prompts)
        return outputs[:-1] if short else outputs

    def _output(self, request: DiffusionRequest) -> DiffusionOutput:
        pictures: list[Any] = [
            finished(request.prompt, request.seed + i, _size(request))
            for i in range(request.num_outputs)
        ]
        steps = request.sampling_params.num_inference_steps or 1
        metrics = OutputMetrics(num_steps=steps, num_forwards=steps)
        return DiffusionOutput(request.request_id, images=pictures, metrics=metrics)


class FaultSteps(_Faulty):
    """The stepwise contract."""

    supports_step_execution = True
    per_request: ClassVar = {"num_outputs_per_prompt", "negative_prompt", "num_inference_steps"}

    def prepare_encode(self, state: StepRequestState) -> None:
        Marks.of(state.request.prompt).raise_in("encode")
        state.num_steps = state.request.sampling_params.num_inference_steps or 1
        state.latents = torch.full((1, 4), float(state.row))

    def denoise_step(self, batch: StepBatch, states: Sequence[StepRequestState]) -> Any:
        prompts = [state.request.prompt for state in states]
        run_forward(prompts, len(states))
        short = any("wrong-count" in Marks.of(prompt) for prompt in prompts)
        return [state.step_index for state in states][: len(states) - short]

    def step_scheduler(self, state: StepRequestState, noise_pred: Any) -> None:
        assert noise_pred == state.step_index, "somebody else's prediction"
        Marks.of(state.request.prompt).raise_in("step")
        state.step_index += 1

    def post_decode(self, state: StepRequestState) -> Any:
        return finished(state.request.prompt, state.seed, _size(state.request))


# -- diffusers: marks travel to the shared modules in what these are called with

_FLAG = 1e6
"""In the first element of embeddings or latents: this row's request has marks."""

_SIGN = "¤"
"""In a prompt: the text encoder fails."""


class FaultyDiffusion(StableDiffusionPipeline):
    """Stable Diffusion whose modules fail as marked; everybody without a mark gets its pictures.

    Runs stepped, in both modes. A forward has two rows per picture with guidance, else one.
    """

    _prompts: ClassVar[list[str]] = []
    """Marked prompts; a flag of ``_FLAG * (i + 1)`` stands for the i-th."""

    @functools.wraps(StableDiffusionPipeline.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sign_ids = self.tokenizer(_SIGN, add_special_tokens=False).input_ids
        _guard(self.unet, "forward", self._before_unet)
        _guard(self.vae, "decode", self._before_decode)
        _guard(self.text_encoder, "forward", self._before_encoder)

    @functools.wraps(StableDiffusionPipeline.__call__)
    def __call__(self, prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(prompt, *args, **kwargs)
        marks = Marks.of(prompt)
        if "wrong-count" in marks:
            result.images = result.images[:0]
        if "unserialisable" in marks:
            result.images = result.images.astype(object)
        return result

    def encode_prompt(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        marks = Marks.of(prompt)
        marks.raise_in("encode")
        sign = _SIGN if "raise-encoder" in marks else ""
        embeds, negative = super().encode_prompt(sign + prompt, *args, **kwargs)
        if marks:
            if prompt not in self._prompts:
                self._prompts.append(prompt)
            flag = _FLAG * (self._prompts.index(prompt) + 1)
            embeds = embeds.clone()
            embeds[:, 0, 0] = flag
            _spoil_steps(self.scheduler, marks, flag)
        return embeds, negative

    def _before_unet(self, arguments: dict[str, Any]) -> None:
        embeds = arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"].clone()
        run_forward(self._take_flags(embeds[:, 0, :1]), len(embeds))

    def _before_decode(self, arguments: dict[str, Any]) -> None:
        latents = arguments["z"] = arguments["z"].clone()
        for prompt in self._take_flags(latents[:, 0, 0, :1], self.vae.config.scaling_factor):
            marks = Marks.of(prompt)
            marks.raise_in("decode")
            marks.check_memory(len(latents), "oom-decode-at")

    def _before_encoder(self, arguments: dict[str, Any]) -> None:
        wanted = self._sign_ids
        for row in arguments["input_ids"].tolist():
            if any(row[start : start + len(wanted)] == wanted for start in range(len(row))):
                raise RuntimeError("the encoder fails as marked")

    def _take_flags(self, values: torch.Tensor, scale: float = 1.0) -> list[str]:
        """Return the marked prompts whose flags are in a tensor, and set the flags to 0."""
        flags = [round(v) for v in (values.nan_to_num() * scale / _FLAG).flatten().tolist()]
        values[torch.tensor(flags) > 0] = 0
        return [self._prompts[flag - 1] for flag in flags if flag > 0]


def _guard(module: torch.nn.Module, method: str, check: Any) -> None:
    """Show a module's method's arguments to a check, which may raise or change them.

    The class is replaced, not the instance's method, which the engine wraps and unwraps.
    """
    cls: Any = type(module)
    real = getattr(cls, method)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        check(bound.arguments)
        return real(*bound.args, **bound.kwargs)

    module.__class__ = type(cls.__name__, (cls,), {method: guarded, "__module__": cls.__module__})


def _spoil_steps(scheduler: Any, marks: Marks, flag: float) -> None:
    """Let a request's own scheduler fail, or leave a flag for the decode in its last sample."""
    real = scheduler.step

    @functools.wraps(real)
    def step(model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        marks.raise_in("step")
        result = real(model_output, timestep, sample, *args, **kwargs)
        if timestep == scheduler.timesteps[-1]:
            if "nan" in marks:
                result[0].fill_(float("nan"))
            if "raise-decode" in marks or "oom-decode-at" in marks:
                result[0][:, 0, 0, 0] = flag
        return result

    scheduler.step = step
