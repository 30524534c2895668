"""Shared fixtures: real engines, and the check that nothing is left over after any test."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omni_engine import Omni, OmniClient

TESTS = Path(__file__).parent
RUN_MARK = "OMNI_ENGINE_TEST_RUN"

# Everything a test starts inherits these: a private place for sockets and a mark to find it by.
os.environ[RUN_MARK] = uuid.uuid4().hex
os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="oe-")
os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMNI_ENGINE_CACHE"] = str(Path(os.environ["TMPDIR"], "cache"))


def started_processes() -> set[int]:
    """Processes of this test run, orphans included, found by the mark in their environment."""
    found = set()
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(RUN_MARK) == os.environ[RUN_MARK]
            if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def bound_sockets(folder: str) -> set[str]:
    """Sockets below a folder that some process still holds, wherever they are."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return {line.split()[-1] for line in lines if line.split()[-1].startswith(folder)}


def leftovers() -> set[str]:
    """Processes, shared-memory segments, sockets and engine directories that exist now."""
    processes = {f"process {pid}" for pid in started_processes()}
    segments = {f"/dev/shm/{entry.name}" for entry in Path("/dev/shm").iterdir()}
    folder = Path(os.environ["TMPDIR"])
    places = [path for path in folder.iterdir() if not path.name.startswith("pytest-of-")]
    inside = [path for place in places if place.is_dir() for path in place.iterdir()]
    files = {str(path) for path in (*places, *inside) if path.is_socket()}
    files |= {str(path) for path in places if path.name.startswith("omni-engine")}
    files |= bound_sockets(str(folder))
    return processes | segments | files


def assert_nothing_new(before: set[str], where: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while new := leftovers() - before:
        if time.monotonic() > deadline:
            pytest.fail(f"left over after {where}: {sorted(new)}")
        time.sleep(0.05)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def nothing_left_over_by_module(request: pytest.FixtureRequest) -> Iterator[None]:
    before = leftovers()
    yield
    assert_nothing_new(before, f"module {request.node.name}")


@pytest.fixture(autouse=True)
def nothing_left_over(
    request: pytest.FixtureRequest, nothing_left_over_by_module: None
) -> Iterator[None]:
    """After every test: no process, socket file or shared-memory segment more than before.

    Module-wide engines are set up before this fixture, so they count as before.
    """
    before = leftovers()
    yield
    assert_nothing_new(before, request.node.name)


@contextlib.contextmanager
def engines() -> Iterator[Callable[..., Omni]]:
    started: list[Omni] = []

    def start(model: str | None = None, **options: object) -> Omni:
        omni = Omni(model, **{"devices": "cpu", **options})
        started.append(omni)
        return omni

    try:
        yield start
    finally:
        for omni in started:
            omni.close()


@pytest.fixture(scope="module")
def start_engine() -> Iterator[Callable[..., Omni]]:
    """Start engines that end with the module; for module-wide fixtures."""
    with engines() as start:
        yield start


@pytest.fixture
def start_own_engine() -> Iterator[Callable[..., Omni]]:
    """Start engines that end with the test; options are those of ``Omni``."""
    with engines() as start:
        yield start


PATTERN = "support_pipelines:PatternPipeline"
"""A hand-written pipeline that paints prompt, seed and index into its pixels; see tests/support."""


@pytest.fixture(scope="module")
def pattern_engine(start_engine: Callable[..., Omni]) -> Omni:
    """One worker, batches of up to 4, the pattern pipeline."""
    return start_engine(
        "bundled",
        pipeline=PATTERN,
        max_num_seqs=4,
        name="pattern",
        lora_modules=[],
        default_sampling_params={},
    )


@pytest.fixture
def client(pattern_engine: Omni) -> Iterator[OmniClient]:
    with OmniClient(pattern_engine.endpoint) as client:
        yield client
