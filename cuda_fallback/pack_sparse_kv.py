"""Latent rows as int8 with one fp32 scale to a tile of 128, beside their rope parts, in rows of bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, unit_stride

LATENT, ROPE, TILE = 512, 64, 128
WIDTH = LATENT + 2 * ROPE + 4 * (LATENT // TILE)
SMALLEST_SCALE = 1e-30


def pack_sparse_kv(latent: Tensor, rope: Tensor) -> Tensor:
    """See npu_ops.pack_sparse_kv.pack_sparse_kv."""
    rows = torch.empty((latent.shape[0], WIDTH), dtype=torch.int8, device=latent.device)
    latent = unit_stride(latent)
    rope = unit_stride(rope.bfloat16() if rope.dtype == torch.float32 else rope)
    launch(
        _pack, (rows.shape[0],), rows, latent, rope, rows, rows.view(rope.dtype), rows.view(torch.float32), latent.stride(0),
        rope.stride(0), SMALLEST_SCALE, LATENT=LATENT, ROPE=ROPE, TILE=TILE, num_warps=1,
    )  # fmt: skip
    return rows


@triton.jit
def _pack(
    latent: tl.tensor,
    rope: tl.tensor,
    rows: tl.tensor,
    rope_rows: tl.tensor,
    scale_rows: tl.tensor,
    stride_latent: tl.tensor,
    stride_rope: tl.tensor,
    smallest: tl.tensor,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One row; ``rows`` are its bytes, which ``rope_rows`` and ``scale_rows`` see in their own types. Grid: (rows,)."""
    TILES: tl.constexpr = LATENT // TILE
    BYTES: tl.constexpr = LATENT + 2 * ROPE + 4 * TILES
    row = tl.program_id(0).to(tl.int64)
    tile, member, turn = tl.arange(0, TILES), tl.arange(0, TILE), tl.arange(0, ROPE)
    place = tile[:, None] * TILE + member[None, :]
    x = tl.load(latent + row * stride_latent + place).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
    # A maximum passes over a NaN, which must come out of the row again: the sum is 0 without one.
    scale = tl.where(scale < smallest, smallest, scale) + tl.sum(x * 0.0, 1)
    # Adding 1.5 * 2**23 leaves no room for a fraction: the sum is rounded, half to even.
    quantised = (tl.div_rn(x, scale[:, None] + tl.zeros_like(x)) + 12582912.0) - 12582912.0
    tl.store(rows + row * BYTES + place, quantised.to(tl.int8))
    turned = tl.load(rope + row * stride_rope + turn)
    tl.store(rope_rows + row * (BYTES // 2) + LATENT // 2 + turn, turned)
    tl.store(scale_rows + row * (BYTES // 4) + (LATENT + 2 * ROPE) // 4 + tile, scale)
