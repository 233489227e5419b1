"""Checks and times every op on one machine: values, host synchronisation, milliseconds; writes one JSON file.

Usage, from the repository root: python -m benchmarks.op_check --out result.json [--device cpu]
On the CPU only the values are checked. The exit status is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_ops.contract import OpCase, OpContract, Tolerance, all_contracts
from npu_ops.device import CPU, CUDA

SEED = 0


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of nested lists and tuples, in order."""
    if isinstance(tree, (list, tuple)):
        return [tensor for branch in tree for tensor in tensors(branch)]
    return [tree] if isinstance(tree, Tensor) else []


def copied(tree: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """A copy of nested containers and of their tensors, strides kept; floating tensors in ``dtype`` if given."""
    if isinstance(tree, dict):
        return {key: copied(branch, device, dtype) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(copied(branch, device, dtype) for branch in tree)
    if not isinstance(tree, Tensor):
        return tree
    wanted = dtype if dtype and tree.is_floating_point() else tree.dtype
    return torch.empty_strided(tree.shape, tree.stride(), dtype=wanted, device=device).copy_(tree)


def difference(call: Callable[..., Any], contract: OpContract, case: OpCase, dtype: torch.dtype) -> str:
    """What is wrong with the results of ``call`` against the reference in fp32 on the CPU; empty if nothing is."""
    args = copied(case.args, str(tensors(case.args)[0].device))
    wide, kwargs = copied(case.args, "cpu", torch.float32), copied(case.kwargs, "cpu", torch.float32)
    got, want = call(*args, **case.kwargs), contract.reference(*wide, **kwargs)
    if contract.mutates:
        got, want = (args, got), (wide, want)
    got, want = contract.defined(args, tensors(got)), contract.defined(wide, tensors(want))
    problems = []
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        bound = contract.tolerance[dtype] if b.is_floating_point() else Tolerance(0.0, 0.0)
        x, y = a.cpu().double(), b.double()
        if x.shape != y.shape:
            problems.append(f"result {index}: shape {tuple(x.shape)}, want {tuple(y.shape)}")
        elif not torch.allclose(x, y, rtol=bound.rtol, atol=bound.atol, equal_nan=True):
            worst = (x - y).abs().nan_to_num(torch.inf)[(x != y) & ~(x.isnan() & y.isnan())].max()
            problems.append(f"result {index}: off by up to {worst:.3g}, bound {bound}")
    return "; ".join(problems)


def without_sync(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, made twice: the first compiles, the second must not wait for the GPU (an error where it does)."""

    def twice(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return twice


def checks(device: str, only: Container[str]) -> Iterator[dict[str, str]]:
    """One record for each op of ``only``, dtype and case of its contract; "problem" is empty where all is well."""
    for name, contract in all_contracts().items():
        if name not in only:
            continue
        call = without_sync(contract.op) if device == CUDA else contract.op
        for dtype in contract.tolerance:
            for case in contract.cases(device, dtype, SEED):
                try:
                    problem = difference(call, contract, case, dtype)
                except Exception:
                    problem = traceback.format_exc(limit=-3)
                yield {"op": name, "dtype": str(dtype), "case": case.name, "problem": problem}


def attention(
    queries: int, keys: int, requests: int, mode: int, heads: int = 32, kv_heads: int = 8, dim: int = 128
) -> tuple[tuple[Any, ...], dict[str, Any], float]:
    """A paged bf16 call of ``requests`` equal requests, and its work in FLOP."""
    block = 128
    per_request = keys // block
    options = {"dtype": torch.bfloat16, "device": CUDA}
    query = torch.randn(requests * queries, heads, dim, **options)
    caches = [torch.randn(requests * per_request, block, kv_heads, dim, **options) for _ in range(2)]
    table = torch.randperm(requests * per_request, device=CUDA).int().view(requests, per_request)
    kwargs = {
        "actual_seq_qlen": [queries * (i + 1) for i in range(requests)],
        "actual_seq_kvlen": [keys] * requests,
        "query_start_loc": torch.arange(requests + 1, dtype=torch.int32, device=CUDA) * queries,
        "seq_lens": torch.full((requests,), keys, dtype=torch.int32, device=CUDA),
        "num_query_heads": heads, "num_key_value_heads": kv_heads, "softmax_scale": dim**-0.5,
        "block_table": table, "block_size": block, "sparse_mode": mode,
    }  # fmt: skip
    seen = queries * keys - (queries * (queries - 1) // 2 if mode == 3 else 0)
    return (query, *caches), kwargs, 4.0 * requests * heads * dim * seen


def latent_attention(heads: int, rows: int, keys: int, requests: int) -> tuple[tuple[Any, ...], dict[str, Any], float]:
    """The absorbed form of MLA over a paged bf16 latent cache, causal, and its work in FLOP."""
    (query, key, _), kwargs, _ = attention(rows, keys, requests, 3, heads=heads, kv_heads=1, dim=512)
    query_rope = torch.randn(*query.shape[:2], 64, dtype=query.dtype, device=CUDA)
    key_rope = torch.randn(*key.shape[:3], 64, dtype=key.dtype, device=CUDA)
    kwargs |= {"query_rope": query_rope, "key_rope": key_rope, "softmax_scale": 192**-0.5}
    seen = rows * keys - rows * (rows - 1) // 2
    return (query, key, key), kwargs, 2.0 * requests * heads * (512 + 64 + 512) * seen


def timed() -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any], float]]:
    """Label, op, arguments, and FLOP of the calls to time; ops without FLOP count by the bytes of their tensors."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=CUDA)

    for queries, keys, requests, mode in ((8192, 8192, 1, 3), (2048, 32768, 4, 3), (1, 8192, 64, 0), (1, 131072, 1, 0)):
        args, kwargs, flop = attention(queries, keys, requests, mode)
        yield f"q{queries} k{keys} b{requests} mode{mode}", "fused_infer_attention", args, kwargs, flop
    for heads, tokens in ((16, 1), (16, 4), (128, 1)):
        args, kwargs, flop = latent_attention(heads, tokens, 131072, 64)
        yield f"latent h{heads} q{tokens} k131072 b64", "fused_infer_attention", args, kwargs, flop
    rows, wide = 8192, normal(8192, 5120)
    yield "8192x5120", "rms_norm", (wide, wide[0]), {}, 0.0
    yield "8192x5120", "add_rms_norm", (wide, normal(rows, 5120), wide[0]), {}, 0.0
    yield "8192x28672", "swiglu", (normal(rows, 28672),), {}, 0.0
    angle = torch.rand(rows, 64, device=CUDA)
    yield "8192x32x128", "rotary", (normal(rows, 32, 128), angle.cos(), angle.sin()), {}, 0.0
    lse, parts = torch.randn(4, rows, 32, device=CUDA), normal(4, rows, 32, 128)
    yield "4x8192x32x128", "attention_update", (list(lse), list(parts)), {}, 0.0
    packed, caches = [normal(rows, 8, 128) for _ in range(2)], [normal(rows // 128, 128, 8, 128) for _ in range(2)]
    yield "8192x8x128", "scatter_kv_cache", (*packed, *caches, torch.randperm(rows, device=CUDA)), {}, 0.0
    table, lens = torch.randperm(rows // 128, device=CUDA).int()[None], torch.tensor([rows], dtype=torch.int32).to(CUDA)
    yield "8192x8x128", "gather_kv_cache", (*caches, table, lens, *packed), {}, 0.0
    yield from experts()


def experts() -> Iterator[tuple[str, str, tuple[Any, ...], dict[str, Any], float]]:
    """A layer of 128 experts, 8 to a token, in widths of Qwen3-235B: a prefill chunk, and a decode of 64 requests."""
    count, k, hidden, inner = 128, 8, 4096, 1536
    options = {"dtype": torch.bfloat16, "device": CUDA}
    weight = torch.randn(count, 2 * inner, hidden, **options).transpose(1, 2)
    routing = {"expert_num": count, "active_expert_range": [0, count]}
    for tokens in (8192, 64):
        logits, x = torch.randn(tokens, count, device=CUDA), torch.randn(tokens, hidden, **options)
        ids = torch.rand(tokens, count, device=CUDA).argsort(1)[:, :k].int()
        rows, row_idx, sizes = all_contracts()["moe_init_routing"].op(x, ids, **routing)
        label = f"{tokens}x{hidden}, {k} of {count}"
        yield label, "moe_gating_top_k", (logits, k), {"renorm": 1}, 0.0
        yield label, "moe_init_routing", (x, ids), routing, 0.0
        yield label, "grouped_matmul", (rows, weight, sizes), {}, 2.0 * tokens * k * hidden * 2 * inner
        yield label, "moe_token_unpermute", (rows, row_idx, torch.rand(tokens, k, device=CUDA)), {}, 0.0


def times() -> Iterator[dict[str, Any]]:
    """Median milliseconds of each timed call, and what that makes in TFLOP/s or in GB/s."""
    from triton.testing import do_bench

    for label, name, args, kwargs, flop in timed():
        op = all_contracts()[name].op
        results = tensors(op(*args, **kwargs))
        # A latent cache is two of the arguments, and its rope part a keyword.
        moved = {(t.data_ptr(), t.shape): t for t in tensors([*args, *kwargs.values(), *results])}.values()
        bytes_moved = sum(t.numel() * t.element_size() for t in moved)
        ms = do_bench(lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs), return_mode="median")
        record = {"op": name, "shape": label, "ms": ms, "GB/s": bytes_moved / ms / 1e6}
        yield record | ({"TFLOP/s": flop / ms / 1e9} if flop else {})


def main() -> int:
    """Run everything and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA)
    parser.add_argument("--ops", help="names of ops to check, with commas between them, and nothing is timed; default: all")
    options = parser.parse_args()
    checked = list(checks(options.device, options.ops.split(",") if options.ops else all_contracts()))
    failed = [record for record in checked if record["problem"]]
    measured = []
    if options.device == CUDA and not options.ops:
        for record in times():
            print(record, flush=True)
            measured.append(record)
    for record in failed:
        print(record["op"], record["dtype"], record["case"], record["problem"], sep=": ")
    print(f"{len(checked)} checks, {len(failed)} failed")
    name = torch.cuda.get_device_name() if options.device == CUDA else "cpu"
    result = {"device": name, "torch": torch.__version__, "checks": checked, "times": measured}
    options.out.write_text(json.dumps(result, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
