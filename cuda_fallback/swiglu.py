"""Gated activation SwiGLU (Shazeer, 2020), without the projections around it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import as_rows, launch

# Results of one program.
BLOCK = 1024


def swiglu(input: Tensor) -> Tensor:
    """See npu_ops.swiglu.swiglu."""
    x = as_rows(input)
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((*input.shape[:-1], width), dtype=input.dtype, device=input.device)
    launch(_swiglu, (rows, triton.cdiv(width, BLOCK)), x, x, out, x.stride(0), H=width, BLOCK=BLOCK)
    return out


@triton.jit
def _swiglu(x: tl.tensor, out: tl.tensor, stride: tl.tensor, H: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Part of a row of x [rows, 2H] into out [rows, H]. Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < H
    gate = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + H + columns, mask=mask, other=0.0).to(tl.float32)
    # Where exp overflows to inf the quotient is 0, as it should be.
    tl.store(out + row * H + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
