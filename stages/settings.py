"""Effective settings: command line or constructor over deploy file over default, with origins.

Public names: ``load_settings``, ``Settings``, ``OVERRIDES``, ``Origin``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from omni_engine.protocol.errors import nearest
from omni_engine.stages import config as schema
from omni_engine.stages.config_checks import OVERRIDES as OVERRIDES
from omni_engine.stages.config_checks import (
    SECRETS,
    Finding,
    connection_findings,
    dig,
    explain,
    relations,
    walk,
)
from omni_engine.stages.yaml_source import ConfigProblem, Loc, Mark, config_error, dotted, read_yaml

Origin = Literal["command line", "constructor"]

_MASK = "***"
_BUNDLED_FILE = Path(__file__).with_name("bundled.yaml")


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
        """Return (dotted path, effective value, origin) of every value, in the file's order.

        Keys are masked.
        """
        data = self.config.model_dump(mode="json")
        for stage, dumped in zip(self.config.stage_args, data["stage_args"], strict=True):
            dumped["name"] = stage.display_name
            defaults = stage.engine_args.default_sampling_params.given()
            dumped["engine_args"]["default_sampling_params"] = defaults
        leaves = {
            dotted(loc): _MASK if loc in SECRETS and value is not None else value
            for loc, value in walk(data)
            if not isinstance(value, dict | list) or not value
        }
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
    # The bundled file's sampling parameters and adapters suit the bundled pipeline only.
    own_pipeline = "pipeline" in given
    is_bundled = given.get("model", "bundled") == "bundled"
    if config_path is None and is_bundled and not own_pipeline:
        given.pop("model", None)
        draft = _Draft.of_file(_BUNDLED_FILE, origin)
    elif config_path is None:
        given.setdefault("model", "bundled")
        data = {"stage_args": [{"stage_id": 0, "engine_args": {}}]}
        draft = _Draft(data, {}, "", os.getcwd(), origin)
    else:
        draft = _Draft.of_file(config_path, origin)
    draft.override(given)
    config = draft.check()
    if config is None or draft.problems:
        raise config_error(draft.problems)
    return Settings(config, draft.origins())


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
        draft.check(final=False)
        return draft

    def override(self, given: Mapping[str, object]) -> None:
        """Put the options' values over the file's."""
        stages = dig(self.data, "stage_args")
        for name, value in given.items():
            loc = OVERRIDES.get(name)
            if loc is None:
                close = nearest(name, set(OVERRIDES))
                hint = f"did you mean {self._label(close)}?" if close else None
                self._refuse(name, "there is no such option", hint)
            elif loc[0] == "http" and self.origin == "constructor":
                hint = "start `omni-engine serve --port PORT`"
                message = f"{name} has no effect here: only `omni-engine serve` speaks HTTP"
                self._refuse(name, message, hint, unsupported=True)
            elif loc[0] == "stage_args" and isinstance(stages, list) and len(stages) > 1:
                message = f"{self.file} has {len(stages)} stages, and an option names none of them"
                self._refuse(name, message, f"set {dotted(loc[2:])} in the file")
            elif _put(self.data, loc, value):
                self.marks = {at: mark for at, mark in self.marks.items() if at[: len(loc)] != loc}
                self.options[loc] = name

    def _label(self, name: str) -> str:
        return f"--{name.replace('_', '-')}" if self.origin == "command line" else name

    def _in_options(self, text: str) -> str:
        """Name the settings of keys as who gives options does."""
        for name, loc in OVERRIDES.items():
            if loc[0] == "curve":
                whole_word = rf"(?<!\S){re.escape(dotted(loc))}(?!\S)"  # not a part of a path
                text = re.sub(whole_word, self._label(name), text)
        return text

    def _refuse(
        self, name: str, message: str, hint: str | None, *, unsupported: bool = False
    ) -> None:
        problem = ConfigProblem(self._label(name), message, hint=hint, unsupported=unsupported)
        self.problems.append(problem)

    def check(self, *, final: bool = True) -> schema.DeployConfig | None:
        """Validate the data as it is now; a problem that is known already isn't added again.

        Args:
            final: whether no options follow; they may add the keys that a file's endpoint needs.
        """
        self._resolve_paths()
        config, findings = None, list(relations(self.data))
        findings += connection_findings(self.data) if final else ()
        try:
            config = schema.DeployConfig.model_validate(self.data)
        except ValidationError as error:
            found = error.errors(include_url=False)
            # A list whose items are all wrong is reported as too short, too.
            wrong = [item for item in found if item["type"] != "too_short" or not item["input"]]
            findings[:0] = [explain(item) for item in wrong]
        # A value that could not be read is null in the data; it was reported as what it is.
        nulls = {dotted(loc) for loc, value in walk(self.data) if value is None}
        unread = nulls & {problem.path for problem in self.problems}
        for problem in map(self._problem, findings):
            if problem.path not in unread and problem not in self.problems:
                self.problems.append(problem)
        return config

    def _resolve_paths(self) -> None:
        for loc, value in list(walk(self.data)):
            folder = self.base_dir if self._option(loc) is None else os.getcwd()
            if not isinstance(value, str) or loc[:1] not in (("stage_args",), ("curve",)):
                continue
            is_key = len(loc) == 2 and value.strip()
            if loc[2:] == ("engine_args", "model"):
                _put(self.data, loc, schema.resolve_model(value, folder))
            is_module = (loc[2:4], loc[5:]) == (("engine_args", "lora_modules"), ("path",))
            is_folder = loc[2:4] == ("engine_args", "lora_dirs") and len(loc) == 5 and value.strip()
            if (is_module and not value.startswith("bundled:")) or is_folder or is_key:
                path = os.path.abspath(os.path.join(folder, os.path.expanduser(value)))
                _put(self.data, loc, path)

    def _option(self, loc: Loc) -> Loc | None:
        return next((start for start in _starts(loc) if start in self.options), None)

    def _problem(self, finding: Finding) -> ConfigProblem:
        loc, message, hint, unsupported = finding
        if (at := self._option(loc)) is not None:
            path = dotted((self._label(self.options[at]), *loc[len(at) :]))
            message, hint = self._in_options(message), hint and self._in_options(hint)
            return ConfigProblem(path, message, hint=hint, unsupported=unsupported)
        mark = next((self.marks[at] for at in _starts(loc) if at in self.marks), None)
        line, column = mark or (None, None)
        file = self.file or None
        return ConfigProblem(dotted(loc), message, file, line, column, hint, unsupported)

    def origins(self) -> dict[str, str]:
        """Return the origin of every value that isn't a default, by dotted path."""
        found = {dotted(loc): f"{self.file}:{mark.line}" for loc, mark in self.marks.items()}
        given = [loc for loc, _ in walk(self.data) if self._option(loc) is not None]
        return found | {dotted(loc): self.origin for loc in given}


def _starts(loc: Loc) -> Iterator[Loc]:
    return (loc[:size] for size in range(len(loc), -1, -1))


def _put(data: Any, loc: Loc, value: object) -> bool:
    *parents, last = loc
    for part in parents:
        if isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = data.setdefault(part, {}) if isinstance(data, dict) else None
    if isinstance(data, list) and isinstance(last, int):
        data[last] = value
        return True
    if isinstance(data, dict):
        data[last] = value
    return isinstance(data, dict)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
