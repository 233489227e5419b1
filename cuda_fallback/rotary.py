"""Rotary position embedding (Su et al., 2021), in GPT-NeoX ("half") and GPT-J ("interleave") order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, row_warps, unit_stride

# Elements of one program, as whole heads of one token, which share its angles.
ELEMENTS = 4096


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, rotary_mode: str = "half") -> Tensor:
    """See npu_ops.rotary.rotary."""
    x, cos, sin = unit_stride(input), unit_stride(cos), unit_stride(sin)
    tokens, heads, dim = x.shape
    pairs = cos.shape[1]
    padded, rest = triton.next_power_of_2(pairs), dim - 2 * pairs
    block = min(triton.next_power_of_2(heads), max(1, ELEMENTS // triton.next_power_of_2(dim)))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Pair i is dims i * STEP and i * STEP + APART.
    step, apart = (1, pairs) if rotary_mode == "half" else (2, 1)
    launch(
        _rotary, (tokens, triton.cdiv(heads, block)), x, x, cos, sin, out, x.stride(0), x.stride(1), cos.stride(0),
        sin.stride(0), HEADS=heads, D=dim, PAIRS=pairs, PAIRS_PADDED=padded, REST=rest,
        REST_PADDED=triton.next_power_of_2(max(1, rest)), STEP=step, APART=apart, BLOCK=block,
        num_warps=row_warps(block * dim),
    )  # fmt: skip
    return out


@triton.jit
def _rotary(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK heads of a token of x [tokens, HEADS, D] by its row of cos, sin [tokens, PAIRS]. Grid: (tokens, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x + token * stride_token + head[:, None] * stride_head
    target = out + (token * HEADS + head[:, None]) * D
    live = (head < HEADS)[:, None]

    pair = tl.arange(0, PAIRS_PADDED)
    c = tl.load(cos + token * stride_cos + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * stride_sin + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
    place = pair[None, :] * STEP
    mask = live & (pair < PAIRS)[None, :]
    first = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + place + APART, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + place, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + place + APART, (second * c + first * s).to(out.dtype.element_ty), mask=mask)

    if REST > 0:
        column = tl.arange(0, REST_PADDED)
        mask = live & (column < REST)[None, :]
        unrotated = tl.load(source + 2 * PAIRS + column[None, :], mask=mask, other=0.0)
        tl.store(target + 2 * PAIRS + column[None, :], unrotated, mask=mask)
