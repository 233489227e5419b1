"""Contract check (a): what npu_ops/ascend asks CANN for, through torch_npu's own host code, is what the golden files say.

Every case in bf16 runs on the virtual NPU with recording on. golden/OP.txt holds, for each case, the call of torch_npu with
its arguments by name (a tensor that is one of ours, or a view of it, has its name in front), and below it what reached CANN:
the function and all arguments in its order, results last, 0 for null. ``GOLDEN=write`` in the environment writes the files
anew; the difference is to be read in review.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from npu_ops import virtual_npu
from npu_ops.contract import all_contracts
from npu_ops.device import NPU

FOLDER = Path(__file__).parent / "golden"
ASCEND = Path(__file__).parents[2] / "npu_ops" / "ascend"
CONTRACTS = all_contracts()
HEADER = (
    "# {}: what npu_ops/ascend asks torch_npu and CANN for, bf16. Written by: GOLDEN=write pytest tests/contract/test_golden.py"
)


def stored(name: str) -> list[str]:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def recorded(cases: Callable, serve: Callable, lines: tuple) -> Callable[[str], list[str]]:
    """Lines of an op's golden file, as the code is now."""
    npu_line, cann_line = lines

    def run(name: str) -> list[str]:
        found = [HEADER.format(name)]
        for case in cases(name, torch.bfloat16):
            with virtual_npu.record() as calls:
                served = serve(name, case, lambda x: x.clone().to(NPU))
            if served is None or not calls:
                continue
            assert [call.source for call in calls] == [call.op._schema.name for call in served.calls], case.name
            found.append(f"{case.name}:")
            for asked, reached in zip(served.calls, calls, strict=True):
                found += [f"  {npu_line(asked, served.inputs)}", f"    {cann_line(reached)}"]
        return found

    return run


@pytest.mark.parametrize("name", CONTRACTS)
def test_calls_are_the_golden_ones(name: str, recorded: Callable[[str], list[str]]) -> None:
    found = recorded(name)
    assert len(found) > 1, f"no case of {name} reaches CANN"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.txt").write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == stored(name)


def test_files_hold_every_operator_that_the_source_names() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CONTRACTS)
    held = {match[1] for name in CONTRACTS for line in stored(name) if (match := re.match(r"  (\w+)\(", line))}
    sources = [path.read_text(encoding="utf-8") for path in ASCEND.glob("*.py")]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    named = {ast.unparse(node) for node in nodes}
    assert held == {name.removeprefix("torch_npu.") for name in named if re.fullmatch(r"torch_npu\.npu_\w+", name)}
