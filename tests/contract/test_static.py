"""Contract check (c): every call of torch_npu in this project fits the schemas of torch_npu_schemas.json.

It needs no torch_npu: tools/torch_npu_schemas.py wrote the file, for any version of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from npu_ops.contract import OP_STEMS

ROOT = Path(__file__).parents[2]
HOMES = ("tests/contract/test_static.py",)  # its wrong calls are meant
SCHEMAS: dict[str, str] = json.loads((Path(__file__).parent / "torch_npu_schemas.json").read_text(encoding="utf-8"))["schemas"]
# An operator in the source: torch_npu.npu_x, torch_npu.atb.npu_x, torch.ops.npu.x, torch.ops.npu.x.default.
OPERATOR = re.compile(
    r"(?:torch_npu\.(?=_?npu_|atb\.)(?P<atb>atb\.)?|torch\.ops\.(?P<space>npu|atb)\.)(?P<name>\w+)(?:\.(?P<overload>\w+))?"
)


@dataclass(frozen=True)
class Use:
    """An operator that the source names, and its call if it is called on the spot."""

    line: int
    name: str
    namespaces: tuple[str, ...]
    call: ast.Call | None


def uses(tree: ast.AST) -> Iterator[Use]:
    """Every operator of torch_npu in the source, whatever it was imported as."""
    aliases = imported(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        head, dot, tail = ast.unparse(node).partition(".")
        found = OPERATOR.fullmatch(aliases.get(head, head) + dot + tail)
        if found:
            spaces = (found["space"] or "atb",) if found["space"] or found["atb"] else ("npu", "atb")
            yield Use(node.lineno, found["name"], spaces, calls.get(id(node)))


def imported(tree: ast.AST) -> dict[str, str]:
    """Local names of imported modules and attributes, with what they stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {item.asname: item.name for item in node.names if item.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
    return names


def problem(use: Use) -> str | None:
    """What is wrong with the use of an operator; a call is right if it fits one of the overloads."""
    texts = [text for key, text in SCHEMAS.items() for space in use.namespaces if key.split(".")[0] == f"{space}::{use.name}"]
    if not texts:
        return f"{use.name} is no operator of torch_npu"
    if use.call is None:
        return None
    faults = [misfit(use.call, torch._C.parse_schema(text)) for text in texts]
    return None if None in faults else f"{use.name}: {faults[0]}"


def misfit(call: ast.Call, schema: torch._C.FunctionSchema) -> str | None:
    """Why a call does not fit a schema, as far as the source tells; ``*args`` and ``**kwargs`` may hold anything."""
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    known = {argument.name for argument in schema.arguments}
    names = {keyword.arg for keyword in call.keywords}
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    if len(call.args) > len(positional):
        return f"{len(call.args)} positional arguments, at most {len(positional)}"
    if unknown := sorted(name for name in names if name is not None and name not in known):
        return f"no argument {', '.join(unknown)}"
    given = set() if starred else set(positional[: len(call.args)])
    if twice := sorted(given & names):
        return f"{', '.join(map(str, twice))} given twice"
    required = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    if (missing := sorted(required - given - names)) and not starred and None not in names:
        return f"{', '.join(missing)} is missing"
    return None


def problems(text: str) -> list[str]:
    """Every problem of a source file, with its line."""
    found = ((use.line, problem(use)) for use in uses(ast.parse(text)))
    return sorted({f"line {line}: {fault}" for line, fault in found if fault})


def test_calls_fit_the_schemas(source_file: Path) -> None:
    text = source_file.read_text(encoding="utf-8")
    if "torch_npu" in text or "torch.ops" in text:
        assert problems(text) == [], source_file


def test_every_op_of_ours_is_looked_at() -> None:
    counts = {}
    for stem in OP_STEMS:
        source = (ROOT / "npu_ops" / "ascend" / f"{stem}.py").read_text(encoding="utf-8")
        counts[stem] = sum(use.call is not None for use in uses(ast.parse(source)))
    assert min(counts.values()) >= 1, counts
    print(f"{sum(counts.values())} calls: {counts}")


@pytest.mark.parametrize(
    "text",
    [
        "import torch_npu\ntorch_npu.npu_swiglu(x, dim=-1)",
        "import torch_npu as t\nt.npu_swiglu(x)",
        "from torch_npu import npu_swiglu as op\nop(x, -1)",
        "import torch\ntorch.ops.npu.npu_swiglu.default(x)",
        "import torch_npu\ntorch_npu.npu_swiglu(*args, **kwargs)",
        "import torch_npu\ntorch_npu.npu.set_device(0)",
        "import torch_npu\ntorch_npu._npu_reshape_and_cache(k, v, kc, vc, slots)",
        "import torch_npu\ntorch_npu.atb.npu_paged_cache_load(k, v, table, lens, seq_starts=None)",
    ],
)
def test_right_calls_pass(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import torch_npu\ntorch_npu.npu_swiglu(x, axis=-1)", "no argument axis"),
        ("import torch_npu\ntorch_npu.npu_swiglu(dim=-1)", "input is missing"),
        ("import torch_npu\ntorch_npu.npu_swiglu(x, -1, 0)", "3 positional arguments, at most 2"),
        ("import torch_npu\ntorch_npu.npu_swiglu(x, input=x)", "input given twice"),
        ("import torch_npu\ntorch_npu.npu_swish_glu(x)", "npu_swish_glu is no operator of torch_npu"),
        ("import torch_npu\nf = torch_npu.npu_swish_glu", "npu_swish_glu is no operator of torch_npu"),
        ("from torch_npu import npu_swiglu as op\nop()", "input is missing"),
        ("import torch\ntorch.ops.npu.npu_swiglu.default(x, y=1)", "no argument y"),
        ("import torch\ntorch.ops.atb.npu_swiglu(x)", "npu_swiglu is no operator"),
        # The first version's names on the second version of the attention op.
        ("import torch_npu\ntorch_npu.npu_fused_infer_attention_score_v2(q, k, v, num_heads=4)", "no argument num_heads"),
    ],
)
def test_wrong_calls_are_caught(text: str, fault: str) -> None:
    (found,) = problems(text)
    assert fault in found
