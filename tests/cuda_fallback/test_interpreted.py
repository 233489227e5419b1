"""The CUDA kernels' values, case by case, through Triton's interpreter: no GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_ops.contract import all_contracts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("op", sorted(all_contracts()))
def test_matches_reference(op: str, subtests: pytest.Subtests) -> None:
    program = ROOT / "tests" / "cuda_fallback" / "interpreted.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, program, op], capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        with subtests.test(case=line["case"]):
            assert not line["problem"], line["problem"]
    assert run.returncode == 0, run.stderr[-2000:]
    assert lines, "no case was run"
