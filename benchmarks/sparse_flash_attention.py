"""Sparse attention on one GPU: a prefill chunk of 8192 rows and 64 decodes, 2048 keys each, bf16 and int8 rows (C8).

usage: python -m benchmarks.sparse_flash_attention --out FILE
FlashMLA's sparse prefill, where the package flash_mla is importable, runs on the same rows beside it; it takes 64 or 128 heads.
With --tiny the script only checks, on the CPU, that it runs. Times are medians in ms of runs in turn, so that all see the same
clocks. Indices are random over the whole context, or the newest keys, which the L2 cache holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.mla import BLOCK, LATENT, ROPE, SCALE, compare, normal, paged, timed
from npu_ops.device import CPU, CUDA, device_name
from npu_ops.kv_quant_sparse_flash_attention import kv_quant_sparse_flash_attention
from npu_ops.pack_sparse_kv import WIDTH, pack_sparse_kv
from npu_ops.sparse_flash_attention import sparse_flash_attention


def pick(requests: int, rows: int, keys: int, count: int, recent: bool, device: str) -> Tensor:
    """Ascending indices [requests * rows, 1, count] below the causal limit of each row; limits are well above ``count``."""
    picked = torch.empty(requests * rows, 1, count, dtype=torch.int32, device=device)
    for row in range(requests * rows):
        limit = keys - rows + row % rows + 1
        if recent:
            picked[row, 0] = torch.arange(limit - count, limit, device=device)
        else:
            picked[row, 0] = torch.randperm(limit, device=device)[:count].sort().values
    return picked


def flash_mla(query: Tensor, caches: tuple[Tensor, Tensor, Tensor], indices: Tensor, rows: int) -> Callable[[], Any]:
    """FlashMLA's sparse prefill on the same rows, side by side as it wants them; its LSE is not compared."""
    from flash_mla import flash_mla_sparse_fwd

    latent, rope, table = caches
    cache = torch.cat((latent, rope), -1).view(-1, 1, LATENT + ROPE)
    owners = torch.arange(len(indices), device=query.device)[:, None, None] // rows
    slots = (table[owners, indices // BLOCK] * BLOCK + indices % BLOCK).int()
    return lambda: flash_mla_sparse_fwd(query, cache, slots, SCALE)


def measure(
    what: str, heads: int, requests: int, rows: int, keys: int, count: int, recent: bool, device: str
) -> dict[str, Any]:
    """Times of both forms and of the peer on one shape."""
    caches = latent, rope, table = paged(requests, keys, device)
    packed = pack_sparse_kv(latent.view(-1, LATENT), rope.view(-1, ROPE)).view(*latent.shape[:3], WIDTH)
    query = normal(requests * rows, heads, LATENT + ROPE, device=device)
    indices = pick(requests, rows, keys, count, recent, device)
    options = {
        "scale_value": SCALE,
        "block_table": table,
        "actual_seq_lengths_query": torch.arange(1, requests + 1, dtype=torch.int32, device=device) * rows,
        "actual_seq_lengths_kv": torch.full((requests,), keys, dtype=torch.int32, device=device),
        "sparse_mode": 3,
        "return_softmax_lse": True,
    }
    nope, query_rope = query.tensor_split((LATENT,), -1)

    def ours() -> tuple[Tensor, Tensor]:
        return sparse_flash_attention(nope, latent, indices, query_rope=query_rope, key_rope=rope, **options)

    def ours_c8() -> tuple[Tensor, Tensor]:
        return kv_quant_sparse_flash_attention(query, packed, indices, **options)

    calls: dict[str, Callable[[], Any]] = {"ours": ours, "ours_c8": ours_c8}
    worst = compare(what, ours, {"c8": ours_c8})
    if importlib.util.find_spec("flash_mla") and heads >= 64:
        calls["flash_mla"] = flash_mla(query, caches, indices, rows)
        worst["flash_mla_out"] = float((ours()[0].float() - calls["flash_mla"]()[0].float()).abs().max())
    times = {} if device == CPU else timed(calls)
    flops = 2 * requests * rows * heads * count * (2 * LATENT + ROPE)
    result = {
        "what": what, "indices": "recent" if recent else "random", "heads": heads, "rows": requests * rows, "keys": keys,
        "count": count, "ms": times, "flops": flops, "tflops": {name: flops / ms / 1e9 for name, ms in times.items()},
        "bytes": {"ours": requests * rows * count * (LATENT + ROPE) * 2, "ours_c8": requests * rows * count * WIDTH},
        "difference": worst,
    }  # fmt: skip
    print(result, flush=True)
    return result


def main() -> None:
    """Run every shape and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = CPU if options.tiny else CUDA
    new, keys, batch, count = (8, 512, 3, 40) if options.tiny else (8192, 131072, 64, 2048)
    rows: list[dict[str, Any]] = []
    for heads in (2,) if options.tiny else (16, 128):
        rows += [measure("prefill", heads, 1, new, keys, count, recent, device) for recent in (False, True)]
        rows.append(measure("decode", heads, batch, 1, keys // 4, count, False, device))
        rows.append(measure("few decodes", heads, 4, 1, keys, count, False, device))
    host = {"device": device_name(device), "torch": torch.__version__}
    options.out.write_text(json.dumps({"host": host, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
