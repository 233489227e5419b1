"""``python -m vllm_plugin parity``: a real run against transformers, and what it says when two columns differ."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from vllm_plugin.parity import TOLERANCES, Answer, Run, compare, conclude


def test_device_equals_transformers(device, tmp_path):
    file = tmp_path / "parity.json"
    arguments = ["--devices", device, "--oracle", "transformers", "--prompts", "7", "--max-tokens", "12", "--json", file]
    command = [sys.executable, "-m", "vllm_plugin", "parity", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Parity. transformers against" in done.stdout
    result = json.loads(file.read_text())
    assert result["parity"]
    assert result["faults"] == []
    assert list(result["columns"]) == [device, "transformers"]
    base, oracle = ([Answer(**answer) for answer in column] for column in result["columns"].values())
    assert [len(answer.tokens) for answer in base] == [12] * 7
    worst = max(compare(a, b, result["dtype"], 0.0).worst for a, b in zip(base, oracle, strict=True))
    # Two independent computations never agree to the last bit in every token: 0 would mean that nothing was compared.
    assert 0 < worst <= TOLERANCES[result["dtype"]]
    # The real answers, one token changed.
    tokens = [*oracle[2].tokens]
    tokens[5] += 1
    changed = [*oracle[:2], replace(oracle[2], tokens=tokens), *oracle[3:]]
    status, said = concluded(Run("demo", "float32", 1e-3, result["prompts"], {"base": base, "other": changed}))
    assert status == 1
    assert f"differs other, prompt 3 (127 tokens): token 6 is {tokens[5]}, base {base[2].tokens[5]}" in said


BASE = Answer(tokens=[7, 8, 9], logprobs=[-0.5, -1.0, -1.5], gaps=[2.0, 0.01, 1.0])
SAME = replace(BASE, scores=[-0.5, -1.0, -1.5])


def concluded(run: Run) -> tuple[int, str]:
    console = Console(width=200, force_terminal=False)
    with console.capture() as said:
        status = conclude(run, None, console)
    return status, said.get()


@pytest.mark.parametrize(
    ("other", "dtype", "fault"),
    [
        (SAME, "float32", None),
        (replace(SAME, scores=[-0.5, -1.0009, -1.5]), "float32", None),
        (replace(SAME, scores=[-0.5, -1.002, -1.5]), "float32", "token 2: logprob -1.002000, base -1.000000"),
        (replace(SAME, scores=[-0.5, -1.0, float("nan")]), "float32", "token 3: logprob nan"),
        (replace(SAME, tokens=[7, 5, 9]), "float32", "token 2 is 5, base 8"),
        # In 16 bit a near tie may turn, and what follows it is another answer; elsewhere it may not.
        (replace(SAME, tokens=[7, 5, 1]), "float16", None),
        (replace(SAME, tokens=[7, 8, 1]), "float16", "token 3 is 1, base 9: no near tie, the base's best two are 1.0e+00"),
        (replace(SAME, scores=[-0.5, -1.0, -1.4]), "float16", "token 3: logprob -1.400000, base -1.500000"),
    ],
)
def test_rule(other, dtype, fault):
    run = Run("demo", dtype, TOLERANCES[dtype], [[1, 2]], {"base": [BASE], "other": [other]})
    status, said = concluded(run)
    assert status == (0 if fault is None else 1)
    assert ("No parity." in said) == (fault is not None)
    assert fault is None or f"differs other, prompt 1 (2 tokens): {fault}" in said
