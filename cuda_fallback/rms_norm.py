"""RMS normalisation (Zhang and Sennrich, 2019), alone and fused with the residual sum: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import as_rows, launch, row_warps, unit_stride


def rms_norm(input: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """See npu_ops.rms_norm.rms_norm."""
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    _launch(input, None, gamma, out, None, epsilon)
    return out


def add_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """See npu_ops.rms_norm.add_rms_norm."""
    out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    total = torch.empty_like(out)
    _launch(input, residual, gamma, out, total, epsilon)
    return out, total


def _launch(input: Tensor, residual: Tensor | None, gamma: Tensor, out: Tensor, total: Tensor | None, epsilon: float) -> None:
    x = as_rows(input)
    added = None if residual is None else as_rows(residual)
    rows, width = x.shape
    launch(
        _rms_norm, (rows,), x, x, added, unit_stride(gamma), out, total, x.stride(0),
        0 if added is None else added.stride(0), epsilon, ADD=added is not None, D=width,
        DP=triton.next_power_of_2(width), num_warps=row_warps(width),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    gamma: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    epsilon: tl.tensor,
    ADD: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
) -> None:
    """Row of x and residual [rows, D] into out and total [rows, D]. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, DP)
    mask = columns < D
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * stride_residual + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + row * D + columns, values.to(total.dtype.element_ty), mask=mask)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / D + epsilon)
    scaled = values * inverse * tl.load(gamma + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + columns, scaled.to(out.dtype.element_ty), mask=mask)
