"""torch.distributed's hccl backend: torch_npu's own process group in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).parent / "collective_rank.py"


def run(tmp_path: Path, scenario: str, ranks: int, **environment: str) -> list[tuple[int, str]]:
    """Exit status and output of every rank."""
    environment = {
        **os.environ,
        "VIRTUAL_NPU_COUNT": "4",
        "PYTHONPATH": str(ROOT),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), scenario, str(rank), str(ranks), str(tmp_path / "rendezvous")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [(process.returncode, out) for process in started for out in [process.communicate(timeout=180)[0]]]
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(tmp_path, ranks):
    for rank, (status, output) in enumerate(run(tmp_path, "collectives", ranks)):
        assert status == 0, f"rank {rank}:\n{output[-3000:]}"
        assert "all right" in output
        assert "Traceback" not in output
        assert "Invalid process group" not in output
    assert not [path for path in Path("/dev/shm").glob("virtual-npu-*") if time.time() - path.stat().st_mtime < 60]


def test_ranks_that_end_without_goodbye(tmp_path):
    for status, output in run(tmp_path, "no_goodbye", 2):
        assert status == 0, output[-3000:]
        assert "Traceback" not in output


def test_a_rank_that_dies_fails_the_others_by_name(tmp_path):
    (_, _), (status, output) = run(tmp_path, "death", 2)
    assert status != 0
    assert "virtual NPU: rank 0 of communicator" in output
    assert "has ended" in output
