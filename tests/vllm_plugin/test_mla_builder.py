"""The MLA metadata builder on real vLLM batch descriptions, property-tested: every row sees every key it may, exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "mla_builder_properties.py"


def test_builder_properties(device):
    """In a process of its own: vLLM resolves one platform for life, and this one must be ours."""
    env = {**os.environ, "VLLM_NPU_PARITY_DEVICE": device}
    run = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip().endswith("properties hold")
