"""What a certificate depends on: the model's files, the code that runs it, the device."""

from __future__ import annotations

import importlib.metadata
import inspect
import platform
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from omni_engine.protocol.plans import WorkerSpec
from omni_engine.worker.loading import resolve_dtype

_LIBRARIES = ("torch", "diffusers", "transformers", "omni-engine")
_MODEL_FILES = frozenset({".json", ".safetensors", ".model", ".txt", ".jinja", ".py"})
_MAX_DEPTH = 4
_OUR_CODE = Path(__file__).parent


def certificate_key(pipe: Any, spec: WorkerSpec, version: int) -> dict[str, Any] | None:
    """Return what a certificate of a loaded pipeline depends on, as plain values.

    Args:
        pipe: a diffusers pipeline.
        spec: what it was loaded from, and where to.
        version: of the certification itself.

    Returns:
        None where the model's files can't be told: its certificate can't be kept.
    """
    try:
        files = _files(spec)
        code = _code(pipe)
    except (OSError, ValueError):  # ValueError: no name of a hub model
        return None
    if files is None:
        return None
    arguments = spec.engine_args
    return {
        "certification": version,
        "pipeline": f"{type(pipe).__module__}:{type(pipe).__qualname__}",
        "files": files,
        "code": code,
        "variant": arguments["variant"],
        "dtype": resolve_dtype(arguments["dtype"], spec.device),
        "device": _device_name(spec.device),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def _files(spec: WorkerSpec) -> str | None:
    """Return the fingerprint of a folder's files, or a hub model's commit."""
    folder = Path(spec.model)
    if folder.is_dir():
        return "folder " + _digest(_listed(folder, folder, _MAX_DEPTH))
    revision = spec.engine_args["revision"]
    found = try_to_load_from_cache(spec.model, "model_index.json", revision=revision)
    if not isinstance(found, str):
        return None
    return "commit " + Path(found).parent.name  # .../snapshots/COMMIT/model_index.json


def _listed(folder: Path, root: Path, depth: int) -> Iterator[str]:
    """Yield name, size and time of change of the files below a folder that make up a model."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if depth:
                yield from _listed(path, root, depth - 1)
        elif path.suffix in _MODEL_FILES:
            yield f"{path.relative_to(root)} {_state(path)}"


def _code(pipe: Any) -> str:
    """Return the fingerprint of this package's code and of a model's own classes."""
    ours = [f"{path.name} {_state(path)}" for path in sorted(_OUR_CODE.glob("*.py"))]
    classes = {type(pipe), *(type(part) for part in pipe.components.values())}
    sources = {_source(cls) for cls in classes} - {None}
    return _digest(
        ours + [f"{path} {_state(Path(path))}" for path in sorted(filter(None, sources))]
    )


def _source(cls: type[Any]) -> str | None:
    """Return the file of a class that no version number stands for."""
    if cls.__module__.partition(".")[0] in ("builtins", "diffusers", "transformers"):
        return None
    try:
        return inspect.getsourcefile(cls)
    except TypeError:  # built in, or defined where there is no file
        return None


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def _digest(lines: Any) -> str:
    return sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()


def _device_name(device: str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        return f"cuda {torch.cuda.get_device_name(torch.device(device))}"
    return f"{kind} {platform.machine()} {_cpu_name()}"


def _cpu_name() -> str:
    """Return the processor's model as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
