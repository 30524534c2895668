"""What is wrong with a configuration's data, in words: single values and relations between them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import ErrorDetails

from omni_engine.protocol.errors import ConfigError, nearest, shorten
from omni_engine.stages import config as schema
from omni_engine.stages.config_words import allowed, known_keys
from omni_engine.stages.curve_checks import curve_problems
from omni_engine.stages.yaml_source import Loc, dotted

_STAGE: Loc = ("stage_args", 0)

OVERRIDES: dict[str, Loc] = {
    "endpoint": ("endpoint",),
    "shutdown_timeout_s": ("shutdown_timeout_s",),
    "result_ttl_s": ("result_ttl_s",),
    "name": (*_STAGE, "name"),
    "curve_secret_key": ("curve", "secret_key"),
    "curve_clients": ("curve", "clients"),
    **{name: ("http", name) for name in schema.HttpArgs.model_fields if name != "result_ttl_s"},
    "http_result_ttl_s": ("http", "result_ttl_s"),
    **{name: ("limits", name) for name in schema.Limits.model_fields},
    **{name: (*_STAGE, "engine_args", name) for name in schema.EngineArgs.model_fields},
    **{name: (*_STAGE, "runtime", name) for name in schema.RuntimeArgs.model_fields},
}
"""Every option that can be overridden, and the place of its value in the configuration."""

SECRETS: frozenset[Loc] = frozenset({("http", "api_key"), ("http", "admin_key")})
"""Places of values that are never shown."""


class Finding(NamedTuple):
    """Something wrong at a place of the data."""

    loc: Loc
    message: str
    hint: str | None = None
    unsupported: bool = False


def walk(data: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Yield every value inside ``data`` with its place, ``data`` itself first."""
    yield loc, data
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from walk(value, (*loc, key))


def dig(data: Any, *loc: str | int) -> Any:
    """Return the value at a place of nested mappings; None if there is none."""
    for part in loc:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def explain(error: ErrorDetails) -> Finding:
    """Put one of pydantic's errors into words."""
    loc, kind, value = error["loc"], error["type"], error["input"]
    if "extra_args" in loc:
        loc = loc[: loc.index("extra_args") + 2]  # pydantic goes on with the kinds it tried
    if kind == "extra_forbidden":
        return Finding(loc, "unknown key", _key_hint(loc))
    wanted = "a finite number" if kind == "finite_number" else allowed(loc)
    if kind == "missing":
        return Finding(loc, f"is missing; expected {wanted}")
    message = f"expected {wanted}, got {'something else' if loc in SECRETS else _shown(value)}"
    return Finding(loc, message, _value_hint(kind, value, wanted))


def _key_hint(loc: Loc) -> str:
    known, key = known_keys(loc[:-1]), str(loc[-1])
    if key in OVERRIDES:
        parents = ".".join(part for part in OVERRIDES[key][:-1] if isinstance(part, str))
        return f"it belongs under {parents}" if parents else "it belongs to the top level"
    close = nearest(key, known)
    return f"did you mean {close}?" if close else f"known here: {', '.join(known)}"


_BOOLEANS = {"on": "true", "yes": "true", "true": "true"}
_BOOLEANS |= {"off": "false", "no": "false", "false": "false"}


def _value_hint(kind: str, value: object, wanted: str) -> str | None:
    if kind == "string_type" and isinstance(value, int | float):
        return "put it in quotes"
    if not isinstance(value, str):
        return None
    if kind == "literal_error":
        close = nearest(value, wanted.removeprefix("one of ").split(", "))
        return f"did you mean {close}?" if close else None
    if kind == "bool_type" and value.lower() in _BOOLEANS:
        return f"write {_BOOLEANS[value.lower()]} without quotes"
    if kind in ("int_type", "float_type") and re.fullmatch(r"[-+]?[\d.]{1,9}(e[-+]?\d)?", value):
        return f"write {float(value):.15g} without quotes"
    return None


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"a string ({json.dumps(shorten(value), ensure_ascii=False)})"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    words = {"None": "null", "True": "true (a boolean)", "False": "false (a boolean)"}
    return words.get(repr(value), shorten(value))


_LIMITED = {
    "height": "max_side",
    "width": "max_side",
    "num_frames": "max_frames",
    "num_inference_steps": "max_steps",
    "num_outputs_per_prompt": "max_outputs_per_prompt",
}


def relations(data: Any) -> Iterator[Finding]:
    """Yield what is wrong between values; single wrong values and wrong types are passed over."""
    stages = dig(data, "stage_args")
    ids: dict[Loc, object] = {}
    names: dict[Loc, object] = {}
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        at, args = ("stage_args", index), dig(stage, "engine_args")
        ids[(*at, "stage_id")] = dig(stage, "stage_id")
        names[(*at, "name")] = dig(stage, "name")
        if names[(*at, "name")] is None and isinstance(dig(args, "model"), str):
            names[(*at, "engine_args", "model")] = schema.model_name(args["model"])
        yield from _adapter_findings(args, (*at, "engine_args"))
        yield from _adapter_count_findings(data, args, (*at, "engine_args"))
        yield from _adapter_room_findings(args, (*at, "engine_args"))
        yield from _useless_adapter_findings(args, (*at, "engine_args"))
        yield from _default_findings(data, args, (*at, "engine_args", "default_sampling_params"))
        yield from _useless_findings(args, dig(stage, "runtime"), at)
    yield from _repeated(ids)
    yield from _repeated(names)


def connection_findings(data: Any) -> Iterator[Finding]:
    """Yield what is wrong with where clients connect and with its keys."""
    keys = (dig(data, "curve", name) for name in schema.CurveArgs.model_fields)
    for place, error in curve_problems(dig(data, "endpoint"), *keys):
        yield Finding(tuple(place.split(".")), error.message, error.hint)


def _repeated(values: Mapping[Loc, object]) -> Iterator[Finding]:
    first: dict[object, Loc] = {}
    for loc, value in values.items():
        if isinstance(value, int | str) and first.setdefault(value, loc) != loc:
            message = f"{value!r} is in use already, by {dotted(first[value])}"
            hint = "give the stage a name of its own" if loc[-1] == "model" else "choose another"
            yield Finding(loc, message, hint)


def _adapter_findings(args: Any, at: Loc) -> Iterator[Finding]:
    modules = dig(args, "lora_modules")
    names: dict[Loc, object] = {}
    for index, module in enumerate(modules if isinstance(modules, list) else ()):
        loc, path = (*at, "lora_modules", index), dig(module, "path")
        names[(*loc, "name")] = dig(module, "name")
        try:
            if isinstance(path, str) and path.strip():
                schema.resolve_adapter(path, "")
        except ConfigError as error:
            yield Finding((*loc, "path"), error.message, error.hint)
    yield from _repeated(names)
    folders = dig(args, "lora_dirs")
    for index, folder in enumerate(folders if isinstance(folders, list) else ()):
        if isinstance(folder, str) and folder.strip() and not os.path.isdir(folder):
            yield Finding((*at, "lora_dirs", index), f"there is no folder {folder}")
    default, known = dig(args, "default_lora", "name"), {str(name) for name in names.values()}
    if isinstance(default, str) and default not in known:
        close = nearest(default, known)
        hint = f"did you mean {close}?" if close else "register it in lora_modules"
        yield Finding((*at, "default_lora", "name"), f"no adapter {default!r} is registered", hint)


def _adapter_count_findings(data: Any, args: Any, at: Loc) -> Iterator[Finding]:
    modules, most = dig(args, "lora_modules"), _limit(data, "max_adapters")
    if isinstance(modules, list) and len(modules) > most:
        message = f"{len(modules)} adapters are more than limits.max_adapters allows ({most})"
        yield Finding((*at, "lora_modules"), message)


def _adapter_room_findings(args: Any, at: Loc) -> Iterator[Finding]:
    """Yield what asks for more adapters in memory than may be there."""
    most, kept = _count(args, "max_loras"), _count(args, "max_cpu_loras")
    pins, preloads = (_flagged(args, flag) for flag in ("pin", "preload"))
    mixed = _mixed_limit(args)
    needed = len(pins) + (mixed or 1)
    if most is not None and needed > most:
        others = f"{mixed} of max_mixed_adapters" if mixed else "1 for all others"
        message = f"max_loras is {most}, but {len(pins)} pinned adapters and {others} need {needed}"
        loc: Loc = ("max_mixed_adapters",) if mixed else pins[-1] if pins else ("max_loras",)
        yield Finding((*at, *loc), message, f"set max_loras to {needed} at least")
    if most is not None and kept is not None and len(preloads) > max(most, kept):
        message = f"{len(preloads)} adapters are preloaded, but a worker keeps {max(most, kept)}"
        yield Finding((*at, *preloads[-1]), message, "raise max_cpu_loras, or preload fewer")


def _flagged(args: Any, flag: str) -> list[Loc]:
    """Return the places of a flag, below the stage's arguments, where it is set for an adapter."""
    modules = dig(args, "lora_modules")
    numbered = enumerate(modules if isinstance(modules, list) else ())
    return [("lora_modules", i, flag) for i, module in numbered if dig(module, flag) is True]


def _mixed_limit(args: Any) -> int | None:
    """Return how many adapters a batch may hold, where that is set."""
    limit = dig(args, "max_mixed_adapters")
    return limit if dig(args, "mixed_lora") is True and type(limit) is int and limit > 0 else None


def _count(args: Any, name: str) -> int | None:
    """Return a setting of at least 1, or its default; None if it is wrong in itself."""
    given = dig(args, name)
    value = schema.EngineArgs.model_fields[name].default if given is None else given
    return value if type(value) is int and value > 0 else None


def _useless_adapter_findings(args: Any, at: Loc) -> Iterator[Finding]:
    mixed, merged = dig(args, "mixed_lora") is True, dig(args, "lora_merge") == "auto"
    if dig(args, "max_mixed_adapters") is not None and not mixed:
        message = "max_mixed_adapters has no effect without mixed_lora"
        loc = (*at, "max_mixed_adapters")
        yield Finding(loc, message, "set mixed_lora: true", unsupported=True)
    if merged and dig(args, "deterministic") is True:
        message = (
            "with lora_merge a picture depends, by rounding, on what ran before, "
            "and deterministic rules that out"
        )
        yield Finding((*at, "lora_merge"), message, "leave one of them out", unsupported=True)
    if not dig(args, "lora_modules") and not dig(args, "lora_dirs"):
        for name in [*["mixed_lora"] * mixed, *["lora_merge"] * merged]:
            message = f"{name} has no effect without adapters"
            hint = "register adapters in lora_modules, or set lora_dirs"
            yield Finding((*at, name), message, hint, unsupported=True)


def _default_findings(data: Any, args: Any, at: Loc) -> Iterator[Finding]:
    defaults = dig(args, at[-1])
    for key, limit in _LIMITED.items():
        value, most = dig(defaults, key), _limit(data, limit)
        if isinstance(value, int) and value > most:
            yield Finding((*at, key), f"{value} is more than limits.{limit} allows ({most})")
    height, width = dig(defaults, "height"), dig(defaults, "width")
    most = _limit(data, "max_pixels")
    if isinstance(height, int) and isinstance(width, int) and height * width > most:
        message = f"{height} x {width} pixels are more than limits.max_pixels allows ({most})"
        yield Finding(at, message)
    negative, most = dig(defaults, "negative_prompt"), _limit(data, "max_prompt_chars")
    if isinstance(negative, str) and len(negative) > most:
        message = (
            f"{len(negative)} characters are more than limits.max_prompt_chars allows ({most})"
        )
        yield Finding((*at, "negative_prompt"), message)
    yield from _default_sum_findings(data, args, at)


def _default_sum_findings(data: Any, args: Any, at: Loc) -> Iterator[Finding]:
    """Yield which bound of a whole request the default parameters pass together."""
    defaults = dig(args, at[-1])
    rows = dig(defaults, "num_outputs_per_prompt")
    most = dig(args, "max_batch_rows")
    if isinstance(rows, int) and isinstance(most, int) and rows > most:
        message = f"{rows} is more than max_batch_rows allows ({most})"
        yield Finding((*at, "num_outputs_per_prompt"), message)
    given = [dig(defaults, name) for name in ("height", "width", "num_frames")]
    pixels = math.prod(value for value in (rows, *given) if isinstance(value, int))
    bounds = {"limits.max_request_pixels": _limit(data, "max_request_pixels")}
    if isinstance(work := dig(args, "max_batch_work"), int):
        bounds["max_batch_work"] = work
    for name, most in bounds.items():
        if pixels > most:
            yield Finding(at, f"{pixels} pixels in all are more than {name} allows ({most})")


def _limit(data: Any, name: str) -> int:
    value = dig(data, "limits", name)
    default: int = schema.Limits.model_fields[name].default
    return value if isinstance(value, int) else default


def _useless_findings(args: Any, runtime: Any, at: Loc) -> Iterator[Finding]:
    """Yield what can't take effect: it is refused, not ignored."""
    inside, model, devices = (*at, "engine_args"), dig(args, "model"), dig(runtime, "devices")
    stepped = dig(args, "step_execution") is True
    if dig(args, "cache_backend") is not None:
        message = (
            "step caches keep state in the shared model, so requests that are stepped together "
            "would read each other's"
            if stepped
            else "step caches are not available in this version"
        )
        yield Finding((*inside, "cache_backend"), message, "leave it out", unsupported=True)
    if stepped and dig(args, "request_batch_max_wait_ms"):
        message = "request_batch_max_wait_ms has no effect with step_execution"
        hint = "leave it out: requests join a running batch at its next step"
        yield Finding((*inside, "request_batch_max_wait_ms"), message, hint, unsupported=True)
    for name in ("step_quantum", "max_resident_groups", "max_stall_ms"):
        if not stepped and dig(args, name) not in (
            None,
            schema.EngineArgs.model_fields[name].default,
        ):
            message = f"{name} has no effect without step_execution"
            yield Finding((*inside, name), message, "set step_execution: true", unsupported=True)
    if isinstance(model, str) and model.endswith((".yaml", ".yml")):
        hint = "use --config FILE on the command line, config=FILE in Python"
        yield Finding((*inside, "model"), f"{model} is a deploy file, not a model", hint)
    elif isinstance(model, str) and os.path.isabs(model) and not os.path.isdir(model):
        yield Finding((*inside, "model"), f"there is no folder {model}")
    is_local = isinstance(model, str) and (model == "bundled" or os.path.isabs(model))
    if is_local and isinstance(dig(args, "revision"), str):
        message = "a revision has no effect on a local model"
        yield Finding((*inside, "revision"), message, "leave it out", unsupported=True)
    if dig(args, "scheduling_policy") == "fifo" and dig(args, "max_skip_ms") is not None:
        message = "max_skip_ms has no effect with scheduling_policy fifo, which skips no request"
        yield Finding((*inside, "max_skip_ms"), message, "leave it out", unsupported=True)
    named = schema.parse_devices(devices) if isinstance(devices, str) else ("auto",)
    if len(set(named)) < len(named):
        message = f"{devices!r} names a device twice"
        yield Finding((*at, "runtime", "devices"), message, "use replicas for several workers")
    if dig(runtime, "threads") is not None and not {"auto", "cpu"} & set(named):
        message = f"threads have no effect on {devices}: they are for CPU workers"
        yield Finding((*at, "runtime", "threads"), message, "leave it out", unsupported=True)
