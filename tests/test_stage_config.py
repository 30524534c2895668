"""The deploy configuration: each kind of mistake, precedence, shipped files, documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pydantic
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omni_engine.protocol.errors import ConfigError, InvalidRequestError, UnsupportedOptionError
from omni_engine.protocol.sampling import OmniDiffusionSamplingParams
from omni_engine.stages.bundled import ADAPTER_DIR, MODEL_DIR
from omni_engine.stages.config import (
    BUNDLED_ADAPTERS,
    ConfigFileError,
    ConfigProblem,
    DeployConfig,
    EngineArgs,
    LoRAModule,
    RuntimeArgs,
    SamplingDefaults,
    StageConfig,
)
from omni_engine.stages.config_words import allowed, known_keys
from omni_engine.stages.settings import OVERRIDES, load_settings
from omni_engine.stages.yaml_source import MAX_FILE_BYTES, MAX_NODES, Loc, dotted, parse_yaml

ROOT = Path(__file__).parent.parent
STAGES = ROOT / "stages"
SHIPPED = ["bundled.yaml", "qwen_image.yaml", "annotated_example.yaml"]
ENGINE_ARGS = "stage_args[0].engine_args"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "stages.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def problems_of(path: Path | str, **options: object) -> tuple[ConfigProblem, ...]:
    with pytest.raises(ConfigFileError) as caught:
        load_settings(config_path=path, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, ConfigError)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return caught.value.problems


def only_problem(path: Path | str, **options: object) -> ConfigProblem:
    problems = problems_of(path, **options)
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


def stage_file(engine_args: str = "", runtime: str = "") -> str:
    """Two lines of engine_args end up in lines 5 and following."""
    args = "".join(f"      {line}\n" for line in engine_args.splitlines())
    run = "".join(f"      {line}\n" for line in runtime.splitlines())
    runtime_block = f"    runtime:\n{run}" if run else ""
    head = "stage_args:\n  - stage_id: 0\n    engine_args:\n      model: bundled\n"
    return f"{head}{args}{runtime_block}"


# One wrong line under engine_args: the line, the path's last part, what the message must contain.
ENGINE_ARG_MISTAKES = [
    ("max_num_seq: 3", "max_num_seq", ["unknown key", "did you mean max_num_seqs?"]),
    ("devices: cpu", "devices", ["unknown key", "it belongs under stage_args.runtime"]),
    ("endpoint: ipc:///x", "endpoint", ["unknown key", "it belongs to the top level"]),
    ("max_side: 1", "max_side", ["unknown key", "it belongs under limits"]),
    ("zzz: 1", "zzz", ["unknown key", "known here: model, revision"]),
    ('max_num_seqs: "4"', "max_num_seqs", ["an integer >= 1", 'a string ("4")', "write 4 without"]),
    ("max_num_seqs: 1e3", "max_num_seqs", ["an integer >= 1", '("1e3")', "write 1000 without"]),
    ("max_num_seqs: true", "max_num_seqs", ["an integer >= 1", "true (a boolean)"]),
    ("max_num_seqs: 2.5", "max_num_seqs", ["an integer >= 1", "got 2.5"]),
    ("max_num_seqs: 4.0", "max_num_seqs", ["an integer >= 1", "got 4.0"]),
    ("max_num_seqs: 0", "max_num_seqs", ["an integer >= 1", "got 0"]),
    ("max_num_seqs: 5000", "max_num_seqs", ["<= 4096", "got 5000"]),
    ("max_num_seqs:", "max_num_seqs", ["an integer >= 1", "got null"]),
    ("max_num_seqs: 010", "max_num_seqs", ["an integer >= 1", 'a string ("010")']),
    ("max_num_seqs: 1:30", "max_num_seqs", ["an integer >= 1", 'a string ("1:30")']),
    ("max_num_seqs: {a: 1}", "max_num_seqs", ["an integer >= 1", "got a mapping"]),
    ("max_batch_rows: []", "max_batch_rows", ["an integer >= 1, or null", "got an empty list"]),
    ("trust_remote_code: on", "trust_remote_code", ["true or false", '("on")', "write true"]),
    ("trust_remote_code: 1", "trust_remote_code", ["true or false", "got 1"]),
    ("max_skip_ms: -1", "max_skip_ms", ["a number >= 0", "got -1"]),
    ("max_skip_ms: .inf", "max_skip_ms", ["must be finite", "got .inf"]),
    ("max_skip_ms: .nan", "max_skip_ms", ["must be finite", "got .nan"]),
    ("max_skip_ms: 1.0e999", "max_skip_ms", ["must be finite", "got 1.0e999"]),
    (f"max_skip_ms: {'9' * 5000}", "max_skip_ms", ["at most 30 characters"]),
    (
        "dtype: bfloat",
        "dtype",
        ["one of auto, float32, bfloat16, float16", "did you mean bfloat16?"],
    ),
    ("revision: 5", "revision", ["got 5", "put it in quotes"]),
    ("pipeline: 'a:b:c'", "pipeline", ["my_package.pipelines:MyPipeline", '("a:b:c")']),
    ("lora_modules: outline", "lora_modules", ["a list", '("outline")']),
    ("lora_modules: [{name: a}]", "lora_modules[0].path", ["is missing", "a name or path"]),
    ("lora_modules: [5]", "lora_modules[0]", ["a mapping", "got 5"]),
    (
        "lora_modules: [{name: a, path: 'bundled:night', scal: 1}]",
        "lora_modules[0].scal",
        ["unknown key", "known here: name, path, default_scale"],
    ),
    (
        "lora_modules: [{name: a, path: 'bundled:nigt'}]",
        "lora_modules[0].path",
        ["no bundled adapter 'nigt'", "did you mean bundled:night?"],
    ),
    ("lora_modules: [{name: a, path: x}]", "lora_modules[0].path", ["there is no file or folder"]),
    (
        "lora_modules: [{name: a, path: 'bundled:night'}, {name: a, path: 'bundled:outline'}]",
        "lora_modules[1].name",
        ["'a' is in use already", f"{ENGINE_ARGS}.lora_modules[0].name"],
    ),
    ("default_lora: {name: a}", "default_lora.name", ["no adapter 'a' is registered"]),
    ("lora_dirs: loras", "lora_dirs", ["a list", '("loras")']),
    ("lora_dirs: ['']", "lora_dirs[0]", ["a name or path", 'a string ("")']),
    ("lora_dirs: [gone]", "lora_dirs[0]", ["there is no folder /", "/gone"]),
    ("max_cpu_loras: 0", "max_cpu_loras", ["an integer >= 1", "got 0"]),
    ("lora_merge: aut", "lora_merge", ["one of off, auto", "did you mean auto?"]),
    ("mixed_lora: yes", "mixed_lora", ["true or false", "write true without quotes"]),
    ("default_sampling_params: {heigth: 5}", "default_sampling_params.heigth", ["mean height?"]),
    ("default_sampling_params: {strength: 2}", "default_sampling_params.strength", ["<= 1"]),
    ("default_sampling_params: {sigmas: []}", "default_sampling_params.sigmas", ["length >= 1"]),
    ("default_sampling_params: {sigmas: [a]}", "default_sampling_params.sigmas[0]", ["a number"]),
    ("default_sampling_params: {seed: -1}", "default_sampling_params.seed", ["integer >= 0"]),
    (
        "default_sampling_params: {height: 5000}",
        "default_sampling_params.height",
        ["5000 is more than limits.max_side allows (4096)"],
    ),
    (
        "default_sampling_params: {height: 4096, width: 4096}",
        "default_sampling_params",
        ["4096 x 4096 pixels", "limits.max_pixels allows (4194304)"],
    ),
]


@pytest.mark.parametrize(("line", "path", "parts"), ENGINE_ARG_MISTAKES)
def test_a_mistake_is_named_with_its_line_path_and_remedy(
    write: Write, line: str, path: str, parts: list[str]
) -> None:
    file = write(stage_file(f"revision: null\n{line}" if "revision" not in line else f"\n{line}"))
    problem = only_problem(file)
    assert problem.file == str(file)
    assert problem.line == 6
    assert problem.column is not None
    assert problem.path == f"{ENGINE_ARGS}.{path}"
    for part in parts:
        assert part in str(problem)


PINNED = "lora_modules: [{name: a, path: 'bundled:night', pin: true}]\n"
PRELOADED = (
    "lora_modules: [{name: a, path: 'bundled:night', preload: true}, "
    "{name: b, path: 'bundled:outline', preload: true}]\n"
)
MIXED = "mixed_lora: true\nmax_mixed_adapters: 3\n"

# Several lines under engine_args: the lines, the path's last part, what the message must contain.
ADAPTER_ROOM_MISTAKES = [
    (
        f"{PINNED}max_loras: 1",
        "lora_modules[0].pin",
        "max_loras is 1, but 1 pinned adapters and 1 for all others need 2; set max_loras to 2",
    ),
    (
        f"{PINNED}{MIXED}max_loras: 3",
        "max_mixed_adapters",
        "max_loras is 3, but 1 pinned adapters and 3 of max_mixed_adapters need 4",
    ),
    (
        f"lora_dirs: [/]\n{MIXED}max_loras: 2",
        "max_mixed_adapters",
        "max_loras is 2, but 0 pinned adapters and 3 of max_mixed_adapters need 3",
    ),
    (
        f"{PRELOADED}max_loras: 1\nmax_cpu_loras: 1",
        "lora_modules[1].preload",
        "2 adapters are preloaded, but a worker keeps 1; raise max_cpu_loras, or preload fewer",
    ),
]


@pytest.mark.parametrize(("lines", "path", "message"), ADAPTER_ROOM_MISTAKES)
def test_more_adapters_in_memory_than_fit_are_refused_with_the_numbers(
    write: Write, lines: str, path: str, message: str
) -> None:
    problem = only_problem(write(stage_file(lines)))
    assert problem.path == f"{ENGINE_ARGS}.{path}"
    assert problem.line is not None
    assert message in str(problem)


@pytest.mark.parametrize(
    ("lines", "mixed"),
    [
        (f"{PINNED}max_loras: 2", None),
        (f"{PINNED}{MIXED}max_loras: 4", 3),
        (f"{PINNED}mixed_lora: true\nmax_loras: 4", 3),
        (f"{PINNED}mixed_lora: true\nmax_loras: 2", 1),
        (f"{PRELOADED}max_loras: 1\nmax_cpu_loras: 2\nlora_merge: auto", None),
        (f"{PRELOADED}max_loras: 2\nmax_cpu_loras: 1", None),
        ("lora_dirs: [/]\nlora_merge: auto\nmixed_lora: true", 8),
    ],
)
def test_adapters_that_fit_are_accepted(write: Write, lines: str, mixed: int | None) -> None:
    (stage,) = load_settings(config_path=write(stage_file(lines))).config.stage_args
    assert stage.engine_args.mixed_adapters_limit == mixed


def test_adapter_folders_are_relative_to_the_file_or_the_working_directory(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "a", elsewhere / "a"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(elsewhere))
    file = write(stage_file("lora_dirs: [a, ~/a]"))
    from_file = load_settings(config_path=file).config.stage_args[0].engine_args
    assert from_file.lora_dirs == (str(tmp_path / "a"), str(elsewhere / "a"))
    given = load_settings(config_path=file, overrides={"lora_dirs": ["a"]})
    assert given.config.stage_args[0].engine_args.lora_dirs == (str(elsewhere / "a"),)


@pytest.mark.parametrize(
    "devices",
    ["cuda", "gpu:0", "cuda:0;cuda:1", "auto,cpu", "", "cuda:-1", "cpu,", "cuda:01", "cuda:1x"],
)
def test_bad_devices_are_refused_with_an_example(write: Write, devices: str) -> None:
    problem = only_problem(write(stage_file(runtime=f"devices: {json.dumps(devices)}")))
    assert (problem.line, problem.path) == (6, "stage_args[0].runtime.devices")
    assert '"cuda:0,cuda:1"' in problem.message
    assert json.dumps(devices) in problem.message


def test_a_bare_device_number_must_be_quoted(write: Write) -> None:
    assert only_problem(write(stage_file(runtime="devices: 0"))).hint == "put it in quotes"


def test_a_device_given_twice_is_refused(write: Write) -> None:
    problem = only_problem(write(stage_file(runtime='devices: "cuda:0, 0"')))
    assert "names a device twice" in problem.message
    assert problem.hint == "use replicas for several workers"


@pytest.mark.parametrize(
    "endpoint", ["unix:///x", "tcp://host", "ipc://", "tcp://h:999999", "ipc:///" + "x" * 110]
)
def test_bad_endpoints_are_refused(write: Write, endpoint: str) -> None:
    problem = only_problem(write(f"endpoint: {endpoint}\n" + stage_file()))
    assert (problem.line, problem.path) == (1, "endpoint")
    assert "ipc://PATH" in problem.message


# (text, line or None, path, what the message must contain)
FILE_MISTAKES = [
    ("", 1, "", "the file is empty"),
    ("# nothing\n", 1, "", "the file is empty"),
    ("- 1\n", 1, "", "expected a mapping, got a list"),
    ("just text", 1, "", 'expected a mapping, got a string ("just text")'),
    ("limits: {}\n", 1, "stage_args", "is missing; expected a list with a length >= 1"),
    ("stage_args: []\n", 1, "stage_args", "expected a list with a length >= 1, got an empty list"),
    ("stage_args: 5\n", 1, "stage_args", "expected a list with a length >= 1, got 5"),
    ("stage_arg: []\n", 1, "stage_arg", "unknown key; did you mean stage_args?"),
    ("a: 1\nb:\n\t- c\n", 3, "", "a tab can't be used here; indent with spaces"),
    ("a: b: c\n", 1, "", "mapping values are not allowed here"),
    ("a: [1,\n", 2, "", "YAML error"),
    ("a: 1\n---\nb: 2\n", 2, "", "expected a single document"),
    ("a: !!python/name:os.system x\n", 1, "", "tags are not allowed"),
    ("a: !!int '4'\n", 1, "", "tags are not allowed"),
    ("a: \x01\n", 1, "", "the character U+0001 is not allowed"),
    ('a: "\\Uffffffff"\n', 1, "", "an escape or number is out of range"),
    ("a: &a [*a]\n", 1, "", "an alias refers to a value that contains it"),
    ("a: " + "[" * 40 + "]" * 40, 1, "", "more than 32 levels of nesting"),
    ("1: 2\n", 1, "", "keys must be text, got 1"),
    ("? [a]\n: 2\n", 1, "", "keys must be text, got a collection"),
    ('a: "\\ud800"\n', 1, "a", "half a surrogate pair"),
]


@pytest.mark.parametrize(("text", "line", "path", "part"), FILE_MISTAKES)
def test_a_file_that_is_wrong_as_a_whole(
    write: Write, text: str, line: int, path: str, part: str
) -> None:
    file = write(text)
    found = [problem for problem in problems_of(file) if part in str(problem)]
    assert len(found) == 1
    assert (found[0].file, found[0].line, found[0].path) == (str(file), line, path)


def test_a_duplicate_key_is_refused_with_both_lines(write: Write) -> None:
    problem = only_problem(write(stage_file("max_loras: 2\ndtype: auto\nmax_loras: 3")))
    assert problem.path == f"{ENGINE_ARGS}.max_loras"
    assert problem.line == 7
    assert "at line 5 and at line 7" in problem.message


def test_duplicate_stages_are_refused(write: Write) -> None:
    stage = "  - {stage_id: 3, name: same, engine_args: {model: bundled}}\n"
    first, second = problems_of(write("stage_args:\n" + stage * 2))
    assert (first.line, first.path) == (3, "stage_args[1].stage_id")
    assert "3 is in use already, by stage_args[0].stage_id" in first.message
    assert (second.line, second.path) == (3, "stage_args[1].name")
    assert "'same' is in use already, by stage_args[0].name" in second.message


def test_names_taken_from_the_model_count_too(write: Write) -> None:
    stage = "  - {stage_id: %d, engine_args: {model: %s/model}}\n"
    text = "stage_args:\n" + stage % (0, "a") + stage % (1, "b")
    problem = only_problem(write(text))
    assert problem.path == "stage_args[1].engine_args.model"
    assert problem.hint == "give the stage a name of its own"


def test_all_problems_are_reported_together_in_the_files_order(write: Write) -> None:
    text = "limits: {max_sid: 1}\n" + stage_file(
        "max_num_seqs: '4'\nmax_skip_ms: .nan\ndtype: x\ndtype: y\nmax_lora: 1", "devices: cuda"
    )
    file = write(text)
    problems = problems_of(file, overrides={"max_loras": 0, "replica": 1})
    lines = [problem.line for problem in problems]
    assert lines == [1, 6, 7, 8, 9, 10, 12, None, None]
    assert {problem.path for problem in problems[-2:]} == {"--max-loras", "--replica"}


def test_missing_folder_unreadable_and_binary_files(tmp_path: Path) -> None:
    assert "there is no such file" in str(only_problem(tmp_path / "none.yaml"))
    assert "is a folder, not a file" in str(only_problem(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in str(only_problem(tmp_path / "pipe"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe\n")
    problem = only_problem(binary)
    assert (problem.line, problem.column) == (2, 4)
    assert "not UTF-8 text (byte 0xff)" in problem.message
    binary.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert "larger than 1048576 bytes" in str(only_problem(binary))
    assert "null byte" in str(only_problem("a\0b"))


def test_an_alias_bomb_is_refused_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    repeats = (", ".join([f"*a{i - 1}"] * 10) for i in range(1, 10))
    lines += [f"a{i}: &a{i} [{repeat}]" for i, repeat in enumerate(repeats, 1)]
    with pytest.raises(ConfigFileError, match=f"more than {MAX_NODES} values"):
        parse_yaml("\n".join(lines), "bomb.yaml")
    with pytest.raises(ConfigFileError, match=f"more than {MAX_NODES} values"):
        parse_yaml("[" + "1," * 4 * MAX_NODES + "]", "long.yaml")


def test_an_alias_repeats_its_value(write: Write) -> None:
    file = write(
        "stage_args:\n"
        "  - {stage_id: 0, name: a, engine_args: &args {model: bundled, max_loras: 3}}\n"
        "  - {stage_id: 1, name: b, engine_args: *args}\n"
    )
    first, second = load_settings(config_path=file).config.stage_args
    assert first.engine_args == second.engine_args


@pytest.mark.parametrize(
    ("engine_args", "runtime", "path"),
    [
        (
            "step_execution: true\nrequest_batch_max_wait_ms: 5",
            "",
            "engine_args.request_batch_max_wait_ms",
        ),
        ("step_execution: true\ncache_backend: cache_dit", "", "engine_args.cache_backend"),
        ("cache_backend: cache_dit", "", "engine_args.cache_backend"),
        ("step_quantum: 8", "", "engine_args.step_quantum"),
        ("max_stall_ms: 5", "", "engine_args.max_stall_ms"),
        ("scheduling_policy: fifo\nmax_skip_ms: 5", "", "engine_args.max_skip_ms"),
        ("revision: main", "", "engine_args.revision"),
        (f"{PINNED}max_mixed_adapters: 2", "", "engine_args.max_mixed_adapters"),
        ("mixed_lora: true", "", "engine_args.mixed_lora"),
        ("lora_merge: auto", "", "engine_args.lora_merge"),
        (f"{PINNED}deterministic: true\nlora_merge: auto", "", "engine_args.lora_merge"),
        ("", 'devices: "0"\nthreads: 2', "runtime.threads"),
    ],
)
def test_what_cannot_take_effect_is_refused(
    write: Write, engine_args: str, runtime: str, path: str
) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        load_settings(config_path=write(stage_file(engine_args, runtime)))
    assert caught.value.code == "unsupported_option"
    assert f"stage_args[0].{path}" in str(caught.value)


def test_step_caches_with_step_execution_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        load_settings(
            overrides={"step_execution": True, "cache_backend": "cache_dit"}, origin="constructor"
        )
    assert str(caught.value) == (
        "cache_backend: step caches keep state in the shared model, so requests that are stepped "
        "together would read each other's; leave it out"
    )


def test_precedence_and_origins(write: Write) -> None:
    file = write(stage_file("max_num_seqs: 2\nmax_loras: 3", "devices: cpu"))
    options = {"max_num_seqs": 6, "replicas": 2, "threads": None}
    loaded = load_settings(config_path=file, overrides=options)
    stage = loaded.config.stage_args[0]
    assert (stage.engine_args.max_num_seqs, stage.engine_args.max_loras) == (6, 3)
    assert stage.worker_devices() == ["cpu", "cpu"]
    assert loaded.origin(f"{ENGINE_ARGS}.max_num_seqs") == "command line"
    assert loaded.origin("stage_args[0].runtime.replicas") == "command line"
    assert loaded.origin(f"{ENGINE_ARGS}.max_loras") == f"{file}:6"
    assert loaded.origin(f"{ENGINE_ARGS}.dtype") == "default"
    rows = {path: (value, origin) for path, value, origin in loaded.rows()}
    assert rows[f"{ENGINE_ARGS}.max_num_seqs"] == (6, "command line")
    assert rows["stage_args[0].name"] == ("bundled", "default")
    assert rows["limits.max_side"] == (4096, "default")
    assert rows["stage_args[0].runtime.devices"] == ("cpu", f"{file}:8")


def test_a_mapping_given_as_an_option_replaces_the_files(write: Write) -> None:
    file = write(stage_file("default_sampling_params: {height: 64, width: 64}"))
    loaded = load_settings(
        config_path=file,
        overrides={"default_sampling_params": {"width": 32, "sigmas": (1, 0.5)}},
        origin="constructor",
    )
    defaults = loaded.config.stage_args[0].engine_args.default_sampling_params
    assert defaults.given() == {"width": 32, "sigmas": [1.0, 0.5]}
    path = f"{ENGINE_ARGS}.default_sampling_params"
    assert [row for row in loaded.rows() if row[0].startswith(path)] == [
        (f"{path}.width", 32, "constructor"),
        (f"{path}.sigmas[0]", 1.0, "constructor"),
        (f"{path}.sigmas[1]", 0.5, "constructor"),
    ]


def test_options_are_named_as_they_were_given() -> None:
    wrong: dict[str, object] = {
        "max_num_seqs": "4",
        "lora_modules": [LoRAModule(name="a", path="bundled:night"), {"name": "b", "pth": "x"}],
        "default_sampling_params": {"heigth": 3},
        "max_skip": 3,
        "max_skip_ms": float("inf"),
    }
    with pytest.raises(ConfigFileError) as caught:
        load_settings(overrides=wrong)
    texts = [str(problem) for problem in caught.value.problems]
    assert "--max-skip: there is no such option; did you mean --max-skip-ms?" in texts
    assert "--default-sampling-params.heigth: unknown key; did you mean height?" in texts
    assert "--lora-modules[1].pth: unknown key; did you mean path?" in texts
    assert any(t.startswith("--max-num-seqs: expected an integer >= 1") for t in texts)
    assert "--max-skip-ms: expected a finite number, got inf" in texts
    with pytest.raises(ConfigFileError, match=r"^max_num_seqs: expected an integer >= 1"):
        load_settings(overrides={"max_num_seqs": 0}, origin="constructor")


def test_a_stage_option_needs_a_single_stage(write: Write) -> None:
    stage = "  - {stage_id: %d, name: m%d, engine_args: {model: bundled}}\n"
    file = write("stage_args:\n" + stage % (0, 0) + stage % (1, 1))
    problems = problems_of(file, overrides={"max_num_seqs": 2, "devices": "cpu"}, model="x")
    assert {problem.path for problem in problems} == {"--max-num-seqs", "--devices", "--model"}
    assert all("has 2 stages" in problem.message for problem in problems)
    loaded = load_settings(
        config_path=file, overrides={"endpoint": "ipc:///run/x", "max_waiting_requests": 5}
    )
    assert loaded.config.endpoint == "ipc:///run/x"
    assert loaded.config.limits.max_waiting_requests == 5


def test_a_pipeline_of_ones_own_does_not_get_the_bundled_pipelines_settings() -> None:
    for model in (None, "bundled"):
        settings = load_settings(model=model, overrides={"pipeline": "mine:Mine"})
        (stage,) = settings.config.stage_args
        assert stage.engine_args.model == "bundled"
        assert stage.engine_args.default_sampling_params.given() == {}
        assert stage.engine_args.lora_modules == ()


def test_without_anything_the_bundled_model_runs() -> None:
    for loaded in (load_settings(), load_settings(model="bundled")):
        (stage,) = loaded.config.stage_args
        assert stage.display_name == "bundled"
        assert stage.engine_args.resolved_model() == str(MODEL_DIR)
        assert [module.name for module in stage.engine_args.lora_modules] == list(BUNDLED_ADAPTERS)
        assert loaded.origin(f"{ENGINE_ARGS}.max_num_seqs").startswith("bundled.yaml:")
        assert loaded.origin(f"{ENGINE_ARGS}.dtype") == "default"


def test_a_model_alone_makes_a_single_stage(tmp_path: Path) -> None:
    loaded = load_settings(model="Qwen/Qwen-Image", overrides={"dtype": "float32"})
    (stage,) = loaded.config.stage_args
    assert (stage.stage_id, stage.display_name) == (0, "Qwen-Image")
    assert loaded.origin(f"{ENGINE_ARGS}.model") == "command line"
    (tmp_path / "mine").mkdir()
    local = load_settings(model=tmp_path / "mine").config.stage_args[0]
    assert (local.engine_args.model, local.display_name) == (str(tmp_path / "mine"), "mine")
    with pytest.raises(ConfigFileError, match="--model: there is no folder"):
        load_settings(model="./not/here")


def test_relative_paths_belong_to_the_file_or_the_working_directory(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "m", elsewhere / "m", tmp_path / "lora", elsewhere / "lora"):
        folder.mkdir(parents=True)
        (folder / "x.safetensors").touch()
    monkeypatch.chdir(elsewhere)
    adapters = [{"name": "a", "path": "lora"}]
    text = stage_file("lora_modules: [{name: a, path: lora}]").replace("bundled", "m", 1)
    file = write(text)
    from_file = load_settings(config_path=file).config.stage_args[0].engine_args
    assert from_file.resolved_model() == str(tmp_path / "m")
    assert from_file.lora_modules[0].resolved_file() == tmp_path / "lora" / "x.safetensors"
    options = {"lora_modules": adapters}
    given_args = load_settings(config_path=file, model="m", overrides=options)
    args = given_args.config.stage_args[0].engine_args
    assert args.resolved_model() == str(elsewhere / "m")
    assert args.lora_modules[0].resolved_file() == elsewhere / "lora" / "x.safetensors"
    assert EngineArgs(model="m").resolved_model(tmp_path) == str(tmp_path / "m")
    assert EngineArgs(model="org/m").resolved_model(tmp_path) == "org/m"


def test_an_adapter_folder_holds_one_file(tmp_path: Path) -> None:
    module = LoRAModule(name="a", path="f")
    folder = tmp_path / "f"
    folder.mkdir()
    with pytest.raises(ConfigError, match="holds 0 safetensors files"):
        module.resolved_file(tmp_path)
    (folder / "one.safetensors").touch()
    assert module.resolved_file(tmp_path) == folder / "one.safetensors"
    (folder / "two.safetensors").touch()
    with pytest.raises(ConfigError, match="holds 2 safetensors files"):
        module.resolved_file(tmp_path)
    (folder / "pytorch_lora_weights.safetensors").touch()
    assert module.resolved_file(tmp_path) == folder / "pytorch_lora_weights.safetensors"
    (folder / "weights.bin").touch()
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        LoRAModule(name="a", path="f/weights.bin").resolved_file(tmp_path)


def test_worker_devices_and_threads() -> None:
    def devices(text: str, replicas: int = 1, available: tuple[str, ...] = ()) -> list[str]:
        runtime = RuntimeArgs(devices=text, replicas=replicas)
        stage = StageConfig(stage_id=0, engine_args=EngineArgs(model="bundled"), runtime=runtime)
        return stage.worker_devices(available)

    assert devices("auto") == ["cpu"]
    assert devices("auto", 1, ("cuda:0", "cuda:1")) == ["cuda:0", "cuda:1"]
    assert devices("0, 1", 2) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert devices("cpu", 2, ("cuda:0",)) == ["cpu", "cpu"]
    assert devices("cuda:3,cpu") == ["cuda:3", "cpu"]
    assert RuntimeArgs().worker_threads(3, 8) == 2
    assert RuntimeArgs().worker_threads(16, 8) == 1
    assert RuntimeArgs(threads=5).worker_threads(2, 8) == 5


def test_a_stage_crosses_the_wire_unchanged() -> None:
    for file in SHIPPED:
        for stage in load_settings(config_path=STAGES / file).config.stage_args:
            wire = msgpack.unpackb(msgpack.packb(stage.to_wire()))
            assert StageConfig.from_wire(wire) == stage


def test_the_models_are_frozen() -> None:
    config = load_settings().config
    with pytest.raises(pydantic.ValidationError):
        config.limits.max_side = 3  # type: ignore[misc]


def test_sampling_defaults_are_the_requests_fields() -> None:
    fields = set(OmniDiffusionSamplingParams.__dataclass_fields__) - {"lora_request"}
    assert set(SamplingDefaults.model_fields) == fields


@pytest.mark.parametrize("name", sorted(SamplingDefaults.model_fields))
@pytest.mark.parametrize(
    "value", [-2000, -5, -0.5, 0, 1, 0.5, 3, 2000, 1 << 62, "np", "x", [], [1]]
)
def test_sampling_defaults_accept_nothing_that_requests_refuse(name: str, value: object) -> None:
    try:
        defaults = SamplingDefaults.model_validate({name: value}).given()
    except pydantic.ValidationError:
        return
    try:
        OmniDiffusionSamplingParams(**defaults)
    except InvalidRequestError:
        # Requests bound integers by 2^31; here the limits do so.
        assert isinstance(value, int)
        assert value > 1 << 31


def test_every_bundled_adapter_can_be_named() -> None:
    assert {path.stem for path in ADAPTER_DIR.glob("*.safetensors")} <= set(BUNDLED_ADAPTERS)
    for name in BUNDLED_ADAPTERS:
        file = LoRAModule(name=name, path=f"bundled:{name}").resolved_file()
        assert file == ADAPTER_DIR / f"{name}.safetensors"


@pytest.mark.parametrize("file", SHIPPED)
def test_shipped_files_are_valid(file: str) -> None:
    assert load_settings(config_path=STAGES / file).config.stage_args


def schema_keys(loc: Loc = ()) -> Iterator[Loc]:
    for key in known_keys(loc):
        at: Loc = (*loc, key)
        yield at
        yield from schema_keys((*at, 0) if key in ("stage_args", "lora_modules") else at)


def test_the_annotated_example_explains_every_key() -> None:
    text = (STAGES / "annotated_example.yaml").read_text(encoding="utf-8")
    marks = parse_yaml(text, "annotated_example.yaml").marks
    keys = list(schema_keys())
    assert len(keys) > 50
    assert [dotted(key) for key in keys if key not in marks] == []
    lines = text.splitlines()
    for key in keys:
        comment = lines[marks[key].line - 1].partition("  # ")[2]
        assert re.search(r"; (default \S|required)|required$", comment), (key, comment)


def default_of(loc: Loc) -> str:
    model: type[pydantic.BaseModel] = DeployConfig
    for part in loc[:-1]:
        if isinstance(part, str):
            inner = re.findall(r"[\w.]+", str(model.model_fields[part].annotation))
            known = {cls.__name__: cls for cls in _models()}
            model = next(known[n] for n in (w.split(".")[-1] for w in inner) if n in known)
    field = model.model_fields[str(loc[-1])]
    if field.is_required():
        return "required"
    if isinstance(field.default, pydantic.BaseModel):
        return "`{}`"
    return f"`{json.dumps(field.default)}`"


def _models() -> list[type[pydantic.BaseModel]]:
    base = DeployConfig.__mro__[1]
    return list(base.__subclasses__())


def test_the_documented_table_is_the_schema() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented: dict[str, tuple[str, str]] = {}
    for section in text.split("\n### ")[1:]:
        title = section.splitlines()[0].strip("`")
        prefix = "" if title == "Top level" else f"{title}."
        for key, value, default in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", section, re.M):
            documented[prefix + key] = (value, default)
    expected = {
        dotted(loc).replace("[0]", "[]"): (allowed(loc), default_of(loc)) for loc in schema_keys()
    }
    assert documented == expected


def test_the_documented_errors_are_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    bad = re.findall(r"```yaml\n(.*?)```", text, re.S)[-1]
    printed = re.findall(r"```text\n(.*?)\n```", text, re.S)
    monkeypatch.chdir(tmp_path)
    Path("stages.yaml").write_text(bad, encoding="utf-8")
    with pytest.raises(ConfigFileError) as caught:
        load_settings(config_path="stages.yaml")
    assert str(caught.value) == printed[0]
    with pytest.raises(ConfigFileError) as caught:
        load_settings(overrides={"max_num_seqs": 0})
    assert str(caught.value) == printed[1]


def test_every_option_has_one_place() -> None:
    assert len(set(OVERRIDES.values())) == len(OVERRIDES)
    assert set(OVERRIDES.values()) <= set(schema_keys())


def test_the_configuration_never_imports_torch() -> None:
    code = (
        "import sys, omni_engine.stages.config, omni_engine.stages.settings as s; "
        "s.load_settings(); "
        "print({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def config_error_of(path: Path | None, options: dict[str, object]) -> str | None:
    try:
        load_settings(config_path=path, overrides=options, origin="constructor")
    except ConfigError as error:
        return str(error)
    return None


def loads_or_explains(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    text = config_error_of(path, {})
    assert text is None or f"{path}:" in text
    assert text is None or text.encode("utf-8")


TOKENS = st.sampled_from(
    [
        *("stage_args", "stage_id", "engine_args", "model", "bundled", "limits", "runtime"),
        *("lora_modules", "name", "path", "default_lora", "devices", "extra_args", "height"),
        *("default_sampling_params", "dtype", "max_num_seqs", "bundled:night", "./x", "~", "<<"),
        *(": ", ":", "- ", "\n", "\n  ", "\n    ", "\n      ", "{", "}", "[", "]", ", ", "? "),
        *("&a ", "*a", "!!int ", "!x", "|", ">", "'", '"', "#", "%YAML 1.1\n", "---", "...", "\t"),
        *("0", "-1", "1e3", "1.5", ".inf", ".nan", "true", "on", "null", "2020-01-01", "0x1"),
        *("\\ud800", "\\U0011ffff", "\x00", "\x85", "\ufeff", "é", "9" * 40, "=", "@", "`"),
    ]
)
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(st.lists(TOKENS, max_size=60))
def test_yaml_like_text_raises_nothing_but_config_errors(tmp_path: Path, tokens: list[str]) -> None:
    loads_or_explains("".join(tokens).encode("utf-8", "surrogatepass"), tmp_path / "f.yaml")


@FUZZ
@given(st.binary(max_size=200))
@example(b"\xff\xfea\x00")
@example(b"\xef\xbb\xbf")
@example(b"%YAML " + b"9" * 5000 + b".1\n---\na")
def test_random_bytes_raise_nothing_but_config_errors(tmp_path: Path, content: bytes) -> None:
    loads_or_explains(content, tmp_path / "f.yaml")


KEYS = st.sampled_from(
    [*OVERRIDES, "stage_args", "limits", "engine_args", "name", "path", "scale", "height", "x"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["bundled", "bundled:x", "auto", "0,0", "./x", "\0", "fifo", "cpu"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
)


@FUZZ
@given(VALUES, VALUES, VALUES)
def test_any_data_in_the_right_place_raises_nothing_but_config_errors(
    tmp_path: Path, engine_args: object, runtime: object, limits: object
) -> None:
    stage = {"stage_id": 0, "engine_args": engine_args, "runtime": runtime}
    text = json.dumps({"stage_args": [stage, stage], "limits": limits})
    loads_or_explains(text.encode(), tmp_path / "f.yaml")


@FUZZ
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_options_raise_nothing_but_config_errors(options: dict[str, object]) -> None:
    assert config_error_of(None, options) != ""
