"""Loads what a stage serves: finds the pipeline class, checks its contract, then loads weights.

Safetensors only; model code from outside diffusers only where the stage's config names it.
"""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import diffusers
import torch

from omni_engine.protocol.errors import ModelLoadError, PipelineContractError, nearest
from omni_engine.protocol.plans import WorkerSpec
from omni_engine.stages.contracts import LoadContext, check_contract

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "omni_engine.pipelines"


def load_pipeline(spec: WorkerSpec) -> Any:
    """Load a stage's pipeline onto its device.

    Returns:
        A diffusers pipeline, or an instance of a hand-written pipeline class.

    Raises:
        ModelLoadError: if files, class or access are missing.
        PipelineContractError: if a hand-written class lacks what it must have.
    """
    arguments = spec.engine_args
    _check_device(spec.device)
    cls = find_pipeline_class(spec)
    dtype = resolve_dtype(arguments["dtype"], spec.device)
    if not issubclass(cls, diffusers.DiffusionPipeline):
        check_contract(cls, step_execution=arguments["step_execution"])
        context = LoadContext(
            spec.model, spec.device, dtype, arguments["revision"], arguments["variant"]
        )
        return cls.load(context)
    pipe = _from_pretrained(cls, spec, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(spec.device)


def _check_device(device: str) -> None:
    kind = device.partition(":")[0]
    missing_cuda = kind == "cuda" and not torch.cuda.is_available()
    if missing_cuda or (kind == "mps" and not torch.backends.mps.is_available()):
        raise ModelLoadError(
            f"torch finds no {kind} device on this machine",
            field="devices",
            value=device,
            expected='a device that exists, such as "cpu", or "auto"',
        )


def resolve_dtype(name: str, device: str) -> str:
    """Return a torch dtype name; "auto" means float32 on a CPU and bfloat16 elsewhere."""
    if name != "auto":
        return name
    return "float32" if device == "cpu" else "bfloat16"


def find_pipeline_class(spec: WorkerSpec) -> type[Any]:
    """Return the class that the config names, or the one in the model's ``model_index.json``.

    Raises:
        ModelLoadError: if it can't be found, with the nearest name that exists.
    """
    if (named := spec.engine_args["pipeline"]) is not None:
        return _named_class(named)
    name = _class_name_of_model(spec)
    found = getattr(diffusers, name, None)
    if isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline):
        return found
    known = frozenset(n for n in dir(diffusers) if n.endswith("Pipeline"))
    close = nearest(name, known)
    raise ModelLoadError(
        f"diffusers {diffusers.__version__} has no pipeline class {name!r}",
        field="model_index.json:_class_name",
        value=name,
        expected="a pipeline class of diffusers, or one named by the stage's pipeline setting",
        hint=f"Did you mean {close!r}?" if close else "Set pipeline: 'module:Class' for your own.",
    )


def _class_name_of_model(spec: WorkerSpec) -> str:
    try:
        index = diffusers.DiffusionPipeline.load_config(
            spec.model, revision=spec.engine_args["revision"]
        )
    except (OSError, ValueError) as error:
        raise _cannot_load(spec, error) from None
    name = index.get("_class_name") if isinstance(index, dict) else None
    if isinstance(name, str):
        return name
    raise ModelLoadError(
        "model_index.json names no pipeline class",
        field="model_index.json:_class_name",
        value=name,
        expected="the name of a diffusers pipeline class",
        hint="Set the stage's pipeline: 'module:Class' if the model brings its own code.",
    )


def _named_class(named: str) -> type[Any]:
    if ":" in named:
        module_name, _, class_name = named.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except ImportError as error:
            raise ModelLoadError(
                f"can't import the module of pipeline {named!r}: {error}",
                field="pipeline",
                value=named,
                expected="an importable 'module:Class'",
            ) from None
        except AttributeError:
            raise ModelLoadError(
                f"module {module_name!r} has no class {class_name!r}",
                field="pipeline",
                value=named,
                expected="an importable 'module:Class'",
            ) from None
    else:
        points = entry_points(group=ENTRY_POINT_GROUP)
        if named not in points.names:
            raise ModelLoadError(
                f"no installed package offers a pipeline named {named!r}",
                field="pipeline",
                value=named,
                expected=", ".join(sorted(points.names)) or "'module:Class'",
            )
        found = points[named].load()
    if not isinstance(found, type):
        raise PipelineContractError(
            f"{named!r} is not a class", field="pipeline", value=named, expected="a class"
        )
    return found


def _from_pretrained(cls: type[Any], spec: WorkerSpec, dtype: str) -> Any:
    arguments = spec.engine_args
    try:
        return cls.from_pretrained(
            spec.model,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            revision=arguments["revision"],
            variant=arguments["variant"],
            trust_remote_code=arguments["trust_remote_code"],
        )
    except (OSError, ValueError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise _cannot_load(spec, error) from None


def _cannot_load(spec: WorkerSpec, error: Exception) -> ModelLoadError:
    if Path(spec.model).is_dir():
        hint = "Check that the folder is a complete diffusers folder with .safetensors weights."
    else:
        hint = "A hub id needs network access (and HF_TOKEN for gated models) or a filled cache."
    return ModelLoadError(
        f"can't load model {spec.model!r}: {type(error).__name__}: {error}",
        field="model",
        value=spec.model,
        expected="a local diffusers folder or a hub id, with safetensors weights",
        hint=hint,
    )


def parameter_bytes(pipe: Any) -> int:
    """Return the bytes that a pipeline's modules hold in parameters and buffers."""
    components = getattr(pipe, "components", {}) or {}
    modules = [m for m in components.values() if isinstance(m, torch.nn.Module)]
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    return sum(t.numel() * t.element_size() for t in tensors)
