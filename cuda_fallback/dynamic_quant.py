"""Symmetric int8 quantisation of vectors, each by its own largest element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import as_rows, launch

# Elements of one program.
TILE = 4096
# fp32 keeps no fraction at this size: what is added and taken away again has been rounded to the nearest, ties to even.
ROUNDER = tl.constexpr(12582912.0)


def dynamic_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """See npu_ops.dynamic_quant.dynamic_quant."""
    x = as_rows(input)
    rows, width = x.shape
    out = torch.empty(input.shape, dtype=torch.int8, device=input.device)
    scale = torch.empty(input.shape[:-1], dtype=torch.float32, device=input.device)
    columns = triton.next_power_of_2(width)
    many = max(1, TILE // columns)
    launch(_quantise, (triton.cdiv(rows, many),), x, x, out, scale, x.stride(0), rows, D=width, COLUMNS=columns, ROWS=many)
    return out, scale


@triton.jit
def _quantise(
    x: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of x [rows, D]. Grid: (blocks of rows)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < D)[None]
    value = tl.load(x + row[:, None] * stride + column[None], mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), 1)
    factor = tl.div_rn(largest, 127.0)
    divisor = tl.where(factor == 0.0, 1.0, factor)
    divided = tl.div_rn(value, tl.broadcast_to(divisor[:, None], ROWS, COLUMNS))
    whole = (divided + ROUNDER) - ROUNDER
    tl.store(out + row[:, None] * D + column[None], whole.to(tl.int8), mask=mask)
    tl.store(scale + row, factor, mask=row < rows)
