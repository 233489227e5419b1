"""Nothing rebinds attributes of the packages that we build on: neither the project nor its tests.

If it is ever unavoidable, it lives in vllm_plugin/compat.py, with its reason and the condition for its removal.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

UPSTREAM = {"vllm", "torch", "torch_npu", "triton", "transformers"}
HOMES = ("vllm_plugin/compat.py",)


def rebindings(text: str) -> Iterator[int]:
    """Lines that assign to, delete or patch an attribute of something imported from upstream."""
    tree = ast.parse(text)
    names = set(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and _root(node) in names:
            yield node.lineno
        elif isinstance(node, ast.Call) and node.args and _is_setter(node.func):
            target = node.args[0]
            dotted = target.value if isinstance(target, ast.Constant) and isinstance(target.value, str) else ""
            if _root(target) in names or ("." in dotted and dotted.split(".")[0] in UPSTREAM):
                yield node.lineno


def _imported(tree: ast.Module) -> Iterator[str]:
    """Local names of upstream modules and of what is imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in UPSTREAM:
                    yield alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in UPSTREAM:
            yield from (alias.asname or alias.name for alias in node.names)


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; "" if it begins otherwise, as what a call returned."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_setter(function: ast.expr) -> bool:
    """setattr, monkeypatch.setattr, patch, patch.object, mocker.patch.object, object.__setattr__ and their like."""
    if isinstance(function, ast.Name):
        return function.id in {"setattr", "delattr", "patch"}
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in ("object", "dict", "multiple"):
        return isinstance(function.value, ast.Name | ast.Attribute) and ast.unparse(function.value).endswith("patch")
    return function.attr in {"setattr", "delattr", "patch", "__setattr__"}


def test_no_rebinding(source_file: Path) -> None:
    found = list(rebindings(source_file.read_text(encoding="utf-8")))
    assert not found, f"{source_file}, lines {found}: use a public hook of the package, or subclass"


@pytest.mark.parametrize(
    "text",
    [
        "import torch; torch.empty = f",
        "import torch; torch.cuda.Stream = X",
        "import torch as t; t.cuda.Stream += 1",
        "import torch.nn.functional as F; F.silu = f",
        "import vllm; setattr(vllm.x, 'y', 1)",
        "import vllm.envs; vllm.envs.X: int = 1",
        "from vllm.worker import Worker; Worker.load = f",
        "from vllm import envs as e; del e.X",
        "import torch; a, torch.empty = 1, f",
        "import torch\nfor torch.x in y: pass",
        "import triton; monkeypatch.setattr(triton, 'jit', f)",
        "monkeypatch.setattr('transformers.AutoModel', f)",
        "import torch; monkeypatch.delattr(torch.cuda, 'Stream')",
        "import torch_npu; mock.patch.object(torch_npu, 'npu_swiglu')",
        "patch('vllm.platforms.current_platform')",
        "def f():\n    import torch\n    torch.empty = 1",
    ],
)
def test_the_check_sees(text: str) -> None:
    assert len(list(rebindings(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import torch; empty = torch.empty",
        "import torch; x = torch.ones(2); x.grad = None",
        "from vllm import SamplingParams; params = SamplingParams(); params.n = 2",
        "self.torch = 1",
        "import torch; torch.ones(2)[0] = 1",
        "import torch; torch.set_num_threads(1)",
        "monkeypatch.setattr(ours, 'name', 1)",
        "monkeypatch.setattr('ours.torch', 1)",
    ],
)
def test_the_check_lets_pass(text: str) -> None:
    assert list(rebindings(text)) == []
