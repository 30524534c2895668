"""Schedulers that tell the pipeline call they run in of each step, and estimate what comes out.

A request's steps are the steps of its scheduler, whatever its pipeline reports. For a preview the
clean sample x0 is estimated from what the step was given.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from greenlet import getcurrent


def observe_steps(scheduler: Any) -> None:
    """Make a scheduler of a view report its steps to the greenlet's call; it stays what it was.

    For a call that replays one step, a schedule holds its first timestep only.

    The class is replaced by a subclass of the same name, so that copies a pipeline makes of its
    scheduler report, too.
    """
    cls: Any = type(scheduler)
    if not hasattr(cls, "observed"):
        scheduler.__class__ = _observed_class(cls)


@functools.cache
def _observed_class(cls: Any) -> type[Any]:
    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = cls.step(self, *args, **kwargs)
        call = getattr(getcurrent(), "call", None)
        return result if call is None else call.on_step(self, args, kwargs, result)

    return type(
        cls.__name__, (cls,), {"step": step, "observed": True, "__module__": cls.__module__}
    )


def estimate_clean_sample(
    scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Estimate x0 from the arguments of a step that has just been taken.

    The formulas are those of the parameterisations: epsilon and v-prediction (Salimans and Ho,
    2022), sample, and rectified flow, each with the scheduler's own alpha and sigma of that step.

    Returns:
        A tensor shaped like the step's sample, or None for a scheduler whose noise levels are kept
        in a way not known here.
    """
    given = inspect.signature(type(scheduler).step).bind(scheduler, *args, **kwargs).arguments
    output, sample = given.get("model_output"), given.get("sample")
    levels = _noise_levels(scheduler, given.get("timestep"))
    if levels is None or not isinstance(output, torch.Tensor):
        return None
    if not isinstance(sample, torch.Tensor) or output.shape != sample.shape:
        return None
    alpha, sigma = levels
    found: torch.Tensor | None = None
    match _prediction_type(scheduler):
        case "epsilon":
            found = (sample - sigma * output) / alpha
        case "v_prediction" if _is_variance_exploding(scheduler):
            scale = (sigma**2 + 1) ** 0.5
            found = sample / scale**2 - output * (sigma / scale)
        case "v_prediction":
            found = alpha * sample - sigma * output
        case "flow_prediction":
            found = sample - sigma * output
        case "sample":
            found = output
    return found


def replace_sample(result: Any, sample: torch.Tensor) -> Any:
    """Return a step's result with every tensor of the sample's shape replaced by the sample."""
    if isinstance(result, tuple):
        return tuple(sample if _is_like(item, sample) else item for item in result)
    for name, item in list(result.items()):
        if _is_like(item, sample):
            result[name] = sample
    return result


def _is_like(value: Any, sample: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == sample.shape


def _prediction_type(scheduler: Any) -> str:
    if _is_flow(scheduler):
        return "flow_prediction"
    return str(getattr(scheduler.config, "prediction_type", "epsilon"))


def _is_flow(scheduler: Any) -> bool:
    uses_flow = getattr(scheduler.config, "use_flow_sigmas", False)
    return "FlowMatch" in type(scheduler).__name__ or bool(uses_flow)


def _is_variance_exploding(scheduler: Any) -> bool:
    """Whether samples are kept unscaled, with noise added to them (as in k-diffusion)."""
    return hasattr(scheduler, "sigmas") and not hasattr(scheduler, "_sigma_to_alpha_sigma_t")


def _noise_levels(scheduler: Any, timestep: Any) -> tuple[Any, Any] | None:
    """Return alpha and sigma of the step just taken: its sample is alpha x0 + sigma noise."""
    sigmas, index = getattr(scheduler, "sigmas", None), getattr(scheduler, "step_index", None)
    if sigmas is not None and index is not None and index >= 1:
        sigma = sigmas[index - 1]
        if _is_flow(scheduler):
            return 1 - sigma, sigma
        if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
            alpha, sigma = scheduler._sigma_to_alpha_sigma_t(sigma)
            return alpha, sigma
        return 1.0, sigma
    products = getattr(scheduler, "alphas_cumprod", None)
    if products is None or timestep is None:
        return None
    product = products[int(timestep)]
    return product**0.5, (1 - product) ** 0.5
