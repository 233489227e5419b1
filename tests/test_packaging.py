"""What the distribution ships and the budgets that keep the source readable."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
ROOMS = {"vllm_plugin", "npu_ops", "cuda_fallback", "dsa_cp", "sfa", "mla_workspace", "sleep_mode", "planner"}
FILE_LINES = 500
FUNCTION_LINES = 80
KERNEL_LINES = 150

Function = ast.FunctionDef | ast.AsyncFunctionDef


def shipped() -> Iterator[Path]:
    """Every Python file of the rooms, whether or not pyproject.toml lists its package."""
    return (path for room in sorted(ROOMS) for path in sorted((ROOT / room).rglob("*.py")))


def written() -> Iterator[Path]:
    """Every Python file of the repository that people write: the rooms and what stands beside them."""
    yield from shipped()
    for folder in ("tests", "benchmarks", "tools"):
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def place(path: Path, function: Function) -> str:
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


def is_kernel(function: Function) -> bool:
    """Whether a decorator compiles the function for a device: ``triton.jit``, ``gluon.jit`` or ``jit``."""
    names = (ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list)
    return any(name.rpartition(".")[2] == "jit" for name in names)


def test_packages_are_the_rooms() -> None:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in shipped() if path.name == "__init__.py"}
    assert set(PACKAGES) == found
    assert {name.partition(".")[0] for name in PACKAGES} == ROOMS
    assert len(PACKAGES) == len(set(PACKAGES))


def test_every_shipped_file_is_in_a_package() -> None:
    folders = {path.parent for path in shipped()}
    assert folders == {ROOT.joinpath(*name.split(".")) for name in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed(package: str) -> None:
    assert ROOT.joinpath(*package.split("."), "py.typed").is_file()


def test_every_pin_says_why() -> None:
    """A line with a version has a comment of its own, or stands in a run of such lines under a comment."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = text[text.index("dependencies = [") : text.index("[project.entry-points")].splitlines()
    explained, pinned, silent = False, 0, []
    for line in lines:
        if re.search(r'"[\w\[\],-]+ ?[<>=~!]=', line):
            pinned += 1
            if not explained and "#" not in line:
                silent.append(line)
        else:
            explained = line.lstrip().startswith("#")
    assert pinned
    assert not silent


def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: setuptools leaves build/ and *.egg-info where it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        source,
    ]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not built.returncode, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    assert wheel.name.endswith("-py3-none-any.whl")
    modules = {".".join(name.parent.parts) for name in names if name.suffix == ".py"}
    assert modules == set(PACKAGES)
    assert {name.parts[0] for name in names} == ROOMS | {names[-1].parts[0]}, "only the rooms and *.dist-info"
    assert names[-1].parts[0].endswith(".dist-info")
    assert {".".join(name.parent.parts) for name in names if name.name == "py.typed"} == set(PACKAGES)
    assert any(name.name == "LICENSE" for name in names)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in written()}
    assert not {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > FILE_LINES}


def test_functions_are_short() -> None:
    long = []
    for path in written():
        for function in functions(path):
            lines = function.end_lineno - function.lineno + 1
            if lines > (KERNEL_LINES if is_kernel(function) else FUNCTION_LINES):
                long.append(f"{place(path, function)}: {lines} lines")
    assert not long


def test_every_shipped_function_is_annotated() -> None:
    """Arguments and result; kernels are left out, whose arguments are what Triton makes of them."""
    bare = []
    for path in shipped():
        for function in functions(path):
            if is_kernel(function):
                continue
            given = function.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
            missing = [arg.arg for arg in named if arg.annotation is None and arg.arg not in ("self", "cls")]
            if missing or function.returns is None:
                bare.append(f"{place(path, function)}: {', '.join(missing) or 'result'}")
    assert not bare


def test_imports_point_downwards() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    linted = subprocess.run([script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert not linted.returncode, linted.stdout + linted.stderr


def test_importing_the_plugin_is_cheap() -> None:
    """vLLM loads the entry point in every process: asking whether we are wanted must not load a device's packages."""
    code = "import sys, vllm_plugin; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "torch_npu", "vllm", "triton"} & set(loaded.stdout.split())
