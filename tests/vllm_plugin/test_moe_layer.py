"""vLLM's DeepSeek experts, built by vLLM on our platform, against transformers': one rank, and two in both ways to divide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_ops import device as devices
from npu_ops import virtual_npu

SCRIPT = Path(__file__).parent / "moe_layer.py"


@pytest.mark.parametrize(("ranks", "divided"), [(1, "widths"), (2, "widths"), (2, "experts")])
def test_experts_equal_transformers(device, tmp_path, ranks, divided):
    """In processes of their own: vLLM resolves one platform for life, and this one must be ours."""
    if device != devices.CPU and devices.device_count(device) < ranks:
        pytest.skip(f"one {device} device")
    name = "virtual-npu" if device == devices.NPU and virtual_npu.is_enabled() else device
    environment = {**os.environ, "VLLM_NPU_PARITY_DEVICE": name, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(ranks), divided, str(tmp_path / "rendezvous")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for rank, process in enumerate(started):
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
        assert "experts agree" in output
