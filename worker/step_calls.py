"""Calls of the stepwise contract's methods: what goes in, what came out, errors as values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_engine.protocol.errors import PipelineContractError
from omni_engine.stages.contracts import StepBatch, StepRequestState
from omni_engine.worker.failures import bare, text_of
from omni_engine.worker.progress import main_thread
from omni_engine.worker.results import DEFAULT_PREVIEW_SIDE, make_preview

logger = logging.getLogger(__name__)


def batch_of(states: Sequence[StepRequestState]) -> StepBatch:
    """Join the states' latents and current timesteps, if all of them keep some."""
    if any(state.latents is None or state.timesteps is None for state in states):
        return StepBatch()
    latents = torch.cat([state.latents for state in states])
    return StepBatch(latents, torch.stack([s.timesteps[s.step_index] for s in states]))


def parts_of(predictions: Any, states: Sequence[StepRequestState]) -> list[Any]:
    """Split a denoiser's result into one part per state.

    Raises:
        PipelineContractError: if there are more or fewer parts than states.
    """
    is_tensor = isinstance(predictions, torch.Tensor)
    found: int | str = type(predictions).__name__
    if isinstance(predictions, list | tuple) or (is_tensor and predictions.ndim):
        found = len(predictions)
    if found == len(states):
        return list(predictions.split(1)) if is_tensor else list(predictions)
    raise PipelineContractError(
        "denoise_step() did not return one prediction per state",
        field="denoise_step",
        value=found,
        expected=f"a tensor or a list with {len(states)} entries",
    )


def error_of(method: Callable[..., Any], *arguments: Any) -> BaseException | None:
    """Call a method; return what it raised, bare."""
    result = result_of(method, *arguments)
    return result if isinstance(result, BaseException) else None


def result_of(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a method returns, or what it raised, bare."""
    main_thread.mark()
    try:
        return method(*arguments)
    except BaseException as error:  # noqa: BLE001  # boundary: one request, even if it calls exit()
        return bare(error)
    finally:
        main_thread.mark()


def preview_of(
    preview: Callable[..., Any], state: StepRequestState
) -> npt.NDArray[np.uint8] | None:
    """Return a small picture of a state, or None."""
    max_side = state.request.preview_max_side or DEFAULT_PREVIEW_SIDE
    try:
        return make_preview(preview(state), max_side)
    except BaseException as error:  # noqa: BLE001  # boundary: a preview; the request goes on
        logger.warning("preview() failed: %s", text_of(error))
        return None
