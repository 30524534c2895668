"""Certifies at load that requests under different adapters may share a forward.

Requests under made-up adapters, different, composed and none, are run alone and together; each must
come out the same. Models that don't keep a request's rows together in the inputs of their layers
fail this, and then requests share forwards under equal adapters only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omni_engine.protocol.adapters import Adapter, AdapterActivation
from omni_engine.protocol.plans import PipelineCapabilities
from omni_engine.protocol.requests import DiffusionRequest
from omni_engine.worker.adapter_runtime import AdapterRuntime
from omni_engine.worker.adapter_weights import AdapterWeights, LayerWeights
from omni_engine.worker.certification import (
    UNFUSED,
    named_denoisers,
    run_requests,
    tolerance_of,
)
from omni_engine.worker.failures import text_of
from omni_engine.worker.fusion_report import FusionReport
from omni_engine.worker.synthetic import RequestMaker, certification_requests
from omni_engine.worker.views import text_encoders

logger = logging.getLogger(__name__)

_RANKS = {"first": 4, "second": 8}
_UPDATE_SIZE = 0.1
"""How large an update is beside what it is added to: far above the tolerance."""

_ROUNDING_MARGIN = 3.0
"""In half precision: how much more than without adapters results may differ."""


@dataclass(frozen=True, slots=True)
class MixingReport:
    """What was found: whether mixed forwards are exact, and in words."""

    exact: bool
    note: str


def certify_mixing(
    pipe: Any, report: FusionReport, capabilities: PipelineCapabilities
) -> MixingReport:
    """Run requests under different adapters alone and together, and compare.

    Args:
        pipe: a diffusers pipeline that takes adapters; nothing wraps it.
        report: what its requests may share.
        capabilities: what it takes.
    """
    if not report.fused:
        return _refused("requests share no forwards")
    if text_encoders(pipe) and not report.encoders:  # nobody would know whose words they encode
        return _refused("its text encoders can't be suspended")
    failure = ""
    for inputs in dict.fromkeys((capabilities.required_inputs, capabilities.inputs)):
        requests = certification_requests(RequestMaker(pipe, capabilities, inputs))
        try:
            bare, _ = run_requests(pipe, requests, UNFUSED)
            return _compare(pipe, report, requests, bare)
        except Exception as error:  # noqa: BLE001  # boundary: certification; adapters are grouped instead
            failure = text_of(error)
    return _refused(f"certification failed ({failure})")


def _compare(
    pipe: Any,
    report: FusionReport,
    requests: list[DiffusionRequest],
    bare: list[npt.NDArray[np.float64]],
) -> MixingReport:
    runtime = AdapterRuntime(pipe, _MadeUpAdapters(pipe), max_loras=2, max_cpu_loras=2)
    try:
        return _judge(pipe, report, requests, bare, runtime)
    finally:
        runtime.close()


def _judge(
    pipe: Any,
    report: FusionReport,
    requests: list[DiffusionRequest],
    bare: list[npt.NDArray[np.float64]],
    runtime: AdapterRuntime,
) -> MixingReport:
    for request, activation in zip(requests, _activations(), strict=True):
        runtime.assign(request.request_id, activation)
    alone, _ = run_requests(pipe, requests, UNFUSED, adapters=runtime)
    mixed, stepper = run_requests(pipe, requests, report, adapters=runtime, mix_adapters=True)
    allowed = tolerance_of(pipe)
    if not _worst(bare, alone) > allowed:
        return _refused("adapters have no effect on its results")
    if stepper.fallbacks:
        return _refused("its layers' inputs don't keep requests apart")
    worst = _worst(alone, mixed)
    if not worst <= allowed:
        together, _ = run_requests(pipe, requests, report)
        if _is_float32(pipe) or not worst <= _ROUNDING_MARGIN * _worst(bare, together):
            return _refused(f"mixed forwards differ from single ones by {worst:.1e}")
    return MixingReport(
        True, f"requests with different adapters share forwards (from single ones {worst:.1e})"
    )


def _refused(why: str) -> MixingReport:
    logger.warning("adapters are not mixed: %s", why)
    return MixingReport(False, f"adapters are not mixed: {why}")


def _activations() -> list[AdapterActivation | None]:
    first, second = (Adapter(name, "", name) for name in _RANKS)
    return [
        AdapterActivation((first,), (1.0,)),
        AdapterActivation((second,), (0.7,)),
        None,
        AdapterActivation((first, second), (0.5, -0.5)),
    ]


def _worst(ones: list[npt.NDArray[np.float64]], others: list[npt.NDArray[np.float64]]) -> float:
    """Return the largest difference; not a number where one result is that."""
    pairs = zip(ones, others, strict=True)
    return float(np.max([np.abs(one - other).max() for one, other in pairs]))


def _is_float32(pipe: Any) -> bool:
    parameters = (p for module in named_denoisers(pipe).values() for p in module.parameters())
    return next(parameters).dtype in (torch.float32, torch.float64)


class _MadeUpAdapters:
    """Stands for a library: adapters of every layer of the denoisers, made up from their names."""

    def __init__(self, pipe: Any) -> None:
        self._layers = dict(_target_layers(pipe))

    def check(self, name: str, path: str) -> Any:
        """Never called: nothing registers made-up adapters."""
        raise NotImplementedError(f"{name} {path}")

    def fetch(self, adapter: Adapter) -> AdapterWeights:
        """Return an adapter's weights; the same for the same name."""
        rank = _RANKS[adapter.digest]
        generator = torch.Generator().manual_seed(rank)
        layers = {path: _made_up(layer, rank, generator) for path, layer in self._layers.items()}
        return AdapterWeights(adapter.digest, layers)


def _target_layers(pipe: Any) -> Iterator[tuple[str, torch.nn.Linear]]:
    for component, module in named_denoisers(pipe).items():
        for path, layer in module.named_modules():
            if type(layer) is torch.nn.Linear and layer.weight.is_floating_point():
                yield f"{component}.{path}", layer


def _made_up(layer: torch.nn.Linear, rank: int, generator: torch.Generator) -> LayerWeights:
    size = _UPDATE_SIZE * float(layer.weight.float().std()) * math.sqrt(layer.in_features / rank)
    down = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
    up = torch.randn(layer.out_features, rank, generator=generator) * size
    return LayerWeights(down, up, 1.0)
