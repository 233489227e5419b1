"""Bringing the experts' results back to their tokens, weighted and summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, unit_stride

# Results of one program.
COLUMNS = 1024


def moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    """See npu_ops.moe_token_unpermute.moe_token_unpermute."""
    rows, indices, probs = unit_stride(permuted_tokens), unit_stride(sorted_indices), probs.contiguous()
    (tokens, k), width = probs.shape, rows.shape[1]
    out = torch.empty((tokens, width), dtype=rows.dtype, device=rows.device)
    launch(
        _combine, (tokens, triton.cdiv(width, COLUMNS)), rows, rows, indices, probs, out, rows.stride(0), K=k, WIDTH=width,
        COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _combine(
    rows: tl.tensor,
    indices: tl.tensor,
    probs: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Part of the result of one token. Grid: (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for index in range(K):
        row = tl.load(indices + token * K + index).to(tl.int64)
        if row >= 0:
            part = tl.load(rows + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
            total += tl.load(probs + token * K + index) * part
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)
