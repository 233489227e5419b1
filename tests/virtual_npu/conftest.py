"""Child processes, for what only the start of a process decides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENABLE = "from npu_ops import virtual_npu\nvirtual_npu.enable()\nimport torch\n"
OURS = ("VIRTUAL_NPU", "VIRTUAL_NPU_COUNT", "VIRTUAL_NPU_MEMORY", "VIRTUAL_NPU_SOC", "VIRTUAL_NPU_CANN")


@pytest.fixture
def in_process() -> Callable[..., str]:
    """Run code in a process of its own, by default with the virtual NPU on, and return what it prints."""

    def run(code: str, prelude: str = ENABLE, check: bool = True, **environment: str) -> str:
        kept = {key: value for key, value in os.environ.items() if key not in OURS}
        result = subprocess.run(
            [sys.executable, "-c", prelude + code],
            env={**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert not check or result.returncode == 0, result.stderr[-3000:]
        return result.stdout if check else result.stderr

    return run
