"""Does a test notice each constant and operator of the planner's formulas? Changes them one at a time and runs tests/planner.

A change that no test notices has survived. Text is left alone: what an f-string shows is no arithmetic.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = tuple(f"planner/{name}.py" for name in ("memory", "weights", "work", "step", "timing"))
# What tests/planner needs, without tests/conftest.py: it loads torch, which takes longer than the tests.
COPIED = (
    "planner",
    "vllm_plugin",
    "mla_workspace",
    "npu_ops",
    "tests/planner",
    "tests/data",
    "benchmarks/results",
    "pyproject.toml",
)
SECONDS = 300  # a run that does not end has noticed
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or,
    ast.Or: ast.And, ast.USub: ast.UAdd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module: where it is, what it reads like before and after, and the module's whole new source."""

    module: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every change of a module's numbers and operators."""
    tree = ast.parse(source)
    for position, change in list(_changes(tree)):
        copy = deepcopy(tree)
        place = list(ast.walk(copy))[position]
        assert isinstance(place, ast.expr | ast.AugAssign)
        before = ast.unparse(place)
        change(place)
        yield Mutant(module, place.lineno, before, ast.unparse(place), ast.unparse(copy))


def _changes(tree: ast.Module) -> Iterator[tuple[int, Callable[[ast.AST], None]]]:
    """Position in the walk of what can be changed, and the change."""
    text = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    for position, node in enumerate(ast.walk(tree)):
        if id(node) in text:
            continue
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float()):
                yield position, _another_number
            case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op) if type(op) in SWAPPED:
                yield position, _another_operator
            case ast.Compare(ops=ops):
                for at, op in enumerate(ops):
                    if type(op) in SWAPPED:
                        yield position, lambda node, at=at: _another_comparison(node, at)


def _another_number(node: ast.AST) -> None:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int | float)
    # Small floats such as 1e-6 would hide in an added 1, or turn absurd.
    node.value = node.value + 1 if isinstance(node.value, int) else node.value * 1.5 or 1.0


def _another_operator(node: ast.AST) -> None:
    assert isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp | ast.UnaryOp)
    setattr(node, "op", SWAPPED[type(node.op)]())  # noqa: B010  # the four classes type `op` differently


def _another_comparison(node: ast.AST, at: int) -> None:
    assert isinstance(node, ast.Compare)
    other = SWAPPED[type(node.ops[at])]()
    assert isinstance(other, ast.cmpop)
    node.ops[at] = other


def copy_tree(folder: Path) -> Path:
    """A copy in which a module can be changed."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def passes(folder: Path, module: str = "") -> bool:
    """Whether tests/planner pass in a copy: those of the module, which notice most, then the others."""
    own = Path("tests/planner") / f"test_{Path(module).stem}.py"
    first = [[str(own)]] if (folder / own).exists() else []
    return all(_run(folder, tests) for tests in [*first, ["tests/planner"]])


def _run(folder: Path, tests: list[str]) -> bool:
    """One run of pytest, in this process: it is one of many that were forked after pytest was loaded."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("planner", "vllm_plugin", "tests")]:
        del sys.modules[name]
    with contextlib.redirect_stdout(io.StringIO()):
        return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests]) == 0


def _survives(folder: Path, mutant: Mutant | None) -> NoReturn:
    """Exit status 1 if a copy with the change passes."""
    os.nice(5)
    signal.alarm(SECONDS)
    if mutant:
        (folder / mutant.module).write_text(mutant.source)
    sys.exit(int(passes(folder, mutant.module if mutant else "")))


def survivors(folders: list[Path], chosen: list[Mutant]) -> Iterator[Mutant]:
    """Changes that no test notices, as they are found; one process for each change, as many at a time as there are copies."""
    fork = multiprocessing.get_context("fork")
    running: dict[int, tuple[BaseProcess, Path, Mutant]] = {}
    left, free = list(reversed(chosen)), list(folders)
    while left or running:
        while left and free:
            mutant, folder = left.pop(), free.pop()
            process = fork.Process(target=_survives, args=(folder, mutant))
            process.start()
            running[process.sentinel] = process, folder, mutant
        for sentinel in connection.wait(list(running)):
            assert isinstance(sentinel, int)
            process, folder, mutant = running.pop(sentinel)
            process.join()
            shutil.copy(ROOT / mutant.module, folder / mutant.module)
            free.append(folder)
            if process.exitcode == 1:
                yield mutant


def main() -> int:
    """Print survivors and the share that was killed; return 1 if it is below --at-least."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--modules", nargs="+", default=MODULES, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; default: %(default)s")
    parser.add_argument("--at-least", type=float, default=90.0, metavar="PERCENT", help="default: %(default)s")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th change: a quick look")
    args = parser.parse_args()
    chosen = [mutant for name in args.modules for mutant in mutants(name, (ROOT / name).read_text())][:: args.every]
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    found = []
    with tempfile.TemporaryDirectory() as parent:
        folders = [copy_tree(Path(parent) / str(job)) for job in range(args.jobs)]
        for folder in folders:  # once without a change, which leaves compiled tests behind
            process = multiprocessing.get_context("fork").Process(target=_survives, args=(folder, None))
            process.start()
            process.join()
            if process.exitcode != 1:
                print("tests/planner fail without any change")
                return 2
        # A module that is changed twice within a second would be taken for the one compiled before.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for mutant in survivors(folders, chosen):
            found.append(mutant)
            print(f"survived  {mutant}", flush=True)
    killed = len(chosen) - len(found)
    share = 100 * killed / max(len(chosen), 1)
    print(f"{killed} of {len(chosen)} changes killed: {share:.1f} %")
    return 0 if share >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
