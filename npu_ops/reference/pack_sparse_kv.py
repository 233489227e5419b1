"""Semantics of npu_ops.pack_sparse_kv in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

LATENT, ROPE, TILE = 512, 64, 128
# Of a tile of zeros; below the scale of any other tile that a 16-bit type can hold but for its subnormal numbers.
SMALLEST_SCALE = 1e-30


def pack_sparse_kv(latent: Tensor, rope: Tensor) -> Tensor:
    """See npu_ops.pack_sparse_kv.pack_sparse_kv."""
    tiles = in_tiles(latent)
    scales = (tiles.abs().amax(-1) / 127.0).clamp(min=SMALLEST_SCALE)
    return join((tiles / scales[..., None]).round().to(torch.int8).flatten(-2), rope, scales)


def in_tiles(x: Tensor) -> Tensor:
    """[..., 512] as [..., 4, 128] in fp32."""
    return x.float().view(*x.shape[:-1], x.shape[-1] // TILE, TILE)


def join(quantised: Tensor, rope: Tensor, scales: Tensor) -> Tensor:
    """The packed rows of their parts: int8 [T, 512], rope rows [T, 64] and fp32 scales [T, 4]."""
    rope = rope.bfloat16() if rope.dtype == torch.float32 else rope
    return torch.cat((quantised, rope.contiguous().view(torch.int8), scales.contiguous().view(torch.int8)), -1)


def unpack_sparse_kv(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See npu_ops.pack_sparse_kv.unpack_sparse_kv."""
    stored = torch.bfloat16 if dtype == torch.float32 else dtype
    quantised, rope, scales = rows.tensor_split((LATENT, LATENT + 2 * ROPE), -1)
    latent = (in_tiles(quantised) * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)[..., None]).flatten(
        -2
    )
    return latent.to(dtype), rope.clone(memory_format=torch.contiguous_format).view(stored).to(dtype)
