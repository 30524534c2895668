"""Effective settings: command line or constructor over deploy file over default, with origins.

Public names: ``load_settings``, ``Settings``, ``OVERRIDES``, ``Origin``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omni_engine.protocol.errors import ConfigError, nearest, shorten
from omni_engine.stages import config as schema
from omni_engine.stages.yaml_source import ConfigProblem, Loc, Mark, config_error, dotted, read_yaml

Origin = Literal["command line", "constructor"]

_BUNDLED_FILE = Path(__file__).with_name("bundled.yaml")
_STAGE: Loc = ("stage_args", 0)

OVERRIDES: dict[str, Loc] = {
    "endpoint": ("endpoint",),
    "name": (*_STAGE, "name"),
    **{name: ("limits", name) for name in schema.Limits.model_fields},
    **{name: (*_STAGE, "engine_args", name) for name in schema.EngineArgs.model_fields},
    **{name: (*_STAGE, "runtime", name) for name in schema.RuntimeArgs.model_fields},
}
"""Every option that can be overridden, and the place of its value in the configuration."""


@dataclass(frozen=True)
class Settings:
    """The effective configuration and where each of its values came from."""

    config: schema.DeployConfig
    _origins: Mapping[str, str]

    def origin(self, path: str) -> str:
        """Return ``default``, ``command line``, ``constructor`` or ``FILE:LINE``.

        Args:
            path: dotted, as in ``rows``; a value that was given nowhere is a default.
        """
        return self._origins.get(path, "default")

    def rows(self) -> list[tuple[str, object, str]]:
        """Return (dotted path, effective value, origin) of every value, in the file's order."""
        data = self.config.model_dump(mode="json")
        for stage, dumped in zip(self.config.stage_args, data["stage_args"], strict=True):
            dumped["name"] = stage.display_name
            defaults = stage.engine_args.default_sampling_params.given()
            dumped["engine_args"]["default_sampling_params"] = defaults
        leaves = {dotted(loc): value for loc, value in _walk(data) if not _has_items(value)}
        return [(path, value, self.origin(path)) for path, value in leaves.items()]


def load_settings(
    *,
    config_path: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    origin: Origin = "command line",
) -> Settings:
    """Load the effective settings.

    Args:
        config_path: the deploy file; without one, a single stage runs ``model``.
        model: as ``engine_args.model``; None means the file's, or the bundled model.
        overrides: values by the names in ``OVERRIDES``; None means not given. A list or mapping
            replaces the file's as a whole. Relative paths in them are the working directory's.
        origin: where ``model`` and ``overrides`` were given.

    Raises:
        ConfigFileError: something is wrong; ``problems`` has all of it.
    """
    given = {**(overrides or {}), **({} if model is None else {"model": model})}
    given = {name: _plain(value) for name, value in given.items() if value is not None}
    if config_path is None and given.get("model", "bundled") == "bundled":
        given.pop("model", None)
        draft = _Draft.of_file(_BUNDLED_FILE, origin)
    elif config_path is None:
        data = {"stage_args": [{"stage_id": 0, "engine_args": {}}]}
        draft = _Draft(data, {}, "", os.getcwd(), origin)
    else:
        draft = _Draft.of_file(config_path, origin)
    draft.override(given)
    config = draft.check()
    if config is None or draft.problems:
        raise config_error(draft.problems)
    return Settings(config, draft.origins())


class _Finding(NamedTuple):
    loc: Loc
    message: str
    hint: str | None = None
    unsupported: bool = False


@dataclass
class _Draft:
    """Data on its way to becoming a configuration."""

    data: Any
    marks: dict[Loc, Mark]
    file: str
    base_dir: str
    origin: Origin
    options: dict[Loc, str] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], origin: Origin) -> _Draft:
        source, folder = read_yaml(path), os.path.dirname(os.path.abspath(path))
        shown = _BUNDLED_FILE.name if path is _BUNDLED_FILE else source.file
        draft = cls(source.data, source.marks, shown, folder, origin, problems=source.problems)
        draft.check()
        return draft

    def override(self, given: Mapping[str, object]) -> None:
        """Put the options' values over the file's."""
        stages = _dig(self.data, "stage_args")
        for name, value in given.items():
            loc = OVERRIDES.get(name)
            if loc is None:
                close = nearest(name, set(OVERRIDES))
                hint = f"did you mean {self._label(close)}?" if close else None
                self._refuse(name, "there is no such option", hint)
            elif loc[0] == "stage_args" and isinstance(stages, list) and len(stages) > 1:
                message = f"{self.file} has {len(stages)} stages, and an option names none of them"
                self._refuse(name, message, f"set {dotted(loc[2:])} in the file")
            elif _put(self.data, loc, value):
                self.marks = {at: mark for at, mark in self.marks.items() if at[: len(loc)] != loc}
                self.options[loc] = name

    def _label(self, name: str) -> str:
        return f"--{name.replace('_', '-')}" if self.origin == "command line" else name

    def _refuse(self, name: str, message: str, hint: str | None) -> None:
        self.problems.append(ConfigProblem(self._label(name), message, hint=hint))

    def check(self) -> schema.DeployConfig | None:
        """Validate the data as it is now; a problem that is known already isn't added again."""
        self._resolve_paths()
        config, findings = None, list(_relations(self.data))
        try:
            config = schema.DeployConfig.model_validate(self.data)
        except ValidationError as error:
            found = error.errors(include_url=False)
            # A list whose items are all wrong is reported as too short, too.
            wrong = [item for item in found if item["type"] != "too_short" or not item["input"]]
            findings[:0] = [_explain(item) for item in wrong]
        # A value that could not be read is null in the data; it was reported as what it is.
        nulls = {dotted(loc) for loc, value in _walk(self.data) if value is None}
        unread = nulls & {problem.path for problem in self.problems}
        for problem in map(self._problem, findings):
            if problem.path not in unread and problem not in self.problems:
                self.problems.append(problem)
        return config

    def _resolve_paths(self) -> None:
        for loc, value in list(_walk(self.data)):
            folder = self.base_dir if self._option(loc) is None else os.getcwd()
            if not isinstance(value, str) or loc[:1] != ("stage_args",):
                continue
            if loc[2:] == ("engine_args", "model"):
                _put(self.data, loc, schema.resolve_model(value, folder))
            if (loc[2:4], loc[5:]) == (("engine_args", "lora_modules"), ("path",)):
                path = os.path.abspath(os.path.join(folder, os.path.expanduser(value)))
                _put(self.data, loc, value if value.startswith("bundled:") else path)

    def _option(self, loc: Loc) -> Loc | None:
        return next((start for start in _starts(loc) if start in self.options), None)

    def _problem(self, finding: _Finding) -> ConfigProblem:
        loc, message, hint, unsupported = finding
        if (at := self._option(loc)) is not None:
            path = dotted((self._label(self.options[at]), *loc[len(at) :]))
            return ConfigProblem(path, message, hint=hint, unsupported=unsupported)
        mark = next((self.marks[at] for at in _starts(loc) if at in self.marks), None)
        line, column = mark or (None, None)
        file = self.file or None
        return ConfigProblem(dotted(loc), message, file, line, column, hint, unsupported)

    def origins(self) -> dict[str, str]:
        """Return the origin of every value that isn't a default, by dotted path."""
        found = {dotted(loc): f"{self.file}:{mark.line}" for loc, mark in self.marks.items()}
        given = [loc for loc, _ in _walk(self.data) if self._option(loc) is not None]
        return found | {dotted(loc): self.origin for loc in given}


def _starts(loc: Loc) -> Iterator[Loc]:
    return (loc[:size] for size in range(len(loc), -1, -1))


def _has_items(value: object) -> bool:
    return isinstance(value, dict | list) and bool(value)


def _walk(data: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    yield loc, data
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _walk(value, (*loc, key))


def _dig(data: Any, *loc: str | int) -> Any:
    for part in loc:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _put(data: Any, loc: Loc, value: object) -> bool:
    for part in loc[:-1]:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.setdefault(part, {}) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data[loc[-1]] = value
    return isinstance(data, dict)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _explain(error: ErrorDetails) -> _Finding:
    loc, kind, value = error["loc"], error["type"], error["input"]
    if "extra_args" in loc:
        loc = loc[: loc.index("extra_args") + 2]  # pydantic goes on with the kinds it tried
    if kind == "extra_forbidden":
        return _Finding(loc, "unknown key", _key_hint(loc))
    wanted = "a finite number" if kind == "finite_number" else schema.allowed(loc)
    if kind == "missing":
        return _Finding(loc, f"is missing; expected {wanted}")
    message = f"expected {wanted}, got {_shown(value)}"
    return _Finding(loc, message, _value_hint(kind, value, wanted))


def _key_hint(loc: Loc) -> str:
    known, key = schema.known_keys(loc[:-1]), str(loc[-1])
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


def _relations(data: Any) -> Iterator[_Finding]:
    """Yield what is wrong between values; single wrong values and wrong types are passed over."""
    stages = _dig(data, "stage_args")
    ids: dict[Loc, object] = {}
    names: dict[Loc, object] = {}
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        at, args = ("stage_args", index), _dig(stage, "engine_args")
        ids[(*at, "stage_id")] = _dig(stage, "stage_id")
        names[(*at, "name")] = _dig(stage, "name")
        if names[(*at, "name")] is None and isinstance(_dig(args, "model"), str):
            names[(*at, "engine_args", "model")] = schema.model_name(args["model"])
        yield from _adapter_findings(args, (*at, "engine_args"))
        yield from _default_findings(data, args, (*at, "engine_args", "default_sampling_params"))
        yield from _useless_findings(args, _dig(stage, "runtime"), at)
    yield from _repeated(ids)
    yield from _repeated(names)


def _repeated(values: Mapping[Loc, object]) -> Iterator[_Finding]:
    first: dict[object, Loc] = {}
    for loc, value in values.items():
        if isinstance(value, int | str) and first.setdefault(value, loc) != loc:
            message = f"{value!r} is in use already, by {dotted(first[value])}"
            hint = "give the stage a name of its own" if loc[-1] == "model" else "choose another"
            yield _Finding(loc, message, hint)


def _adapter_findings(args: Any, at: Loc) -> Iterator[_Finding]:
    modules = _dig(args, "lora_modules")
    names: dict[Loc, object] = {}
    for index, module in enumerate(modules if isinstance(modules, list) else ()):
        loc, path = (*at, "lora_modules", index), _dig(module, "path")
        names[(*loc, "name")] = _dig(module, "name")
        try:
            if isinstance(path, str) and path.strip():
                schema.resolve_adapter(path, "")
        except ConfigError as error:
            yield _Finding((*loc, "path"), error.message, error.hint)
    yield from _repeated(names)
    default, known = _dig(args, "default_lora", "name"), {str(name) for name in names.values()}
    if isinstance(default, str) and default not in known:
        close = nearest(default, known)
        hint = f"did you mean {close}?" if close else "register it in lora_modules"
        yield _Finding((*at, "default_lora", "name"), f"no adapter {default!r} is registered", hint)


def _default_findings(data: Any, args: Any, at: Loc) -> Iterator[_Finding]:
    defaults = _dig(args, at[-1])
    for key, limit in _LIMITED.items():
        value, most = _dig(defaults, key), _limit(data, limit)
        if isinstance(value, int) and value > most:
            yield _Finding((*at, key), f"{value} is more than limits.{limit} allows ({most})")
    height, width = _dig(defaults, "height"), _dig(defaults, "width")
    most = _limit(data, "max_pixels")
    if isinstance(height, int) and isinstance(width, int) and height * width > most:
        message = f"{height} x {width} pixels are more than limits.max_pixels allows ({most})"
        yield _Finding(at, message)


def _limit(data: Any, name: str) -> int:
    value = _dig(data, "limits", name)
    default: int = schema.Limits.model_fields[name].default
    return value if isinstance(value, int) else default


def _useless_findings(args: Any, runtime: Any, at: Loc) -> Iterator[_Finding]:
    """Yield what can't take effect: it is refused, not ignored."""
    inside, model, devices = (*at, "engine_args"), _dig(args, "model"), _dig(runtime, "devices")
    if _dig(args, "step_execution") is True:
        message = "step execution is not available in this version"
        hint = "leave it false; requests still share forwards in request mode"
        yield _Finding((*inside, "step_execution"), message, hint, unsupported=True)
    if isinstance(model, str) and os.path.isabs(model) and not os.path.isdir(model):
        yield _Finding((*inside, "model"), f"there is no folder {model}")
    is_local = isinstance(model, str) and (model == "bundled" or os.path.isabs(model))
    if is_local and isinstance(_dig(args, "revision"), str):
        message = "a revision has no effect on a local model"
        yield _Finding((*inside, "revision"), message, "leave it out", unsupported=True)
    if _dig(args, "scheduling_policy") == "fifo" and _dig(args, "max_skip_ms") is not None:
        message = "max_skip_ms has no effect with scheduling_policy fifo, which skips no request"
        yield _Finding((*inside, "max_skip_ms"), message, "leave it out", unsupported=True)
    named = schema.parse_devices(devices) if isinstance(devices, str) else ("auto",)
    if len(set(named)) < len(named):
        message = f"{devices!r} names a device twice"
        yield _Finding((*at, "runtime", "devices"), message, "use replicas for several workers")
    if _dig(runtime, "threads") is not None and not {"auto", "cpu"} & set(named):
        message = f"threads have no effect on {devices}: they are for CPU workers"
        yield _Finding((*at, "runtime", "threads"), message, "leave it out", unsupported=True)
