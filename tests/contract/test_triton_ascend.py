"""The Triton kernels of npu_ops/ascend: compiled for Ascend and CUDA, and their values where they can run.

Compiling for Ascend needs an environment of its own: ``python tools/triton_ascend_check.py --setup`` makes it. Where it is
missing these tests are skipped by that name; with TRITON_ASCEND=require in the environment, as in CI, they fail instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton

from npu_ops import device as devices
from npu_ops import virtual_npu
from npu_ops.ascend import kernels
from npu_ops.contract import EXACT, all_contracts
from npu_ops.reference.gather_kv_cache import gather_kv_cache

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("triton_ascend_check", ROOT / "tools" / "triton_ascend_check.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
LAUNCHES = TOOL.launches()


@pytest.fixture
def ascend() -> None:
    """Asks for the environment with triton-ascend."""
    if not TOOL.is_ready():
        text = f"no triton-ascend in {TOOL.environment()}. Run: python tools/triton_ascend_check.py --setup"
        (pytest.fail if os.environ.get("TRITON_ASCEND") == "require" else pytest.skip)(text)


def check_all(target: str, record_property: Callable[[str, object], None]) -> None:
    results = list(TOOL.compile_all(LAUNCHES, [target]))
    assert len(results) == len(LAUNCHES) > 0
    for result in results:
        print(TOOL.line(result))
        record_property(result["name"], {"stage": result["stage"], **result["memory"]})
    assert [TOOL.line(result) for result in results if TOOL.fault(result)] == []


@pytest.mark.usefixtures("ascend")
@pytest.mark.parametrize("target", TOOL.ASCEND)
def test_compiles_for_ascend(target: str, record_property: Callable[[str, object], None]) -> None:
    check_all(target, record_property)


@pytest.mark.parametrize("target", TOOL.CUDA)
def test_compiles_for_cuda(target: str, record_property: Callable[[str, object], None]) -> None:
    check_all(target, record_property)


def test_every_kernel_is_launched() -> None:
    jitted = {name for name, value in vars(kernels).items() if isinstance(value, triton.JITFunction)}
    launched = {launch["kernel"] for launch in LAUNCHES}
    helpers = {name for name in jitted for kernel in launched if f"{name}(" in getattr(kernels, kernel).src}
    assert jitted == launched | helpers


BAD = [
    ("too_large", {"x": "*fp32", "y": "*fp32"}, "overflow"),
    ("element_wise", {"x": "*fp32", "y": "*fp32", "index": "*i32"}, "element-by-element memory accesses"),
    ("pointer_select", {"x": "*fp32", "y": "*fp32", "other": "*fp32"}, "MLIRCompilationError"),
]


@pytest.mark.usefixtures("ascend")
def test_bad_kernels_are_refused() -> None:
    jobs: list[dict[str, Any]] = [
        {"kernel": name, "name": name, "signature": signature, "constants": {}, "divisible": [0, 1]}
        for name, signature, _ in BAD
    ]
    results = list(TOOL.compile_all(jobs, TOOL.ASCEND[:1], HERE / "bad_kernels.py"))
    for result, (name, _, problem) in zip(results, BAD, strict=True):
        print(TOOL.line(result))
        assert problem in (TOOL.fault(result) or ""), name


def test_values(device: str, subtests: pytest.Subtests) -> None:
    """In Triton's interpreter where the device has no Triton; else as compiled for it."""
    if device in (devices.CPU, devices.NPU) and (device == devices.CPU or virtual_npu.is_enabled()):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, str(HERE / "interpreted_kernels.py")]
        run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        cases = [json.loads(text) for text in run.stdout.splitlines() if text.startswith("{")]
        for case in cases:
            with subtests.test(case=case["case"]):
                assert case["same"]
        assert run.returncode == 0, run.stderr[-2000:]
        assert cases
        return
    for dtype in EXACT:
        for case in all_contracts()["gather_kv_cache"].cases(device, dtype, 0):
            offset = case.kwargs.get("seq_offset")
            found, wanted = ([x.clone() for x in case.args] for _ in range(2))
            if len(found[4]):
                kernels.gather_pages(*found, offset)
                gather_kv_cache(*wanted, seq_offset=offset)
            with subtests.test(case=f"{case.name}-{dtype}"):
                torch.testing.assert_close(found[4:], wanted[4:], rtol=0, atol=0, equal_nan=True)
