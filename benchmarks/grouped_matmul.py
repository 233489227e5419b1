"""Our grouped product beside PyTorch's own (torch._grouped_mm, bf16 with aligned rows alone), on one GPU.

usage: python -m benchmarks.grouped_matmul --out FILE
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from npu_ops.device import CPU, CUDA, device_name
from npu_ops.grouped_matmul import grouped_matmul

# Experts, hidden, columns of the product: gate and up, then down; Qwen3-235B and DeepSeek-V3 on one of 8 ranks.
SHAPES = {"qwen3": (128, 4096, 3072), "qwen3-down": (128, 1536, 4096), "v3": (32, 7168, 4096), "v3-down": (32, 2048, 7168)}
ROWS = (8, 64, 512, 4096, 32768)


def main() -> None:
    """Time every shape and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=(CUDA, CPU), default=CUDA, help="cpu only checks that the script runs")
    options = parser.parse_args()
    from triton.testing import do_bench

    records = []
    shapes = SHAPES if options.device == CUDA else {"tiny": (4, 64, 32)}
    for name, (groups, inner, columns) in shapes.items():
        weight = torch.randn(groups, columns, inner, dtype=torch.bfloat16, device=options.device).transpose(1, 2)
        for rows in ROWS if options.device == CUDA else ROWS[:2]:
            x = torch.randn(rows, inner, dtype=torch.bfloat16, device=options.device) / inner**0.5
            sizes = torch.bincount(torch.randint(groups, (rows,)), minlength=groups).to(options.device)
            ends = sizes.cumsum(0).int()
            ours, library = partial(grouped_matmul, x, weight, sizes), partial(torch._grouped_mm, x, weight, offs=ends)
            torch.testing.assert_close(ours(), library(), atol=1e-2, rtol=2e-2)
            if options.device == CPU:
                continue
            times = [do_bench(call, return_mode="median") for call in (ours, library, ours, library)]
            record = {"shape": name, "rows": rows, "ours_ms": min(times[::2]), "library_ms": min(times[1::2])}
            record["ours_TFLOPs"] = 2.0 * rows * inner * columns / record["ours_ms"] / 1e9
            records.append(record)
            print(record, flush=True)
    result = {"device": device_name(options.device), "torch": torch.__version__, "rows": records}
    options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
