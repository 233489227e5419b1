"""No code names an accelerator where it could ask its tensors or npu_ops.device, so that it runs on every device.

``# device-literal: reason`` on the line excuses one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where naming the device is the purpose.
HOMES = ("npu_ops/device.py", "npu_ops/ascend/", "npu_ops/virtual_npu/", "vllm_plugin/devices/")
ACCELERATOR = re.compile(r"(cuda|npu|xpu|hpu|privateuseone)(:.*)?")
EXCUSE = re.compile(r"# device-literal: \S+")


def literals(text: str) -> Iterator[int]:
    """Lines on which an accelerator is named as a device, or a tensor is sent to one by name."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and any(_names_accelerator(part) for part in _device_positions(node)):
            excused = any(EXCUSE.search(line) for line in lines[node.lineno - 1 : node.end_lineno])
            if not excused:
                yield node.lineno


def _device_positions(call: ast.Call) -> Iterator[ast.expr]:
    yield from (keyword.value for keyword in call.keywords if keyword.arg in ("device", "device_type"))
    if isinstance(call.func, ast.Attribute):
        if call.func.attr in ("to", "device", "set_default_device", "get_device_module"):
            yield from call.args[:1]
        if call.func.attr in ("cuda", "npu") and not call.args:
            yield ast.Constant(call.func.attr)


def _names_accelerator(node: ast.expr) -> bool:
    if isinstance(node, ast.JoinedStr) and node.values:  # f"cuda:{rank}"
        return _names_accelerator(node.values[0])
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(ACCELERATOR.fullmatch(node.value))


def test_no_hardcoded_device(source_file: Path) -> None:
    found = list(literals(source_file.read_text(encoding="utf-8")))
    assert not found, f"{source_file}, lines {found}: take the device from a tensor, the test's `device`, or npu_ops.device"


@pytest.mark.parametrize(
    "text",
    [
        "torch.empty(3, device='cuda')",
        "torch.empty(3, device='npu:0')",
        "torch.empty(3, device=f'cuda:{rank}')",
        "x.to('cuda', non_blocking=True)",
        "torch.device('cuda:0')",
        "x.cuda()",
        "torch.autocast(device_type='cuda')",
        "torch.empty(\n    3,\n    device='npu',\n)",
    ],
)
def test_the_check_sees(text: str) -> None:
    assert list(literals(text)) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "torch.empty(3, device=x.device)",
        "x.to('cpu')",
        "x.to(torch.float32)",
        "names = ['cuda', 'npu']",
        "torch.device(name)",
        "torch.empty(3, device='cuda')  # device-literal: the driver's own test",
    ],
)
def test_the_check_lets_pass(text: str) -> None:
    assert list(literals(text)) == []
