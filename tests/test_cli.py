"""The command line: help, wrong usage, serving, generating, interrupting."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from conftest import PATTERN
from PIL import Image
from rich.console import Console
from support_pipelines import pattern

from omni_engine.cli import configuration, generate, inspection, interrupts, keys, loras, serve
from omni_engine.cli import main as cli
from omni_engine.cli.http_options import HttpOptions
from omni_engine.cli.options import EngineOptions
from omni_engine.cli.pictures import slug
from omni_engine.cli.progress import RequestProgress
from omni_engine.cli.tables import print_rows
from omni_engine.engine.handles import RequestEvent
from omni_engine.protocol.sampling import LoRARequest
from omni_engine.stages.settings import OVERRIDES

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
ENGINE = ["--pipeline", PATTERN, "--devices", "cpu", "--max-num-seqs", "4"]
LORAS = ["--lora-modules", "outline=bundled:outline", "--lora-modules", "night=bundled:night"]
HEAVY = {"torch", "diffusers", "transformers", "zmq", "pydantic", "numpy", "PIL", "yaml"}


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error_text(self) -> str:
        """Standard error without the frames and line breaks of usage errors."""
        return " ".join(self.err.replace("│", " ").split())


def checked(code: int, out: str, err: str) -> Result:
    for text in (out, err):
        assert all(c.isprintable() or c == "\n" for c in text), "control characters"
        assert "Traceback" not in text, text
    return Result(code, out, err)


def run_command(*args: str, timeout_s: float = 120) -> Result:
    done = subprocess.run([COMMAND, *args], capture_output=True, text=True, timeout=timeout_s)
    return checked(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def invoke(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Run a command in this process: for what neither starts nor needs an engine."""

    def run(*args: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["omni-engine", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return checked(int(ended.value.code or 0), *capsys.readouterr())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(*args: str) -> subprocess.Popen[str]:
    """Start a command as a terminal does: in a process group of its own."""
    return subprocess.Popen([COMMAND, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, start_new_session=True)  # fmt: skip


def wait_for_line(stream: Any, text: str) -> str:
    for line in stream:
        if text in line:
            return str(line)
    raise AssertionError(f"the output ended without {text!r}")


def stop(process: subprocess.Popen[str], number: signal.Signals) -> Result:
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    return checked(process.returncode, out, err)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A served engine at the default address; yields the line that announces it."""
    process = start("serve", *ENGINE, *LORAS, "--name", "pattern", "--log-level", "warning")
    try:
        assert process.stdout is not None
        announced = process.stdout.readline()
        assert process.stdout.readline() == "pattern is ready\n"
        yield announced
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, ""), err
    finally:
        process.kill()
        process.communicate()


def pictures_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.png"))


# -- help and imports


HELPS = [[], ["serve"], ["generate"], ["status"], ["models"], ["config", "show"],
         ["config", "check"], ["keys", "new"], ["loras"],
         *(["loras", name] for name in ("list", "load", "unload", "pin", "unpin"))]  # fmt: skip


@pytest.mark.parametrize("command", HELPS, ids=" ".join)
def test_help_describes_the_command_with_examples(
    invoke: Callable[..., Result], command: list[str]
) -> None:
    result = invoke(*command, "--help")
    assert result.code == 0
    assert "Examples" in result.out
    assert f"omni-engine {' '.join(command)}".strip() in result.out
    assert "…" not in result.out, "an option's name is cut off"


def test_help_documents_the_exit_codes(invoke: Callable[..., Result]) -> None:
    text = invoke("--help").out
    for code in ("0", "1", "2", "130"):
        assert any(line.split()[:1] == [code] for line in text.splitlines())


EPILOGS = [cli._EPILOG, serve._EPILOG, generate._EPILOG, inspection._STATUS_EPILOG,
           inspection._MODELS_EPILOG, configuration._SHOW_EPILOG, configuration._CHECK_EPILOG,
           keys._NEW_EPILOG, loras._EPILOG, loras._LIST_EPILOG, loras._LOAD_EPILOG,
           loras._UNLOAD_EPILOG, loras._PIN_EPILOG, loras._UNPIN_EPILOG]  # fmt: skip
EXAMPLES = [line.strip() for text in EPILOGS for line in text.splitlines() if "  omni-eng" in line]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid_command_lines(example: str) -> None:
    command: Any = typer.main.get_command(cli.app)
    context = None
    args = shlex.split(example)
    name = args.pop(0)
    while hasattr(command, "get_command") and args:
        context = command.make_context(name, args[:1], parent=context)
        name = args.pop(0)
        command = command.get_command(context, name)
    assert command.make_context(name, args, parent=context).params


@pytest.mark.parametrize(
    ("args", "excepted"),
    [(["--help"], set()), (["--version"], set()), (["serve", "--help"], {"pydantic"})],
)  # a command's options make recent versions of typer itself import pydantic
def test_help_imports_nothing_heavy(args: list[str], excepted: set[str]) -> None:
    code = f"""
import sys
from omni_engine.cli.main import main
sys.argv[1:] = {args!r}
try:
    main()
finally:
    print(sorted({HEAVY - excepted!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_version(invoke: Callable[..., Result]) -> None:
    result = invoke("--version")
    assert (result.code, result.out.split()[0]) == (0, "omni-engine")


def test_every_setting_has_an_option() -> None:
    options = set(EngineOptions.__dataclass_fields__) - {"config", "log_level", "log_format"}
    http = set(HttpOptions.__dataclass_fields__)
    assert not options & http
    assert options | http | {"endpoint", "model"} == set(OVERRIDES)


# -- wrong usage


WRONG = {
    "nonsense": "nonsense",
    "generate a": "--out",
    "generate -o DIR": "PROMPT",
    "generate a -o DIR --steps 0": "--steps",
    "generate a -o DIR --steps many": "--steps",
    "generate a -o DIR --seed -1": "--seed",
    "generate a -o DIR --n 0": "--n",
    "generate a -o DIR --guidance-scale nan": "guidance_scale",
    "generate a -o DIR --extra-arg oops": "--extra-arg",
    "generate a -o DIR --lora night:1000": "lora_request.scale",
    "generate a -o FILE": "--out",
    "generate a -o DIR --max-num-seq 2": "--max-num-seqs",
    "generate a -o DIR --max-num-seqs 0": "--max-num-seqs",
    "generate a -o DIR --connect auto --max-num-seqs 2": "--max-num-seqs",
    "generate a -o DIR --connect auto --no-step-execution": "--step-execution",
    "generate a -o DIR --connect nowhere": "--connect",
    "generate a -o DIR --sampler=": "sampler",
    "generate a -o DIR --preview-every 0": "--preview-every",
    "generate a -o DIR --preview-dir DIR": "--preview-every",
    "generate a -o DIR --preview-every 2 --preview-dir FILE": "--preview-dir",
    "generate a -o DIR --cache-backend x": "--cache-backend",
    "serve --step-quantum 0 --step-execution": "--step-quantum",
    "serve --step-quantum 2": "set step_execution: true",
    "serve --max-resident-groups no": "--max-resident-groups",
    "serve --max-stall-ms -1 --step-execution": "--max-stall-ms",
    "serve --prompt-cache-size -1": "--prompt-cache-size",
    "serve --step-execution --request-batch-max-wait-ms 5": "--request-batch-max-wait-ms",
    "generate a -o DIR --connect tcp://192.0.2.1:5570": "tcp://192.0.2.1:5570",
    "serve --max-num-seqs 0": "--max-num-seqs",
    "serve --max-num-seqs four": "--max-num-seqs",
    "serve --request-batch-max-wait-ms -1": "--request-batch-max-wait-ms",
    "serve --scheduling-policy groupd": "grouped",
    "serve --dtype float33": "float32",
    "serve --pipeline 'a b'": "--pipeline",
    "serve --devices tpu": "--devices",
    "serve --replicas 0": "--replicas",
    "serve --log-level loud": "--log-level",
    "serve --log-format xml": "--log-format",
    "serve --lora-modules sketch": "--lora-modules",
    "serve --lora-modules sketch=nowhere.safetensors": "nowhere.safetensors",
    "serve --default-lora nite": "night",
    "serve --default-sampling-params [1]": "--default-sampling-params",
    'serve --default-sampling-params {\\"steps\\":1}': "steps",
    "serve --config nowhere.yaml": "nowhere.yaml",
    "serve ./nowhere": "nowhere",
    "serve --endpoint http://here": "--endpoint",
    "serve --endpoint tcp://0.0.0.0:5570": "tcp://0.0.0.0:5570",
    "status --connect nowhere": "--connect",
    "status --conect auto": "--connect",
    "models --connect ipc://": "--connect",
    "config check": "FILE",
    "loras --connect nowhere": "--connect",
    "loras --json load a b": "options of `loras load` stand after it",
    "loras load a": "PATH",
    "loras load a b --scale many": "--scale",
    "loras unload": "NAME",
    "loras unpin a --connect nowhere": "--connect",
    "loras lode a b": "load",
    "serve --lora-dirs DIR": "there is no folder",
    "serve --max-cpu-loras 0": "--max-cpu-loras",
    "serve --lora-merge always": "one of off, auto",
    "serve --lora-merge auto --deterministic": "--lora-merge",
    "serve --max-mixed-adapters 2": "set mixed_lora: true",
    "serve --mixed-lora --max-loras 2 --max-mixed-adapters 3": "--max-mixed-adapters",
    "generate a -o DIR --connect auto --mixed-lora": "--mixed-lora",
    "generate a -o DIR --lora night --lora outline:1000": "lora_request.scale",
    "config show --threads 0": "--threads",
    "config show --max-pixels 0": "--max-pixels",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_names_the_culprit(
    invoke: Callable[..., Result], tmp_path: Path, line: str
) -> None:
    (tmp_path / "file").touch()
    places = {"DIR": str(tmp_path / "out"), "FILE": str(tmp_path / "file")}
    result = invoke(*(places.get(word, word) for word in shlex.split(line)))
    assert result.code == 2
    assert WRONG[line] in result.error_text
    assert result.out == ""


def test_commands_say_at_once_that_no_engine_answers(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/e"
    for args in (["status"], ["models", "--json"], ["generate", "a", "-o", str(tmp_path)]):
        result = invoke(*args, "--connect", address)
        assert (result.code, result.out) == (1, "")
        assert f"no engine answers at {address}" in result.err
        assert "omni-engine serve" in result.err


# -- configuration


def test_config_show_tells_where_values_come_from(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text("stage_args:\n  - stage_id: 0\n    engine_args:\n      model: bundled\n"
                    "      max_num_seqs: 2\n      max_loras: 3\n")  # fmt: skip
    args = ["config", "show", "--config", str(file), "--max-num-seqs", "6",
            "--lora-modules", "dark=bundled:night"]  # fmt: skip
    rows = {row["path"]: row for row in json.loads(invoke(*args, "--json").out)}
    arguments = "stage_args[0].engine_args"
    for path, value, origin in (
        (f"{arguments}.max_num_seqs", 6, "command line"),
        (f"{arguments}.max_loras", 3, f"{file}:6"),
        (f"{arguments}.lora_modules[0].name", "dark", "command line"),
        (f"{arguments}.scheduling_policy", "grouped", "default"),
    ):
        assert (rows[path]["value"], rows[path]["origin"]) == (value, origin)
    shown = invoke(*args)
    assert shown.code == 0
    (line,) = [line for line in shown.out.splitlines() if f"{arguments}.max_loras " in line]
    assert line.split() == [f"{arguments}.max_loras", "3", f"{file}:6"]


def test_config_check_lists_every_problem(invoke: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text("stage_args:\n  - stage_id: 0\n    engine_args:\n      model: bundled\n"
                    "      max_num_seq: 2\n    runtime:\n      replicas: none\n")  # fmt: skip
    result = invoke("config", "check", str(file))
    assert result.code == 2
    assert f"{file}:5:7: stage_args[0].engine_args.max_num_seq: unknown key" in result.out
    assert "did you mean max_num_seqs?" in result.out
    assert f"{file}:7:7: stage_args[0].runtime.replicas" in result.out
    found = json.loads(invoke("config", "check", str(file), "--json").out)
    assert (found["ok"], [p["line"] for p in found["problems"]]) == (False, [5, 7])
    assert found["problems"][0]["hint"] == "did you mean max_num_seqs?"


def test_config_check_accepts_a_right_file(invoke: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "stages.yaml"
    file.write_text("stage_args: [{stage_id: 0, engine_args: {model: bundled}}]")
    assert invoke("config", "check", str(file)) == (0, f"{file}: ok\n", "")
    found = json.loads(invoke("config", "check", str(file), "--json").out)
    assert (found["ok"], found["problems"]) == (True, [])


def test_slugs_are_safe_file_names() -> None:
    assert slug("A cat, on  a mat!") == "a-cat-on-a-mat"
    assert slug("../../Ümläut/\x1b[31m") == "umlaut-31m"
    assert slug("猫") == "picture"
    assert len(slug("very " * 100)) <= 80


def test_ctrl_c_during_start_up_is_held_not_lost() -> None:
    interrupts.hold()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.release()


# -- a served engine


def test_serve_announces_how_to_connect(served: str) -> None:
    assert served.startswith("serving pattern at ipc://")
    assert "omni-engine generate" in served
    assert served.rstrip().endswith("--connect auto")


def test_generate_connected(served: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    prompts = ["a cat", "a dog", "a fox"]
    result = run_command("generate", *prompts, "-o", str(out), "--connect", "auto", "--seed", "5",
                         "--n", "2", "--height", "24", "--model", "pattern")  # fmt: skip
    assert result.code == 0, result.err
    assert pictures_of(out) == [f"0{i}-{slug(p)}-{seed}.png" for i, p in enumerate(prompts, 1)
                                for seed in (5, 6)]  # fmt: skip
    lines = result.out.splitlines()
    for line, name in zip(lines, pictures_of(out), strict=False):
        path, seed = line.split("  ")[:2]
        assert (path, seed) == (str(out / name), f"seed {name[-5]}")
        assert "batch of 3" in line
        assert "s per picture" in line
    assert lines[6].startswith("6 pictures in ")
    picture = np.asarray(Image.open(out / "02-a-dog-6.png"))
    assert picture.shape[0] == 24
    np.testing.assert_array_equal(picture, pattern("a dog", 6, *picture.shape[:2]))


def test_generate_prints_json_and_overwrites_nothing(served: str, tmp_path: Path) -> None:
    args = ["generate", "a cat", "-o", str(tmp_path), "--connect", "auto", "--seed", "1", "--json"]
    first, second = (json.loads(run_command(*args).out) for _ in range(2))
    (item,) = first["results"]
    assert item["files"] == [{"path": str(tmp_path / "01-a-cat-1.png"), "seed": 1}]
    assert (item["status"], item["error"], item["seed"]) == ("completed", None, 1)
    assert item["metrics"]["max_batch_size"] == 1
    assert second["results"][0]["files"][0]["path"] == str(tmp_path / "01-a-cat-1-2.png")


def test_generate_writes_the_others_when_one_fails(served: str, tmp_path: Path) -> None:
    args = ["generate", "a cat", " ", "a dog", "-o", str(tmp_path), "--connect", "auto",
            "--seed", "1"]  # fmt: skip
    result = run_command(*args)
    assert result.code == 1
    assert pictures_of(tmp_path) == ["01-a-cat-1.png", "03-a-dog-1.png"]
    assert 'prompt 2 " ": the prompt is empty [invalid_request]' in result.err
    found = json.loads(run_command(*args, "--json").out)["results"]
    assert [item["status"] for item in found] == ["completed", "failed", "completed"]
    assert found[1]["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("option", "code", "text"),
    [
        (["--extra-arg", "raise_text=boom"], "model_error", "boom"),
        (["--extra-arg", "no_such=1"], "unknown_field", "no_such"),
        (["--lora", "nite:0.5"], "unknown_adapter", "Did you mean 'night'?"),
        (["--model", "patern"], "unknown_model", "Did you mean 'pattern'?"),
        (["--height", "17"], "invalid_request", "a multiple of 8"),
    ],
)
def test_generate_prints_the_requests_error(
    served: str, tmp_path: Path, option: list[str], code: str, text: str
) -> None:
    result = run_command("generate", "a cat", "-o", str(tmp_path), "--connect", "auto", *option)
    assert result.code == 1
    assert f"[{code}]" in result.err
    assert text in result.err
    assert pictures_of(tmp_path) == []


def test_status(served: str) -> None:
    found = json.loads(run_command("status", "--json").out)
    (stage,) = found["stages"]
    assert (stage["name"], stage["state"]) == ("pattern", "ready")
    shown = run_command("status").out
    for text in (found["endpoint"], "PatternPipeline", stage["batching"], "stage0-worker0",
                 "night", "takes no adapters", "batch sizes",
                 "the model's own only", "deterministic"):  # fmt: skip
        assert text in shown
    assert "resident groups" not in shown


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_status_breaks_no_word_in_a_narrow_terminal(served: str, width: int) -> None:
    found = json.loads(run_command("status", "--json").out)
    (stage,) = found["stages"]
    (worker,) = stage["workers"]
    output = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    inspection.print_status(found, output)
    shown = output.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for text in ("worker", "device", "process", "batches", "requests", "loaded in", "weights",
                 "error", worker["worker_id"], worker["state"], str(worker["pid"]),
                 "default scale", "outline", "broken"):  # fmt: skip
        assert re.search(rf"(?<!\S){re.escape(text)}(?!\S)", shown), text


@pytest.mark.parametrize(("width", "expected"), [(40, 3), (24, 0), (200, 5)])
def test_a_table_is_shortened_before_it_becomes_blocks(width: int, expected: int) -> None:
    """Its header has the columns that there is room for; what is wrong is told in any case."""
    columns = ("name", "state", "scale", "file", "error")
    rows = [("a", "ready", "1", "/long" * 10, "-"), ("b", "broken", "0.5", "/b", "it holds NaN")]
    output = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    print_rows(output, "adapters", columns, rows, ("name", "state", "scale"))
    shown = output.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    headers = [line.split() for line in shown.splitlines() if "state" in line and "name" in line]
    assert headers == ([list(columns[:expected])] if expected else [])
    for text in ("ready", "broken", "0.5"):
        assert text in shown
    assert "it holds NaN" in " ".join(shown.split())


def test_models(served: str) -> None:
    (model,) = json.loads(run_command("models", "--json", "--connect", "auto").out)
    assert (model["name"], model["state"]) == ("pattern", "ready")
    (line,) = [line for line in run_command("models").out.splitlines() if "pattern" in line]
    assert line.split() == ["pattern", "ready", "outline,", "night", "-"]


def test_a_second_engine_at_the_same_address_is_refused(served: str) -> None:
    result = run_command("serve", *ENGINE)
    assert (result.code, result.out) == (2, "")
    assert "another engine serves there already" in result.err
    assert "--endpoint" in result.err


def test_interrupting_a_connected_generate_aborts_its_requests(served: str, tmp_path: Path) -> None:
    process = start("generate", "a cat", "-o", str(tmp_path), "--connect", "auto",
                    "--extra-arg", "sleep_ms=3000")  # fmt: skip
    wait_for_line(process.stderr, "submitted 1 request")
    result = stop(process, signal.SIGINT)
    assert (result.code, result.out) == (130, "")
    assert pictures_of(tmp_path) == []
    (stage,) = json.loads(run_command("status", "--json").out)["stages"]
    assert stage["requests"]["aborted"] == 1


# -- step execution


STEPPED = ["--pipeline", "gated_pipelines:GatedSteps", "--devices", "cpu", "--max-num-seqs", "2",
           "--step-execution"]  # fmt: skip


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A served engine in step mode: its address and its process."""
    address = f"ipc://{os.environ['TMPDIR']}/stepped"
    process = start("serve", *STEPPED, "--endpoint", address, "--log-level", "warning")
    try:
        wait_for_line(process.stdout, "is ready")
        yield address, process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def generate_held(address: str, gate: Path, *args: str) -> subprocess.Popen[str]:
    """Start a command whose request is held at its third step until the gate exists."""
    holds = json.dumps([[3, str(gate)]])
    return start("generate", "a cat", "-o", str(gate.parent / "out"), "--connect", address,
                 "--steps", "9", "--seed", "1", "--extra-arg", f"holds={holds}", *args)  # fmt: skip


def until_held(address: str) -> dict[str, Any]:
    """Wait until a request has done three steps; the engine's status then."""
    while True:  # bounded by the test's time limit
        found = run_command("status", "--json", "--connect", address)
        status: dict[str, Any] = json.loads(found.out)
        groups = status["stages"][0]["workers"][0]["groups"]
        if any(member["step_index"] == 3 for group in groups for member in group["requests"]):
            return status


def test_previews_are_saved_and_status_shows_running_steps(
    stepped: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    address, _ = stepped
    process = generate_held(address, tmp_path / "gate", "--preview-every", "2",
                            "--preview-dir", str(tmp_path / "previews"))  # fmt: skip
    until_held(address)
    shown = run_command("status", "--connect", address).out
    for text in ("step execution", "resident groups", "3/9", "mean tick", "ticks by size",
                 "16 x 16"):  # fmt: skip
        assert text in shown
    (tmp_path / "gate").touch()
    out, err = process.communicate(timeout=60)
    result = checked(process.returncode, out, err)
    assert result.code == 0
    assert pictures_of(tmp_path / "out") == ["01-a-cat-1.png"]
    names = [f"01-a-cat-1-step-{step:04}.png" for step in (2, 4, 6, 8)]
    assert pictures_of(tmp_path / "previews") == names
    for step, name in zip((2, 4, 6, 8), names, strict=True):
        preview = np.asarray(Image.open(tmp_path / "previews" / name))
        np.testing.assert_array_equal(preview, np.full((8, 8, 3), step))
    again = generate_held(address, tmp_path / "gate", "--preview-every", "4",
                          "--preview-dir", str(tmp_path / "previews"))  # fmt: skip
    out, err = again.communicate(timeout=60)
    assert checked(again.returncode, out, err).code == 0
    assert pictures_of(tmp_path / "out") == ["01-a-cat-1-2.png", "01-a-cat-1.png"]
    more = ["01-a-cat-1-2-step-0004.png", "01-a-cat-1-2-step-0008.png"]
    assert pictures_of(tmp_path / "previews") == sorted([*names, *more])


def test_stopping_lets_requests_take_their_last_steps(
    stepped: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    address, server = stepped
    process = generate_held(address, tmp_path / "gate")
    until_held(address)
    server.send_signal(signal.SIGINT)
    while not json.loads(run_command("status", "--json", "--connect", address).out)["stopping"]:
        pass
    (tmp_path / "gate").touch()
    out, err = process.communicate(timeout=60)
    assert checked(process.returncode, out, err).code == 0
    picture = np.asarray(Image.open(tmp_path / "out" / "01-a-cat-1.png"))
    np.testing.assert_array_equal(picture, pattern("a cat", 1, *picture.shape[:2]))
    assert server.wait(timeout=60) == 0


def test_a_terminal_shows_the_steps_of_running_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with RequestProgress(pictures=2) as progress:
        progress.submitted(2)
        progress.note(RequestEvent("a", "running"), "a prompt\nof two lines")
        progress.note(RequestEvent("a", "running", 3, 9), "a prompt\nof two lines")
        progress.refresh()
        shown = capsys.readouterr().err
        assert "0/2" in shown
        assert "3/9" in shown
        assert "a prompt of two lines" in shown
        progress.note(RequestEvent("a", "finished_completed"), "a prompt\nof two lines")
        progress.advance(1)
        progress.refresh()
        shown = capsys.readouterr().err
        assert "1/2" in shown
        assert "3/9" not in shown


# -- engines of their own


def test_serve_stops_while_it_loads(tmp_path: Path) -> None:
    process = start("serve", *ENGINE, "--endpoint", f"ipc://{tmp_path}/e", "--log-level", "error")
    wait_for_line(process.stdout, f"--connect ipc://{tmp_path}/e")
    assert stop(process, signal.SIGINT) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_generate_with_an_engine_of_its_own(tmp_path: Path) -> None:
    prompts = ["a cat", "a dog", "a fox"]
    result = run_command("generate", *prompts, "-o", str(tmp_path), *ENGINE, "--json")
    assert (result.code, result.err) == (0, "submitted 3 requests\n")
    items = json.loads(result.out)["results"]
    assert [item["prompt"] for item in items] == prompts
    assert [item["metrics"]["max_batch_size"] for item in items] == [3, 3, 3]
    for number, item in enumerate(items, 1):
        (file,) = item["files"]
        assert file["path"] == str(
            tmp_path / f"0{number}-{slug(item['prompt'])}-{item['seed']}.png"
        )
        picture = np.asarray(Image.open(file["path"]))
        np.testing.assert_array_equal(picture, pattern(item["prompt"], item["seed"], 16, 16))


def test_a_model_that_fails_to_load_is_an_error_of_the_command(tmp_path: Path) -> None:
    result = run_command("generate", "a", "-o", str(tmp_path), "--devices", "cpu",
                         "--pipeline", "support_pipelines:NoForward")  # fmt: skip
    assert (result.code, result.out) == (1, "")
    assert "forward" in result.err


def test_interrupting_generate_leaves_nothing(tmp_path: Path) -> None:
    process = start("generate", "a", "b", "-o", str(tmp_path), *ENGINE,
                    "--extra-arg", "sleep_ms=600000")  # fmt: skip
    wait_for_line(process.stderr, "submitted 2 requests")
    assert stop(process, signal.SIGINT) == (130, "", "")
    assert pictures_of(tmp_path) == []


def test_terminating_generate_leaves_nothing(tmp_path: Path) -> None:
    process = start("generate", "a", "-o", str(tmp_path), *ENGINE, "--log-level", "info")
    wait_for_line(process.stderr, "engine listens on")
    result = stop(process, signal.SIGTERM)
    assert (result.code, result.out) == (128 + signal.SIGTERM, "")


def test_serve_ends_when_no_model_can_be_loaded() -> None:
    endpoint = f"ipc://{os.environ['TMPDIR']}/own/engine"
    result = run_command("serve", "--pipeline", "support_pipelines:NoForward", "--devices", "cpu",
                         "--endpoint", endpoint)  # fmt: skip
    assert result.code == 1
    assert "is down: pipeline class support_pipelines:NoForward lacks forward" in result.out


def test_a_deploy_file_in_the_place_of_a_model(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stages.yaml").write_text("stage_args: []\n")
    result = invoke("serve", "stages.yaml")
    assert result.code == 2
    assert "stages.yaml is a deploy file" in result.error_text
    assert "--config" in result.error_text


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ([], None),
        (["night"], LoRARequest("night")),
        (["night:0.5", "out:line"], (LoRARequest("night", 0.5), LoRARequest("out:line"))),
        (["a:-1", "a:2"], (LoRARequest("a", -1), LoRARequest("a", 2))),
    ],
)
def test_adapters_of_a_request(given: list[str], asked: object) -> None:
    assert generate.SamplingOptions(lora=given).params().lora_request == asked
