"""When do two FIA calls beat one? Times mixed batches of decodes and one prefill chunk, unsplit and split, on one GPU.

usage: python -m benchmarks.fia_split --out FILE
The rule `fia_split: auto` in vllm_plugin/attention/fia.py rests on its results (benchmarks/results/).
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from npu_ops.contract import OpCase
from npu_ops.device import CPU, CUDA, device_name
from npu_ops.fused_infer_attention import build_case, fused_infer_attention

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 128
DECODES = (1, 4, 16, 64)
CONTEXTS = (128, 1024, 8192, 65536)
PREFILLS = (16, 64, 256, 2048)
# Keys of all decodes together, at most: larger batches need more memory and say nothing new.
MOST_KEYS = 1 << 17


def halves(case: OpCase, decodes: int) -> list[OpCase]:
    """The same batch as two cases, decodes and prefill, lengths rebased as the backend rebases them."""
    query, key, value = case.args
    parts = []
    for rows in (slice(0, decodes), slice(decodes, None)):
        kwargs = dict(case.kwargs)
        for name in ("actual_seq_qlen", "actual_seq_kvlen", "seq_lens", "block_table"):
            kwargs[name] = kwargs[name][rows]
        first = decodes if rows.start else 0
        kwargs["actual_seq_qlen"] = [length - first for length in kwargs["actual_seq_qlen"]]
        last = len(case.kwargs["actual_seq_qlen"]) if rows.start else decodes
        kwargs["query_start_loc"] = case.kwargs["query_start_loc"][first : last + 1] - first
        parts.append(OpCase(case.name, (query[rows], key, value), kwargs))
    return parts


def run(*cases: OpCase) -> Callable[[], Any]:
    """A function that makes the calls one after the other."""
    return lambda: [fused_infer_attention(*case.args, **case.kwargs)[0] for case in cases]


def main() -> None:
    """Time every combination and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA, help="cpu only checks that the script runs")
    options = parser.parse_args()
    from triton.testing import do_bench

    rows = []
    for decodes, context, prefill in itertools.product(DECODES, CONTEXTS, PREFILLS):
        if decodes * context > MOST_KEYS or (options.device == CPU and decodes * context > 4096):
            continue
        batch = [(1, context)] * decodes + [(prefill, prefill + 1024)]
        shape = (HEADS, KV_HEADS, DIM, BLOCK)
        mask: dict[str, object] = {"sparse_mode": 3, "return_softmax_lse": False}
        case = build_case("mixed", batch, shape, mask, options.device, torch.bfloat16, 0)
        one, two = run(case), run(*halves(case, decodes))
        torch.testing.assert_close(torch.cat(two()), one()[0], atol=1e-2, rtol=2e-2)
        if options.device == CPU:
            continue
        times = [do_bench(call, warmup=5, rep=20, return_mode="median") for call in (one, two, one, two)]
        row = {
            "decodes": decodes,
            "context": context,
            "prefill": prefill,
            "one_ms": min(times[::2]),
            "two_ms": min(times[1::2]),
        }
        rows.append(row)
        print(row, flush=True)
    options.out.write_text(
        json.dumps({"device": device_name(options.device), "torch": torch.__version__, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
