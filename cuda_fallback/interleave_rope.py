"""Rotary position embedding of MLA's rope part (DeepSeek-AI, 2024, "DeepSeek-V2"), in the order of Ascend's op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, unit_stride

# Heads of one program; they share a token's angles.
HEADS_A_PROGRAM = 16


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See npu_ops.interleave_rope.interleave_rope."""
    x, cos, sin = unit_stride(x), unit_stride(cos), unit_stride(sin)
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(HEADS_A_PROGRAM, triton.next_power_of_2(max(1, heads)))
    launch(
        _interleave_rope, (tokens, triton.cdiv(heads, block)), x, x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0),
        sin.stride(0), HEADS=heads, PAIRS=dim // 2, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _interleave_rope(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK heads of a token of x and out [tokens, HEADS, 2 * PAIRS]. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (head < HEADS)[:, None]
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * stride_cos + pair).to(tl.float32)[None, :]
    s = tl.load(sin + token * stride_sin + pair).to(tl.float32)[None, :]
    source = x + token * stride_token + head[:, None] * stride_head + 2 * pair[None, :]
    first = tl.load(source, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=live, other=0.0).to(tl.float32)
    target = out + (token * HEADS + head[:, None]) * (2 * PAIRS) + pair[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=live)
    tl.store(target + PAIRS, (second * c + first * s).to(out.dtype.element_ty), mask=live)
