"""Every CUDA kernel compiles ahead of time for an H100 or H200 (sm_90a) as its op launches it: no GPU needed."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from npu_ops.contract import OP_STEMS, OpCase, all_contracts
from npu_ops.fused_infer_attention import build_case, build_latent_case
from npu_ops.kv_quant_sparse_flash_attention import pack_case
from npu_ops.lightning_indexer import build_case as build_scores
from npu_ops.sparse_flash_attention import build_sparse_case

# A library does the work of the first two; the others are done by the kernels of the op that they quantise.
NO_KERNEL = (
    "hadamard_rotation", "transpose_batchmatmul", "kv_quant_sparse_flash_attention", "quant_lightning_indexer",
)  # fmt: skip
TARGET = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
         torch.int8: "i8", torch.float8_e4m3fn: "fp8e4nv"}  # fmt: skip
# Name, batch of (query length, key length), (heads, KV heads, dim, block size), dtype.
MAIN_BATCHES = {"prefill": [(1024, 2048)], "decode": [(1, 64)] * 2, "split": [(1, 4096)]}
ATTENTION = [
    *((name, batch, (32, 8, 128, 128), torch.bfloat16) for name, batch in MAIN_BATCHES.items()),
    ("prefill-contiguous", [(1024, 1024)], (32, 8, 128, 0), torch.bfloat16),
    ("prefill-d256", [(64, 64)] * 4, (8, 2, 256, 16), torch.bfloat16),
    ("prefill-d192", [(64, 64)], (6, 2, 192, 48), torch.float16),
    ("prefill-d192-v128", [(64, 64)], (16, 16, 192, 0), torch.bfloat16),
    ("prefill-d80", [(64, 64)], (3, 3, 80, 48), torch.float16),
    ("prefill-fp32", [(64, 64)], (4, 2, 128, 16), torch.float32),
    ("decode-fp32-d256", [(1, 64)], (8, 8, 256, 0), torch.float32),
]


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches of the ops called in a test, recorded instead of run."""
    recorded: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        recorded.append(Launch(kernel, args, options))

    for stem in (*OP_STEMS, "mla_attention"):
        monkeypatch.setattr(importlib.import_module(f"cuda_fallback.{stem}"), "launch", record, raising=stem not in NO_KERNEL)
    return recorded


def compile_launch(call: Launch) -> tuple[int, int]:
    """Compile as Triton's own launcher would specialise it; registers of a thread and bytes of spill stores."""
    signature, constants, hints = {}, {}, {}
    values = dict(zip(call.kernel.arg_names, call.args, strict=False)) | call.options
    for index, parameter in enumerate(call.kernel.params):
        name, value = parameter.name, values.pop(parameter.name)
        special = isinstance(value, int) and not parameter.do_not_specialize
        if value is None or parameter.is_constexpr or (special and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=hints)
    compiled = triton.compile(source, target=TARGET, options=values)
    assert compiled.metadata.shared <= SHARED_MEMORY
    return assemble(compiled.asm["ptx"])


def assemble(ptx: str) -> tuple[int, int]:
    """Registers and spill bytes as ptxas reports them for the text of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(TARGET.arch).path, "-v", "--gpu-name=sm_90a", "-o", f"{folder}/kernel.cubin", str(source)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers and spills, report
    return int(registers[1]), int(spills[1])


def attention_case(batch: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype) -> OpCase:
    options = {"sparse_mode": 3, "learnable_sink": torch.zeros(shape[0])}
    return build_case("", batch, shape, options, "cpu", dtype, 0, 128 if shape[2:] == (192, 0) else 0)


@pytest.mark.parametrize(("name", "batch", "shape", "dtype"), ATTENTION, ids=[row[0] for row in ATTENTION])
def test_attention(
    name: str, batch: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype,
    launches: list[Launch], record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    case = attention_case(batch, shape, dtype)
    all_contracts()["fused_infer_attention"].provider("CUDA")(*case.args, **case.kwargs)
    assert [call.kernel.fn.__name__ for call in launches] == (["_attend", "_merge"] if name == "split" else ["_attend"])
    for call in launches:
        registers, spills = compile_launch(call)
        print(f"{name}: {registers} registers, {spills} bytes spilled")
        record_property(call.kernel.fn.__name__, {"registers": registers, "spills": spills})
        assert spills == 0


# Batch, heads, block size, dtype: tiles of 16, 32 and 64 rows, keys in one block and across blocks, causal, fp32, divided.
LATENT = {
    "decode": ([(1, 64)] * 2, 16, 128, torch.bfloat16),
    "decode-b16": ([(1, 64)] * 2, 16, 16, torch.float16),
    "decode-h32": ([(1, 64)] * 2, 32, 128, torch.bfloat16),
    "rows-b16": ([(4, 64)] * 2, 8, 16, torch.bfloat16),
    "decode-h128": ([(1, 64)] * 2, 128, 128, torch.bfloat16),
    "rows-h128-b16": ([(2, 64)], 128, 16, torch.bfloat16),
    "fp32": ([(1, 64)], 16, 128, torch.float32),
    "split": ([(1, 4096)], 128, 128, torch.bfloat16),
}


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str, launches: list[Launch], record_property: Callable[[str, object], None]) -> None:
    batch, heads, block_size, dtype = LATENT[name]
    mode = {"sparse_mode": 3 if name.startswith("rows") else 0}
    case = build_latent_case(name, batch, heads, block_size, mode, "cpu", dtype, 0)
    all_contracts()["fused_infer_attention"].provider("CUDA")(*case.args, **case.kwargs)
    names = ["_attend_latent", "_merge"] if name == "split" else ["_attend_latent"]
    assert [call.kernel.fn.__name__ for call in launches] == names
    for call in launches:
        registers, spills = compile_launch(call)
        print(f"{name}: {registers} registers, {spills} bytes spilled")
        record_property(call.kernel.fn.__name__, {"registers": registers, "spills": spills})
        assert spills == 0


# Heads, rows, dtype: tiles of 16, 32 and 64 heads, a number of heads that is none, fp32, and indices divided.
SPARSE = {
    "h16": (16, 300, torch.bfloat16),
    "h20": (20, 300, torch.float16),
    "h128": (128, 70, torch.bfloat16),
    "fp32": (16, 300, torch.float32),
    "split": (128, 8, torch.bfloat16),
}


@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention(name: str, form: str, launches: list[Launch], record_property: Callable[[str, object], None]) -> None:
    heads, rows, dtype = SPARSE[name]
    dtype = torch.bfloat16 if form == "packed" and dtype == torch.float16 else dtype
    case = build_sparse_case(name, [(rows, 2048)], heads, 2048, 128, {}, "cpu", dtype, 0)
    op = "sparse_flash_attention" if form == "plain" else "kv_quant_sparse_flash_attention"
    case = case if form == "plain" else pack_case(case)
    all_contracts()[op].provider("CUDA")(*case.args, **case.kwargs)
    assert [call.kernel.fn.__name__ for call in launches] == (["_attend", "_merge"] if name == "split" else ["_attend"])
    for call in launches:
        registers, spills = compile_launch(call)
        print(f"{name} {form}: {registers} registers, {spills} bytes spilled")
        record_property(call.kernel.fn.__name__, {"registers": registers, "spills": spills})
        assert spills == 0


# Heads and dtype: products of two rows, of many, and those without matrix units.
INDEXER = [(64, torch.bfloat16), (4, torch.float16), (1, torch.float16), (64, torch.float32), (16, torch.float32)]


@pytest.mark.parametrize(("heads", "dtype"), INDEXER, ids=str)
def test_indexer(heads: int, dtype: torch.dtype, launches: list[Launch]) -> None:
    case = build_scores("", ([(70, 300)], heads, 128, 32, 0), "cpu", dtype, 0, {})
    all_contracts()["lightning_indexer"].provider("CUDA")(*case.args, **case.kwargs)
    assert [call.kernel.fn.__name__ for call in launches] == ["_score", "_select"]
    for call in launches:
        registers, spills = compile_launch(call)
        print(f"{call.kernel.fn.__name__}: {registers} registers, {spills} bytes spilled")
        assert spills == 0


def others() -> Iterator[tuple[str, OpCase]]:
    """The last case of each size that the other ops' contracts name, in bf16."""
    for name, contract in all_contracts().items():
        own_tests = ("fused_infer_attention", "sparse_flash_attention", "kv_quant_sparse_flash_attention")
        if name not in (*own_tests, "hadamard_rotation"):
            wanted = {"odd", "holes", "latent", "wide", "mixed", "partial-half-bfloat16", "odd-interleave-float32",
                      "deepseek-v3", "spare", "decode", "decode-int8", "decode-fp8", "odd-int8"}  # fmt: skip
            for case in contract.cases("cpu", torch.bfloat16, 0):
                if case.name in wanted:
                    yield name, case


OTHERS = list(others())


@pytest.mark.parametrize(("name", "case"), OTHERS, ids=[f"{name}-{case.name}" for name, case in OTHERS])
def test_other(name: str, case: OpCase, launches: list[Launch]) -> None:
    all_contracts()[name].provider("CUDA")(*case.args, **case.kwargs)
    assert launches
    for call in launches:
        registers, spills = compile_launch(call)
        print(f"{call.kernel.fn.__name__}: {registers} registers, {spills} bytes spilled")
        assert spills == 0
