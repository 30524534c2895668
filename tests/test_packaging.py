"""The package as built: layout, wheel contents, import rules, installation from nothing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

ALLOWED_IMPORTS = {
    "protocol": {"protocol"},
    "stages": {"stages", "protocol"},
    "worker": {"worker", "stages", "protocol"},
    "engine": {"engine", "stages", "protocol"},
    "cli": {"cli", "engine", "worker", "stages", "protocol"},
}
"""Which of our packages each may import; the root holds only re-exports and the version."""

HEAVY = {"torch", "diffusers", "transformers", "peft", "accelerate"}


def source_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def tracked_files(folder: str) -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


def test_folders_on_disk_and_package_list_agree() -> None:
    on_disk = {
        str(path.parent.relative_to(ROOT))
        for top in (*ALLOWED_IMPORTS, "omni_engine")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert {FOLDERS[name] for name in PACKAGES} == on_disk
    assert set(FOLDERS) == set(PACKAGES)


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    for path in source_files(package):
        for module in imported_modules(path):
            if module.startswith("omni_engine."):
                assert module.split(".")[1] in ALLOWED_IMPORTS[package], f"{path}: {module}"


@pytest.mark.parametrize("package", ["protocol", "engine"])
def test_frontend_never_imports_torch(package: str) -> None:
    for path in source_files(package):
        heavy = {module.split(".")[0] for module in imported_modules(path)} & HEAVY
        assert not heavy, f"{path} imports {heavy}"


@pytest.mark.parametrize(
    "statement",
    [
        "import omni_engine",
        "from omni_engine import OmniClient, AsyncOmniClient, Omni, AsyncOmni",
        "from omni_engine import OmniDiffusionSamplingParams, LoRARequest, DiffusionOutput",
        "import omni_engine.stages.config, omni_engine.stages.settings",
        "import omni_engine.engine.server, omni_engine.worker.process",
    ],
)
def test_importing_the_frontend_loads_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([m for m in {sorted(HEAVY)} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_public_names_are_exactly_those_that_exist() -> None:
    import omni_engine

    for name in omni_engine.__all__:
        assert getattr(omni_engine, name).__name__ == name
    with pytest.raises(AttributeError, match="Nope"):
        omni_engine.Nope  # noqa: B018


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for name in sorted(tracked_files(".")):  # a clean copy: no build folder, no stray file
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    expected = set()
    for package, folder in FOLDERS.items():
        inner = [other for other in FOLDERS.values() if other.startswith(f"{folder}/")]
        for name in tracked_files(folder):
            if not any(name.startswith(f"{other}/") for other in inner):
                expected.add(package.replace(".", "/") + name.removeprefix(folder))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_adds_one_name_to_an_environment(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"omni_engine"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv, out = tmp_path / "venv", tmp_path / "pictures"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=120)
    python = venv / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True, timeout=900, cwd=tmp_path)
    demo = subprocess.run(
        [python, "-m", "omni_engine.cli.demo", "--out", out],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
    )
    assert len(list(out.glob("*.png"))) == 9
    assert str(out) in demo.stdout.replace("\n", "")
    where = "import omni_engine; print(omni_engine.__file__)"
    installed = subprocess.check_output([python, "-c", where], text=True, cwd=tmp_path)
    assert str(venv) in installed
    shutil.rmtree(venv)
