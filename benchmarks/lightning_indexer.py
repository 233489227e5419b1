"""The lightning indexer on one GPU: a prefill chunk and decodes at long contexts, in bf16 and in 8-bit floats.

usage: python -m benchmarks.lightning_indexer --out FILE [--count K]
Widths of DeepSeek V3.2: 64 heads of 128, top-k 2048. Each row has the whole call's median ms and, of its last call, the ms of
each kernel and the peak of memory. With --tiny it only checks, on any device, that the script runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_ops.device import CPU, CUDA, device_name
from npu_ops.lightning_indexer import DIM, lightning_indexer
from npu_ops.quant_lightning_indexer import quant_lightning_indexer

BLOCK = 128
# Rows of each request, requests, keys of each.
SHAPES = [(8192, 1, 32768), (8192, 1, 131072), (8192, 1, 1048576), (1, 64, 131072), (1, 1, 1048576)]
TINY = [(40, 1, 256), (1, 3, 128)]


def arguments(rows: int, requests: int, keys: int, heads: int, count: int, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """A call in bf16 over shuffled blocks."""
    each = keys // BLOCK
    options = {"dtype": torch.bfloat16, "device": device}
    tensors = [torch.randn(rows * requests, heads, DIM, **options), torch.randn(each * requests, BLOCK, 1, DIM, **options),
               torch.rand(rows * requests, heads, **options)]  # fmt: skip
    lengths = {
        "actual_seq_lengths_query": torch.arange(1, requests + 1, dtype=torch.int32, device=device) * rows,
        "actual_seq_lengths_key": torch.full((requests,), keys, dtype=torch.int32, device=device),
        "block_table": torch.randperm(each * requests, device=device).int().view(requests, each),
        "sparse_count": count, "max_seq_len": keys,
    }  # fmt: skip
    return tensors, lengths


def quantised(query: Tensor, key: Tensor, weights: Tensor) -> list[Tensor]:
    """The same call in 8-bit floats, row by row."""
    scales = [x.float().abs().amax(-1) / 448 for x in (query, key)]
    rows = [(x.float() / scale[..., None]).to(torch.float8_e4m3fn) for x, scale in zip((query, key), scales, strict=True)]
    return [*rows, weights, *scales]


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one call, launches together."""
    with torch.profiler.profile() as profile:
        call()
    events = [event for event in profile.key_averages() if event.device_time_total]
    return {event.key: event.device_time_total / 1e3 for event in events if event.key in ("_score", "_select")}


def measure(name: str, call: Callable[[], Tensor], flops: float, bytes_read: float, tiny: bool) -> dict[str, Any]:
    """One row of the table."""
    accelerator = torch.accelerator
    if tiny:
        call()
        return {"form": name, "flops": flops, "bytes": bytes_read}
    from triton.testing import do_bench

    accelerator.reset_peak_memory_stats()
    before = accelerator.memory_allocated()
    call()
    peak = accelerator.max_memory_allocated() - before
    ms = do_bench(call, warmup=10, rep=200, return_mode="median")
    parts = kernels(call)
    row = {"form": name, "ms": ms, "kernel_ms": parts, "peak_bytes": peak, "flops": flops, "bytes": bytes_read}
    if parts.get("_score"):
        row |= {"score_tflops": flops / parts["_score"] / 1e9, "score_gbs": bytes_read / parts["_score"] / 1e6}
    return row


def main() -> None:
    """Run every shape and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, heads, count = (CPU, 4, 16) if options.tiny else (CUDA, 64, options.count)
    table: list[dict[str, Any]] = []
    for rows, requests, keys in TINY if options.tiny else SHAPES:
        tensors, lengths = arguments(rows, requests, keys, heads, count, device)
        narrow = quantised(*tensors)
        seen = requests * (rows * keys - rows * (rows - 1) / 2)
        for name, call, given in (
            ("bf16", lightning_indexer, tensors),
            ("fp8", quant_lightning_indexer, narrow),
        ):
            row = measure(
                name, lambda call=call, given=given, lengths=lengths: call(*given, **lengths), 2 * heads * DIM * seen,
                float(given[1].numel() * given[1].element_size()), options.tiny,
            )  # fmt: skip
            table.append({"rows": rows, "requests": requests, "keys": keys, "heads": heads, "count": count, **row})
            print(table[-1], flush=True)
            host = {"device": device_name(device), "torch": torch.__version__}
            options.out.write_text(json.dumps({"host": host, "rows": table}, indent=1) + "\n")
        del tensors, narrow


if __name__ == "__main__":
    main()
