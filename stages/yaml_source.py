"""Strict YAML reading: text in, plain data out, with the line and column of every value.

Stricter than YAML itself, because a deploy file must not mean anything else than it says: keys are
text and unique, only ``true`` and ``false`` are booleans, only plain decimal numbers are numbers,
and tags, merge keys and self-referring aliases are refused.

Public names: ``read_yaml``, ``parse_yaml``, ``YamlSource``, ``Mark``, ``Loc``, ``dotted``,
``ConfigProblem``, ``ConfigFileError``, ``UnsupportedConfigError``, ``config_error``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from omni_engine.protocol.errors import ConfigError, UnsupportedOptionError, shorten

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 5000  # every use of an alias counts anew
MAX_DEPTH = 32
_MAX_LISTED = 100
_MAX_DIGITS = 30

Loc = tuple[str | int, ...]
"""Where a value is inside the data: ``("stage_args", 0, "engine_args")``."""


class Mark(NamedTuple):
    """A place in a file, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake: where it is, what is wrong, what to do.

    Attributes:
        path: dotted path in a file, or an option's name (``--max-num-seqs``, ``max_num_seqs``).
        message: what is wrong and what is allowed.
        file: the file as the user named it; None for an option.
        line: counted from 1; None for an option or a whole-file problem.
        column: counted from 1.
        hint: what to write instead.
        unsupported: the value is understood, but can't take effect.
    """

    path: str
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    hint: str | None = None
    unsupported: bool = False

    def __str__(self) -> str:
        place = ":".join(map(str, filter(None, (self.file, self.line, self.column))))
        text = ": ".join(part for part in (place, self.path, self.message) if part)
        return f"{text}; {self.hint}" if self.hint else text


class ConfigFileError(ConfigError):
    """Everything that is wrong with one configuration, in ``problems``; its text lists them all."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(problems)
        listed, more = self.problems[:_MAX_LISTED], len(self.problems) - _MAX_LISTED
        lines = [f"{len(self.problems)} problems in the configuration:", *map(str, listed)]
        text = "\n  ".join(lines) + (f"\n  … and {more} more" if more > 0 else "")
        super().__init__(str(self.problems[0]) if len(self.problems) == 1 else text)


class UnsupportedConfigError(ConfigFileError, UnsupportedOptionError):
    """The configuration is well-formed; what it asks for is not available."""

    code = UnsupportedOptionError.code


def config_error(problems: Sequence[ConfigProblem]) -> ConfigFileError:
    """Return the error that reports ``problems``; there must be at least one."""
    ordered = sorted(problems, key=lambda p: (p.file is None, p.line or 0, p.column or 0))
    unsupported = all(problem.unsupported for problem in problems)
    return UnsupportedConfigError(ordered) if unsupported else ConfigFileError(ordered)


@dataclass(frozen=True)
class YamlSource:
    """A file's content: the data, the place of every value and the problems found on the way."""

    file: str
    data: Any
    marks: dict[Loc, Mark]
    problems: list[ConfigProblem]


def dotted(loc: Loc) -> str:
    """Return ``stage_args[0].engine_args`` for ``("stage_args", 0, "engine_args")``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in loc)
    return "".join(parts).removeprefix(".")


def read_yaml(path: str | os.PathLike[str]) -> YamlSource:
    """Read and parse a deploy file.

    Args:
        path: the file; problems name it as it is written here.

    Raises:
        ConfigFileError: the file can't be read, is not UTF-8 or not YAML.
    """
    name, content = os.fspath(path), _read_bytes(os.fspath(path))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        mark = _mark_at(content.decode("latin-1"), error.start)
        message = f"the file is not UTF-8 text (byte 0x{content[error.start]:02x})"
        raise _fatal(message, name, mark, "save it as UTF-8") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, file: str) -> YamlSource:
    """Parse YAML text; pure. Problems that don't stop the reading are in the result.

    Args:
        text: the file's content.
        file: the name that problems carry.

    Raises:
        ConfigFileError: the text is not YAML, is empty, or nested too deeply or too large.
    """
    node = _compose(text, file)
    if node is None:
        raise _fatal("the file is empty", file, Mark(1, 1), "it needs at least stage_args")
    builder = _Builder(file)
    data = builder.build(node, (), ())
    return YamlSource(file, data, builder.marks, builder.problems)


def _fatal(message: str, file: str, mark: Mark | None, hint: str | None = None) -> ConfigFileError:
    line, column = mark or (None, None)
    return ConfigFileError([ConfigProblem("", message, file, line, column, hint)])


def _read_bytes(name: str) -> bytes:
    try:
        if os.path.isdir(name):
            raise _fatal("is a folder, not a file", name, None, "name the YAML file in it")
        if os.path.exists(name) and not os.path.isfile(name):
            raise _fatal("is not a regular file", name, None)
        with open(name, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise _fatal(reason, name, None) from None
    if len(content) > MAX_FILE_BYTES:
        raise _fatal(f"the file is larger than {MAX_FILE_BYTES} bytes", name, None)
    return content


class _Loader(yaml.SafeLoader):
    """A SafeLoader without YAML 1.1's surprises: ``on``, ``010``, ``1:30`` and dates are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own attribute
    _nodes = 0
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._nodes += 1
        for message, is_wrong in (
            (f"more than {MAX_NODES} values", self._nodes > 2 * MAX_NODES),
            (f"more than {MAX_DEPTH} levels of nesting", self._depth >= MAX_DEPTH),
            ("tags are not allowed", getattr(event, "tag", None) is not None),
        ):
            if is_wrong:
                raise yaml.MarkedYAMLError(problem=message, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_NOT_FINITE = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
for _kind, _pattern in {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?(0|[1-9][0-9_]*)",
    "float": rf"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|{_NOT_FINITE}",
}.items():
    _whole = re.compile(rf"({_pattern})\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _whole, None)


def _compose(text: str, file: str) -> yaml.Node | None:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.reader.ReaderError as error:
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise _fatal(message, file, _mark_at(text, error.position)) from None
    except yaml.MarkedYAMLError as error:
        raise _refused(error, text, file) from None
    except (ValueError, OverflowError):
        # PyYAML hands "\Uffffffff" to chr() and a directive's endless version number to int().
        mark = _mark(loader.get_mark()) if loader is not None else None
        raise _fatal("YAML error: an escape or number is out of range", file, mark) from None


def _refused(error: yaml.MarkedYAMLError, text: str, file: str) -> ConfigFileError:
    mark = error.problem_mark or error.context_mark
    if mark and text[mark.index : mark.index + 1] == "\t":
        return _fatal("a tab can't be used here", file, _mark(mark), "indent with spaces")
    message = f"YAML error: {error.problem}" + (f" ({error.context})" if error.context else "")
    return _fatal(message, file, _mark(mark) if mark else None)


def _mark(mark: yaml.Mark) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _mark_at(text: str, index: int) -> Mark:
    return Mark(text.count("\n", 0, index) + 1, index - text.rfind("\n", 0, index))


class _Builder:
    """Turns a node graph into data and notes every value's place."""

    def __init__(self, file: str) -> None:
        self.marks: dict[Loc, Mark] = {}
        self.problems: list[ConfigProblem] = []
        self._file = file
        self._count = 0

    def build(self, node: yaml.Node, loc: Loc, parents: tuple[int, ...]) -> Any:
        self._count += 1
        self.marks.setdefault(loc, _mark(node.start_mark))
        if self._count > MAX_NODES:
            message = f"the file holds more than {MAX_NODES} values (aliases count at every use)"
            raise _fatal(message, self._file, _mark(node.start_mark))
        if id(node) in parents or len(parents) > MAX_DEPTH:
            message = "an alias refers to a value that contains it, or aliases nest too deeply"
            raise _fatal(message, self._file, self.marks[loc])
        inside = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc, inside)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*loc, i), inside) for i, item in enumerate(node.value)]
        return self._scalar(node, loc)

    def _mapping(self, node: yaml.MappingNode, loc: Loc, inside: tuple[int, ...]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(key_node.start_mark)
            if not key_node.tag.endswith(":str"):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a collection"
                self._problem(loc, mark, f"keys must be text, got {shown}", "put it in quotes")
                continue
            key = self._text(key_node.value, loc, mark)
            where = (*loc, key)
            if key in data:
                first = self.marks[where].line
                text = f"the key is given twice, at line {first} and at line {mark.line}"
                self._problem(where, mark, text, "keep one of them")
                continue
            self.marks[where] = mark
            data[key] = self.build(value_node, where, inside)
        return data

    def _scalar(self, node: yaml.Node, loc: Loc) -> Any:
        kind, text, mark = node.tag.rpartition(":")[2], node.value, self.marks[loc]
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind not in ("int", "float"):
            return self._text(text, loc, mark)
        digits = text.lower().replace("_", "")
        number = float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        if len(digits) <= _MAX_DIGITS and math.isfinite(number):
            return int(digits) if kind == "int" else number
        message = f"numbers must be finite and at most {_MAX_DIGITS} characters long"
        self._problem(loc, mark, f"{message}, got {shorten(digits)}")
        return None

    def _text(self, text: str, loc: Loc, mark: Mark) -> str:
        if (readable := text.encode("utf-8", "replace").decode()) != text:
            self._problem(loc, mark, "the text holds half a surrogate pair", "write the character")
        return readable

    def _problem(self, loc: Loc, mark: Mark, message: str, hint: str | None = None) -> None:
        self.problems.append(ConfigProblem(dotted(loc), message, self._file, *mark, hint))
