"""``omni-engine top`` and ``omni-engine trace`` with a real engine, a real terminal and files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATTERN

from omni_engine import LoRARequest, Omni, OmniClient, OmniDiffusionSamplingParams
from omni_engine.cli.strip import BARE, BLOCKS, IDLE, colour_of
from omni_engine.cli.trace_events import TraceEvents

COMMAND = str(Path(sys.executable).with_name("omni-engine"))
CONTROLS = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
BOUND_S = 60.0


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False, **more
    )
    assert "Traceback" not in done.stderr
    return done


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        colourful = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": "", "NO_COLOR": ""}
        variables = {**os.environ, **colourful, **environment}
        self.process = subprocess.Popen(
            [COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave,
            env={name: value for name, value in variables.items() if value},
        )  # fmt: skip
        os.close(slave)
        self.raw = ""

    def read(self, timeout_s: float = 0.1) -> bool:
        """Take in what is there; False at the end."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return True
        try:
            self.raw += os.read(self._master, 1 << 16).decode(errors="replace")
        except OSError:  # the last process has closed it
            return False
        return True

    def read_until(self, wanted: Callable[[str], Any]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not wanted(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            assert self.read() or wanted(self.text), self.text[-3000:]

    @property
    def text(self) -> str:
        """All that was written, without controls and colours."""
        return CONTROLS.sub("", self.raw)

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + BOUND_S
        while self.read():
            assert time.monotonic() < deadline, self.text[-3000:]
        return self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **more: Any) -> Terminal:
            made = Terminal(*arguments, **more)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., Omni]) -> Omni:
    """Two workers with the bundled model and adapters, some requests done."""
    engine = start_engine(
        "bundled",
        threads=1,
        replicas=2,
        max_num_seqs=4,
        default_sampling_params={"height": 64, "width": 64, "num_inference_steps": 2},
    )
    params = [
        OmniDiffusionSamplingParams(seed=i, lora_request=LoRARequest(name) if name else None)
        for i, name in enumerate(("night", "night", None, None, "outline", None))
    ]
    assert all(output.ok for output in engine.generate(["a red star"] * 6, params))
    assert not engine.generate("late", timeout_s=0.0).pop().ok
    return engine


def figures(engine: Omni | OmniClient) -> dict[str, Any]:
    (stage,) = engine.metrics()["stages"]
    return stage  # type: ignore[no-any-return]


# -- top


def test_top_prints_a_frame_where_there_is_no_terminal(engine: Omni) -> None:
    done = run("top", "--connect", engine.endpoint, "--interval", "0.1", "--span", "3600")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    first, *lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert re.match(r"omni-engine  up .+, \d clients, \d+\.\d requests/s, .* images/s", first)
    (row,) = [line for line in lines if line.startswith("bundled")]
    counts = figures(engine)["requests"]
    ends = [str(counts[kind]) for kind in ("completed", "failed", "aborted")]
    assert row.split()[1:3] == ["ready", "≤4"]
    assert row.split()[-3:] == ends
    rows = [line for line in lines if line.startswith("stage0-worker")]
    assert len(rows) == 2
    strips = "".join(row.split()[-1] for row in rows)
    assert set(strips) <= {IDLE, *BLOCKS}
    assert set(strips) & set(BLOCKS)
    (legend,) = [line for line in lines if line.startswith("adapters:")]
    assert "night" in legend or "outline" in legend or BARE in legend


def test_top_lists_what_went_wrong(engine: Omni) -> None:
    assert not engine.generate("x", OmniDiffusionSamplingParams(height=63)).pop().ok
    done = run("top", "--once", "--connect", engine.endpoint, "--interval", "0.1")
    assert re.search(r"^invalid_request +\d+  refused  earlier", done.stdout, re.MULTILINE)


def test_top_fits_a_narrow_terminal_and_has_colours(
    engine: Omni, terminal: Callable[..., Terminal]
) -> None:
    shown = terminal("top", "--once", "--connect", engine.endpoint, "--span", "3600")
    assert shown.end() == 0, shown.text
    lines = shown.text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("stage0-worker")]) == 2
    assert COLOURS.search(shown.raw)


def test_top_without_colours(engine: Omni, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", "--once", "--connect", engine.endpoint, NO_COLOR="1")
    assert shown.end() == 0
    codes = {code for found in COLOURS.findall(shown.raw) for code in re.findall(r"\d+", found)}
    assert codes <= {"0", "1", "2"}, "bold and dim are no colours"


def test_top_draws_until_ctrl_c(engine: Omni, terminal: Callable[..., Terminal]) -> None:
    shown = terminal("top", "--connect", engine.endpoint, "--interval", "0.1", "--span", "60")
    shown.read_until(lambda text: text.count("omni-engine  up") >= 2)
    before = figures(engine)["requests"]["completed"]
    params = OmniDiffusionSamplingParams(lora_request=LoRARequest("chalk"))
    assert engine.generate("a blue ring", params).pop().ok
    row = re.compile(rf"bundled +ready +≤4 +0 +- +0 +{before + 1} ")
    shown.read_until(lambda text: row.search(text) and "chalk" in text)
    assert colour_of("chalk") != colour_of(BARE)
    shown.process.send_signal(signal.SIGINT)
    assert shown.end() == 0
    assert "Traceback" not in shown.text


def test_top_says_so_when_the_engine_goes_away(
    start_own_engine: Callable[..., Omni], terminal: Callable[..., Terminal]
) -> None:
    engine = start_own_engine(
        "bundled", pipeline=PATTERN, lora_modules=[], default_sampling_params={}
    )
    shown = terminal("top", "--connect", engine.endpoint, "--interval", "0.1", columns=200)
    shown.read_until(lambda text: "omni-engine  up" in text)
    engine.close()
    assert shown.end() == 1
    assert "[engine_closed]" in shown.text
    assert re.search(r"hint: +It has ended, or is stuck", shown.text)


def test_top_needs_an_engine(tmp_path: Path) -> None:
    done = run("top", "--connect", f"ipc://{tmp_path}/nobody")
    assert done.returncode == 1
    assert "no engine answers" in done.stderr


# -- trace


def check(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Whether viewers can read it; the complete events by thread."""
    assert trace["displayTimeUnit"] == "ms"
    names: dict[str, set[Any]] = defaultdict(set)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= set(event)
        assert isinstance(event["ts"], int | float)
        match event["ph"]:
            case "M":
                names[event["name"]].add((event["pid"], event["tid"], event["args"]["name"]))
            case "X":
                assert event["dur"] >= 0
                assert event["args"]["requests"] >= len(event["args"]["request_ids"]) >= 1
                threads[event["pid"], event["tid"]].append(event)
            case "C":
                assert set(event["args"]) == {"waiting", "running"}
            case other:
                raise AssertionError(other)
    processes = {pid for pid, _, _ in names["process_name"]}
    known = {(pid, tid) for pid, tid, _ in names["thread_name"]}
    assert {pid for pid, _ in known} <= processes
    assert set(threads) <= known, "every worker has a name"
    assert any(event["ph"] == "C" for event in trace["traceEvents"])
    for events in threads.values():
        events.sort(key=lambda event: event["ts"])
        for one, following in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= following["ts"] + 0.01, "they don't overlap"
    return threads


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_trace_holds_every_batch(engine: Omni, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    out.write_text("what was there before")
    done = run("trace", "-o", str(out), "--connect", engine.endpoint)
    assert done.returncode == 0, done.stderr
    trace = read(out)
    threads = check(trace)
    stage = figures(engine)
    events = [event for of_thread in threads.values() for event in of_thread]
    assert len(events) == sum(worker["batches"] for worker in stage["workers"])
    assert done.stdout == f"{out}: {len(events)} batches and ticks\n"
    sizes = sum(event["args"]["requests"] for event in events)
    assert sizes == stage["histograms"]["batch_size"]["sum"]
    labels = {event["name"] for event in events}
    assert {"night", "outline", BARE} <= labels
    (night, *_) = [event for event in events if event["name"] == "night"]
    assert night["args"]["adapters"] == ["night:1"]
    assert night["args"]["kind"] == night["cat"] == "batch"
    ends = max(event["ts"] + event["dur"] for event in events) / 1e6
    assert trace["otherData"]["unix_time_of_ts_0"] + ends == pytest.approx(time.time(), abs=600)
    assert os.listdir(tmp_path) == [out.name], "nothing else is left"


def test_a_trace_holds_what_happens_meanwhile(engine: Omni, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    tracing = subprocess.Popen(
        [COMMAND, "trace", "-o", str(out), "--connect", engine.endpoint, "--seconds", "600"],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert tracing.stderr is not None
        assert "tracing for 600 s" in tracing.stderr.readline()
        handles = [engine.submit("a red star", request_id=f"meanwhile-{i}") for i in range(3)]
        assert all(handle.result(60).ok for handle in handles)
        tracing.send_signal(signal.SIGINT)
        _, told = tracing.communicate(timeout=BOUND_S)
    finally:
        if tracing.poll() is None:
            tracing.kill()
            tracing.wait(10)
    assert tracing.returncode == 0
    assert "interrupted: what there is is written" in told
    threads = check(read(out))
    ids = {i for events in threads.values() for e in events for i in e["args"]["request_ids"]}
    assert {f"meanwhile-{i}" for i in range(3)} <= ids
    numbers = [e["args"]["seq"] for events in threads.values() for e in events]
    assert len(set(numbers)) == len(numbers)


def test_a_trace_ends_by_itself(engine: Omni, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = run("trace", "-o", str(out), "--connect", engine.endpoint, "--seconds", "0.3")
    assert done.returncode == 0, done.stderr
    check(read(out))


@pytest.mark.parametrize("where", ["no/such/folder/trace.json", "."])
def test_a_trace_that_cant_be_written_is_refused_at_once(where: str, tmp_path: Path) -> None:
    done = run("trace", "-o", where, "--connect", "ipc:///nobody", cwd=tmp_path)
    assert done.returncode == 2
    assert "the trace can't be written" in done.stderr
    assert "--out" in done.stderr


def test_a_trace_replaces_files_only(engine: Omni, tmp_path: Path) -> None:
    pipe, link, real = (tmp_path / name for name in ("pipe", "link.json", "real.json"))
    os.mkfifo(pipe)
    done = run("trace", "-o", str(pipe), "--connect", engine.endpoint)
    assert (done.returncode, pipe.is_fifo()) == (2, True)
    assert "no regular file" in done.stderr
    link.symlink_to(real)
    done = run("trace", "-o", str(link), "--connect", engine.endpoint)
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    check(read(real))


def test_batches_that_still_run_reach_to_the_last_look() -> None:
    events = TraceEvents()
    box = {
        "seq": None, "stage": "m", "worker_id": "w", "kind": "batch", "start_s": 10.0,
        "end_s": None, "requests": 2, "request_ids": ["a", "b"],
        "adapters": [{"name": "night", "scale": 0.25}],
    }  # fmt: skip
    stages = [{"name": "m", "waiting": 1, "running": 2, "workers": [{"worker_id": "w"}]}]
    events.add({"now_s": 12.5, "wall_s": 1000.0, "next": 7, "missed": 3, "boxes": [],
                "running": [box], "stages": stages})  # fmt: skip
    trace = events.finished()
    ((_, (event,)),) = check(trace).items()
    assert (event["ts"], event["dur"]) == (10e6, 2.5e6)
    assert event["args"]["unfinished"] is True
    assert trace["otherData"] == {"unix_time_of_ts_0": 987.5, "boxes": 0, "missed": 3}
