"""Turns an adapter's file into plain tensors per layer, by diffusers' own loaders.

They load it into a copy of the pipeline without weights: what they would put where, and at which
scale, is noted there, and no layer of the served model is touched. All of it happens in the calling
thread: new layers are made on the meta device by a thread's own default, which draws no random
numbers, and not by PEFT's ``low_cpu_mem_usage``, which patches ``nn.Module`` for all threads.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from diffusers import ModelMixin
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from omni_engine.protocol.errors import AdapterError, shorten
from omni_engine.worker.adapter_file import AdapterFile, unusable
from omni_engine.worker.adapter_matching import DOWN, UP, Pairs, match
from omni_engine.worker.adapter_trace import TensorTrace
from omni_engine.worker.adapter_weights import LayerWeights
from omni_engine.worker.weightless import fresh_copy, shallow_copy, without_weights

_NAME = "adapter"
_SECOND = "transformer_2"
_LOGGERS = ("lora_base", "lora_conversion_utils", "lora_pipeline", "peft")


class AdapterConverter:
    """Converts adapters for one pipeline.

    Args:
        pipe: any pipeline. It must be as diffusers made it: wrapped modules would be copied.
    """

    def __init__(self, pipe: Any) -> None:
        self.components: dict[str, nn.Module] = {}
        self._pipe: Any = None
        self._refusal = f"{type(pipe).__name__} has no loader for LoRA adapters"
        if not hasattr(pipe, "load_lora_weights"):
            return
        try:
            self._pipe = without_weights(pipe)
        # boundary: a model that can't be copied can be served all the same, without adapters
        except Exception as error:  # noqa: BLE001
            self._refusal = f"{type(pipe).__name__} can't be copied without its weights: {error}"
            return
        for component in self._pipe._lora_loadable_modules:
            module = getattr(self._pipe, component, None)
            if isinstance(module, nn.Module):
                self.components[component] = module

    def convert(self, file: AdapterFile) -> dict[str, LayerWeights]:
        """Return an adapter's weights by "component.module.path".

        Raises:
            AdapterError: if diffusers can't load it, or the model lacks some of its layers, or
                they don't fit.
        """
        if self._pipe is None or not self.components:
            raise unusable(file.name, self._refusal)
        if _needs_header(self._pipe) and "alpha" in file.header:
            raise unusable(file.name, "its alpha stands in the file's header alone")
        layers: dict[str, LayerWeights] = {}
        first, second = _split(file, self.components)
        targets = {name: (name, m) for name, m in self.components.items() if name != _SECOND}
        if first:
            layers |= self._load(file, first, file.settings, targets)
        if second:
            own = {"transformer": (_SECOND, self.components[_SECOND])}
            settings = _settings_of_second(file.settings)
            layers |= self._load(file, second, settings, own, load_into_transformer_2=True)
        return layers

    def _load(
        self,
        file: AdapterFile,
        keys: Mapping[str, str],
        settings: Mapping[str, Any] | None,
        targets: dict[str, tuple[str, nn.Module]],
        **options: Any,
    ) -> dict[str, LayerWeights]:
        """Load some of a file's tensors, given by the names to load them under."""
        loading = _Loading(file, keys, settings, targets)
        try:
            with _quiet():
                return loading.run(shallow_copy(self._pipe), **options)
        except AdapterError:
            raise
        # boundary: converters raise anything on files that they don't know
        except Exception as error:  # noqa: BLE001
            reason = f"{type(error).__name__}: {shorten(' '.join(str(error).split()), 400)}"
            raise unusable(file.name, f"diffusers can't load it: {reason}") from None


class _Loading:
    """One adapter on its way into copies of the components that it is for."""

    def __init__(
        self,
        file: AdapterFile,
        keys: Mapping[str, str],
        settings: Mapping[str, Any] | None,
        targets: dict[str, tuple[str, nn.Module]],
    ) -> None:
        self._file, self._keys, self._settings, self._targets = file, keys, settings, targets
        self._matched: dict[str, Pairs] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def run(self, pipe: Any, **options: Any) -> dict[str, LayerWeights]:
        pipe.__dict__["lora_state_dict"] = partial(self._convert, pipe)
        tensors = {name: self._file.tensors[key] for name, key in self._keys.items()}
        pipe.load_lora_weights(tensors, adapter_name=_NAME, low_cpu_mem_usage=False, **options)
        layers: dict[str, LayerWeights] = {}
        for component, pairs in self._matched.items():
            layers |= self._layers(component, getattr(pipe, component), pairs)
        return layers

    def _convert(self, pipe: Any, state_dict: Any, **options: Any) -> Any:
        """Stand in for ``lora_state_dict``: the same, checked, and with the file's settings.

        The components that the file is for are ready to be loaded into after that.
        """
        layer_of = {
            key: layer
            for layer, keys in self._file.layers.items()
            for key in (keys.down, keys.up)
            if key in self._keys.values()
        }
        trace = TensorTrace({key: self._file.tensors[key] for key in layer_of})
        with trace:
            result = type(pipe).lora_state_dict(state_dict, **options)
        converted, *rest = result if isinstance(result, tuple) else (result,)
        self._matched = match(self._file, layer_of, converted, self._targets, trace)
        for component in self._matched:
            module = pipe.__dict__[component] = fresh_copy(getattr(pipe, component))
            _load_on_meta(module, partial(self._note, component))
        if not options.get("return_lora_metadata"):
            return result
        settings = None if self._settings is None else dict(self._settings)
        return (converted, *rest[:-1], settings)

    def _note(self, component: str, state_dict: Mapping[str, Tensor]) -> None:
        self._loaded.setdefault(component, {}).update(state_dict)

    def _layers(self, component: str, module: nn.Module, pairs: Pairs) -> dict[str, LayerWeights]:
        """Return what was loaded into a component, which must be all that was meant for it."""
        loaded, layers, taken = self._loaded.get(component, {}), {}, set[int]()
        for path in pairs:
            layer = module.get_submodule(path)
            down, up = (loaded.get(path + side) for side in (DOWN, UP))
            if not isinstance(layer, LoraLayer) or down is None or up is None:
                raise self._unusable(component, path, "diffusers leaves it out")
            if layer.lora_variant or layer.lora_bias[_NAME]:
                raise self._unusable(component, path, "it is no plain LoRA")
            shapes = layer.lora_A[_NAME].weight.shape, layer.lora_B[_NAME].weight.shape
            if (down.shape, up.shape) != shapes:
                rank = layer.r[_NAME]
                raise self._unusable(
                    component, path, f"its settings say rank {rank}, its weights {down.shape[0]}"
                )
            scaling = float(layer.scaling[_NAME])
            if not math.isfinite(scaling):
                raise self._unusable(component, path, f"its alpha makes a scale of {scaling}")
            layers[f"{component}.{path}"] = LayerWeights(
                _own(down, taken), _own(up, taken), scaling
            )
        return layers

    def _unusable(self, component: str, path: str, reason: str) -> AdapterError:
        return unusable(self._file.name, f"at {component}.{path}, {reason}")


def _load_on_meta(module: nn.Module, note: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Make a component of a copy pass on what is loaded into it, instead of taking it."""

    def note_peft(state_dict: Mapping[str, Tensor], *_: Any, **__: Any) -> _IncompatibleKeys:
        note({key.replace(f".{_NAME}.weight", ".weight"): t for key, t in state_dict.items()})
        return _IncompatibleKeys([], [])

    def load_lora_adapter(*args: Any, **options: Any) -> None:
        with torch.device("meta"):
            type(module).load_lora_adapter(module, *args, **options)  # type: ignore[attr-defined]

    def load_adapter(*, adapter_state_dict: Any, peft_config: Any, **_: Any) -> None:
        """Stand in for transformers' loader, which would load weights of the model as well."""
        with torch.device("meta"):
            inject_adapter_in_model(peft_config, module, _NAME)
        note(adapter_state_dict)

    if isinstance(module, ModelMixin):
        module.__dict__["load_state_dict"] = note_peft
        module.__dict__["load_lora_adapter"] = load_lora_adapter
    else:
        module.__dict__["load_adapter"] = load_adapter


def _split(
    file: AdapterFile, components: Mapping[str, nn.Module]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a file's keys by the names to load them under: into the pipeline, the second expert.

    Diffusers' loaders know one transformer a file; those that have a second take the same names
    for it in a file of its own.
    """
    prefix = f"{_SECOND}."
    is_second = [key for key in file.tensors if key.startswith(prefix) and _SECOND in components]
    second = {f"transformer.{key.removeprefix(prefix)}": key for key in is_second}
    return {key: key for key in file.tensors if key not in is_second}, second


def _settings_of_second(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    prefix = f"{_SECOND}."
    own = {
        f"transformer.{key.removeprefix(prefix)}": value
        for key, value in (settings or {}).items()
        if key.startswith(prefix)
    }
    return own or None


def _needs_header(pipe: Any) -> bool:
    """Whether a pipeline's converter reads the header of a file, which it isn't given."""
    function = inspect.unwrap(type(pipe).lora_state_dict.__func__)
    return "file_metadata" in function.__code__.co_varnames


def _own(tensor: Tensor, taken: set[int]) -> Tensor:
    """Return a tensor with memory of its own; ``taken`` is what others have.

    Converters split what the file holds as one, and give several layers the same half.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
        tensor = tensor.clone()
    tensor = tensor.detach().contiguous()
    taken.add(tensor.untyped_storage().data_ptr())
    return tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what diffusers says of missing parts out of this thread's log: it is checked here."""
    thread = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(f"diffusers.loaders.{name}") for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_another_thread)
