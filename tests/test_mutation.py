"""tools/mutate_planner.py: which changes it makes of a module, and which it leaves alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent / "tools" / "mutate_planner.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutate_planner", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = 1 + a", {"x = 2 + a", "x = 1 - a"}),
        ("x = a * b / 0.5", {"x = a / b / 0.5", "x = a * b * 0.5", "x = a * b / 0.75"}),
        ("x = -a // b", {"x = +a // b", "x = -a * b"}),
        ("x = a < b <= c", {"x = a <= b <= c", "x = a < b < c"}),
        ("x = a and b", {"x = a or b"}),
        ("x += 0.0", {"x -= 0.0", "x += 1.0"}),
        ("x = True", set()),
        ("x = f'{2 * a:.3g} B'", set()),
        ("def f(a: int | None) -> str:\n    return 'one 1'", set()),
    ],
)
def test_changes(tool, source, changed):
    assert {mutant.source for mutant in tool.mutants("m.py", source)} == changed


def test_a_change_says_where_it_is(tool):
    [mutant] = tool.mutants("planner/m.py", "a = b\nc = a + b\n")
    assert str(mutant) == "planner/m.py:2: a + b  ->  a - b"


def test_the_modules_are_there(tool):
    for module in tool.MODULES:
        assert (tool.ROOT / module).exists()
