"""Runs one op's CUDA kernels through Triton's interpreter on the CPU and prints a JSON line for each case.

A process of its own, because TRITON_INTERPRET counts only before triton is imported. Usage: interpreted.py OP
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.op_check import difference
from cuda_fallback import fused_infer_attention as fia
from npu_ops.contract import OpCase, OpContract, all_contracts
from npu_ops.fused_infer_attention import build_case

# The interpreter multiplies the bit patterns of bf16 matrices, so ops with products of matrices take fp16 in its place.
DTYPES = dict.fromkeys(("fused_infer_attention", "grouped_matmul"), (torch.float32, torch.float16))
DEFAULT_DTYPES = (torch.float32, torch.bfloat16)
# Ops over a paged cache, and which of their arguments is the first of its two tensors.
PAGED = {"fused_infer_attention": 1, "gather_kv_cache": 0, "scatter_kv_cache": 2}


def split_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    """Few rows over many keys, so that the keys are divided: sinks, a window, a request without keys, padding rows."""
    fia.KEYS_PER_SPLIT = 32
    sink = {"learnable_sink": torch.tensor([-1.0, 3.0, 0.5, 0.0])}
    yield build_case("split", [(1, 200), (1, 5), (1, 0)], (4, 2, 64, 16), {}, "cpu", dtype, 1)
    yield build_case("split-sink", [(1, 0), (1, 170)], (4, 1, 80, 48), sink, "cpu", dtype, 2)
    window = {"sparse_mode": 4, "pre_tokens": 70, "next_tokens": 3, **sink}
    yield build_case("split-window", [(3, 150), (2, 2)], (4, 4, 96, 0), window, "cpu", dtype, 3)


def pad_query(case: OpCase, rows: int = 5) -> OpCase:
    """The same call with ``rows`` padding rows of NaN past the last request."""
    query, key, value = case.args
    padded = torch.cat((query, torch.full((rows, *query.shape[1:]), torch.nan, dtype=query.dtype)))
    return OpCase(f"{case.name}-padded", (padded, key, value), case.kwargs)


def cases(contract: OpContract, dtype: torch.dtype) -> Iterator[OpCase]:
    """The contract's own cases, and for attention those that only this implementation tells apart."""
    fia.KEYS_PER_SPLIT = 256
    yield from contract.cases("cpu", dtype, 0)
    if contract.name == "fused_infer_attention":
        for case in split_cases(dtype):
            yield case
            yield pad_query(case)
        yield pad_query(build_case("prefill", [(9, 9), (2, 40)], (6, 2, 64, 16), {"sparse_mode": 3}, "cpu", dtype, 4))
        yield pad_query(build_case("no-queries", [(0, 3), (0, 0)], (64, 1, 64, 16), {}, "cpu", dtype, 5))


def far(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same blocks after ``blocks`` others, which are never touched and so take no memory."""
    whole = torch.empty((blocks + len(cache), *cache.shape[1:]), dtype=cache.dtype)
    whole[blocks:] = cache
    return whole


def far_difference(contract: OpContract) -> str:
    """What changes when the last paged case of ``contract`` finds its blocks past 2**31 elements of the cache."""
    op, first = contract.provider("CUDA"), PAGED[contract.name]
    case = [case for case in contract.cases("cpu", torch.float16, 0) if case.kwargs.get("block_size", 1)][-1]
    near, kwargs = list(case.args), dict(case.kwargs)
    blocks = 2**31 // near[first][0].numel() + 1
    moved = [far(arg, blocks) if index in (first, first + 1) else arg.clone() for index, arg in enumerate(near)]
    results = list(op(*near, **kwargs) or near)
    if contract.name == "scatter_kv_cache":
        moved[4] = torch.where(moved[4] < 0, -1, moved[4] + blocks * near[2].shape[1])
    elif contract.name == "gather_kv_cache":
        moved[2] += blocks
    else:
        kwargs["block_table"] = kwargs["block_table"] + blocks
    others = list(op(*moved, **kwargs) or moved)
    # The blocks of a larger cache that correspond to the smaller one are its last.
    pairs = [(x, y[-len(x) :]) for x, y in zip(results, others, strict=True) if x.is_floating_point()]
    same = all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)
    return "" if same else "another result past 2**31 elements"


def main() -> None:
    """Run every case of the op named on the command line."""
    contract = all_contracts()[sys.argv[1]]
    for dtype in DTYPES.get(contract.name, DEFAULT_DTYPES):
        for case in cases(contract, dtype):
            name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
            problem = difference(contract.provider("CUDA"), contract, case, dtype)
            print(json.dumps({"case": name, "problem": problem}), flush=True)
    if contract.name in PAGED:
        print(json.dumps({"case": "far", "problem": far_difference(contract)}), flush=True)


if __name__ == "__main__":
    main()
