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
from cuda_fallback import lightning_indexer as indexer
from cuda_fallback import mla_attention as mla
from cuda_fallback import sparse_flash_attention as sfa
from npu_ops.contract import OpCase, OpContract, all_contracts
from npu_ops.fused_infer_attention import build_case, build_latent_case
from npu_ops.interleave_rope import random_angles
from npu_ops.kv_quant_sparse_flash_attention import pack_case
from npu_ops.lightning_indexer import build_case as build_scores
from npu_ops.quant_lightning_indexer import SCALES, quantised
from npu_ops.sparse_flash_attention import build_sparse_case

# The interpreter multiplies the bit patterns of bf16 matrices, so ops with products of matrices take fp16 in its place.
PRODUCTS = ("fused_infer_attention", "grouped_matmul", "hadamard_rotation", "lightning_indexer", "sparse_flash_attention")
QUANTISED = ("kv_quant_sparse_flash_attention", "quant_lightning_indexer")
DTYPES = dict.fromkeys(PRODUCTS, (torch.float32, torch.float16)) | dict.fromkeys(QUANTISED, (torch.float32,))
DEFAULT_DTYPES = (torch.float32, torch.bfloat16)
# Ops over a paged cache, and which of their arguments is the first of its two tensors.
PAGED = {"fused_infer_attention": 1, "gather_kv_cache": 0, "kv_rmsnorm_rope_cache": 5, "scatter_kv_cache": 2}

SPARSE = ("sparse_flash_attention", "kv_quant_sparse_flash_attention")


def split_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    """Few rows over many keys, so that the keys are divided: sinks, a window, a request without keys, padding rows."""
    fia.KEYS_PER_SPLIT = 32
    sink = {"learnable_sink": torch.tensor([-1.0, 3.0, 0.5, 0.0])}
    yield build_case("split", [(1, 200), (1, 5), (1, 0)], (4, 2, 64, 16), {}, "cpu", dtype, 1)
    yield build_case("split-sink", [(1, 0), (1, 170)], (4, 1, 80, 48), sink, "cpu", dtype, 2)
    window = {"sparse_mode": 4, "pre_tokens": 70, "next_tokens": 3, **sink}
    yield build_case("split-window", [(3, 150), (2, 2)], (4, 4, 96, 0), window, "cpu", dtype, 3)


def latent_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    """The absorbed form with its keys divided: unequal requests, several rows, a number of heads that leaves a tile open."""
    mla.KEYS_PER_SPLIT = 32
    batch = [(1, 200), (0, 4), (1, 5), (1, 0), (1, 129)]
    yield build_latent_case("latent-split", batch, 2, 16, {}, "cpu", dtype, 6)
    yield build_latent_case("latent-split-rows", [(2, 100), (2, 1)], 20, 128, {"sparse_mode": 3}, "cpu", dtype, 7)


def sparse_split_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    """Few rows and heads, so that the indices are divided: some shares see no key, and 200 indices leave the last open."""
    sfa.KEYS_PER_SPLIT = 32
    for mode in (0, 3):
        batch = [(1, 190), (2, 20), (1, 0), (1, 129)]
        yield build_sparse_case(f"split-mode{mode}", batch, 20, 200, 16, {"sparse_mode": mode}, "cpu", dtype, 9, 2)


def pad_query(case: OpCase, rows: int = 5) -> OpCase:
    """The same call with ``rows`` padding rows of NaN past the last request."""

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, torch.full((rows, *x.shape[1:]), torch.nan, dtype=x.dtype)))

    query, key, value = case.args
    rope = {name: pad(x) for name, x in case.kwargs.items() if name == "query_rope"}
    return OpCase(f"{case.name}-padded", (pad(query), key, value), case.kwargs | rope)


# (query length, key length) of each request, N1, block size, sparse_count, padding rows; then the budget in bytes.
TILED = {
    "tiles": (([(5, 300), (2, 129), (1, 1)], 4, 16, 32, 2), 2**15),
    "edges": (([(1, 127), (1, 128), (1, 129), (1, 256), (1, 257)], 2, 128, 64, 0), 2**15),
    "slices": (([(9, 260), (4, 140)], 2, 48, 16, 1), 4 * 128 * 5),
    "full-tile": (([(3, 400)], 4, 16, 128, 0), 2**15),
    "more-than-keys": (([(70, 130)], 1, 16, 200, 0), 2**15),
}


def indexer_cases(contract: OpContract, dtype: torch.dtype) -> Iterator[OpCase]:
    """Tiles of 128 keys and pieces of 64 scores: running selections, and rows in slices, across every border."""
    indexer.MIN_TILE = indexer.MAX_TILE = 128
    indexer.CHUNK = 64
    for name, (shape, size) in TILED.items():
        if contract.name == "lightning_indexer":
            yield build_scores(name, shape, "cpu", dtype, 9, {"logits_bytes": size})
        elif name in ("tiles", "slices"):
            for kind in SCALES:
                label = f"{name}-{str(kind).removeprefix('torch.')}"
                case = build_scores(label, shape, "cpu", torch.float32, 9, {"logits_bytes": size})
                yield quantised(case, kind, "cpu", dtype, 9)


def cases(contract: OpContract, dtype: torch.dtype) -> Iterator[OpCase]:
    """The contract's own cases, and for attention those that only this implementation tells apart."""
    fia.KEYS_PER_SPLIT = mla.KEYS_PER_SPLIT = sfa.KEYS_PER_SPLIT = 256
    yield from contract.cases("cpu", dtype, 0)
    if contract.name == "sparse_flash_attention":
        yield from sparse_split_cases(dtype)
    if contract.name == "kv_quant_sparse_flash_attention":
        yield from map(pack_case, sparse_split_cases(dtype))
    if contract.name.endswith("lightning_indexer"):
        yield from indexer_cases(contract, dtype)
    if contract.name == "interleave_rope":
        yield far_heads(dtype)
    if contract.name == "fused_infer_attention":
        for case in [*split_cases(dtype), *latent_cases(dtype)]:
            yield case
            yield pad_query(case)
        yield pad_query(build_case("prefill", [(9, 9), (2, 40)], (6, 2, 64, 16), {"sparse_mode": 3}, "cpu", dtype, 4))
        yield pad_query(build_case("no-queries", [(0, 3), (0, 0)], (64, 1, 64, 16), {}, "cpu", dtype, 5))


def far_heads(dtype: torch.dtype) -> OpCase:
    """Queries whose heads lie 2**30 elements apart, in memory that is never touched between them."""
    x = torch.empty_strided((2, 3, 64), (64, 2**30, 1), dtype=dtype).copy_(torch.randn(2, 3, 64))
    return OpCase("far-heads", (x, *random_angles(2, dtype, torch.Generator().manual_seed(8))))


def far(cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same blocks after ``blocks`` others, which are never touched and so take no memory."""
    whole = torch.empty((blocks + len(cache), *cache.shape[1:]), dtype=cache.dtype)
    whole[blocks:] = cache
    return whole


def far_cases(contract: OpContract) -> Iterator[OpCase]:
    """The last paged case of every form: with a rope cache and without."""
    paged = [case for case in contract.cases("cpu", torch.float16, 0) if case.kwargs.get("block_size", 1)]
    yield from {"key_rope" in case.kwargs: case for case in paged}.values()


def far_difference(contract: OpContract, case: OpCase) -> str:
    """What changes when ``case`` finds its blocks past 2**31 elements of the wider cache."""
    op, first = contract.provider("CUDA"), PAGED[contract.name]
    near, kwargs = list(case.args), dict(case.kwargs)
    blocks = 2**31 // max(near[index][0].numel() for index in (first, first + 1)) + 1
    moved = [far(arg, blocks) if index in (first, first + 1) else arg.clone() for index, arg in enumerate(near)]
    results = list(op(*near, **kwargs) or ())
    if contract.name in ("scatter_kv_cache", "kv_rmsnorm_rope_cache"):
        moved[4] = torch.where(moved[4] < 0, -1, moved[4] + blocks * near[first].shape[1])
    elif contract.name == "gather_kv_cache":
        moved[2] += blocks
    else:
        kwargs["block_table"] = kwargs["block_table"] + blocks
        kwargs |= {name: far(x, blocks) for name, x in case.kwargs.items() if name == "key_rope"}
    others = list(op(*moved, **kwargs) or ())
    if contract.mutates:
        results, others = [*results, *near], [*others, *moved]
    # The blocks of a larger cache that correspond to the smaller one are its last.
    pairs = [(x, y[-len(x) :]) for x, y in zip(results, others, strict=True) if x.is_floating_point()]
    same = all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)
    return "" if same else "another result past 2**31 elements"


def far_single(contract: OpContract) -> str:
    """What changes when an op over one cache finds its blocks past 2**31 elements."""
    op, index = contract.provider("CUDA"), {"lightning_indexer": 1, "scatter_rows": 2}[contract.name]
    case = next(case for case in contract.cases("cpu", torch.float16, 0) if case.name == "odd")
    near, kwargs = [x.clone() for x in case.args], dict(case.kwargs)
    cache = near[index]
    blocks = 2**31 // cache[0].numel() + 1
    moved = [far(x, blocks) if x is cache else x.clone() for x in near]
    if contract.mutates:
        moved[1] = torch.where(moved[1] < 0, -1, moved[1] + blocks * cache.shape[1])
    else:
        kwargs["block_table"] = kwargs["block_table"] + blocks
    pair = op(*near, **case.kwargs), op(*moved, **kwargs)
    if contract.mutates:
        pair = cache, moved[index][blocks:]
    return "" if torch.equal(*pair) else "another result past 2**31 elements"


def far_sparse_difference(contract: OpContract, case: OpCase) -> str:
    """The same for attention over named keys, whose rope cache is a keyword, if it has one."""
    op = contract.provider("CUDA")
    query, cache, indices = case.args
    blocks = 2**31 // cache[0].numel() + 1
    kwargs = case.kwargs | {name: far(x, blocks) for name, x in case.kwargs.items() if name == "key_rope"}
    moved = op(query, far(cache, blocks), indices, **kwargs | {"block_table": kwargs["block_table"] + blocks})
    same = all(map(torch.equal, op(*case.args, **case.kwargs), moved))
    return "" if same else "another result past 2**31 elements"


def main() -> None:
    """Run every case of the op named on the command line."""
    contract = all_contracts()[sys.argv[1]]
    for dtype in DTYPES.get(contract.name, DEFAULT_DTYPES):
        for case in cases(contract, dtype):
            name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
            problem = difference(contract.provider("CUDA"), contract, case, dtype)
            print(json.dumps({"case": name, "problem": problem}), flush=True)
    if contract.name in SPARSE:
        case = next(contract.cases("cpu", torch.float32, 0))
        print(json.dumps({"case": f"far-{case.name}", "problem": far_sparse_difference(contract, case)}), flush=True)
    if contract.name in PAGED:
        for case in far_cases(contract):
            print(json.dumps({"case": f"far-{case.name}", "problem": far_difference(contract, case)}), flush=True)
    if contract.name in ("lightning_indexer", "scatter_rows"):
        print(json.dumps({"case": "far", "problem": far_single(contract)}), flush=True)


if __name__ == "__main__":
    main()
