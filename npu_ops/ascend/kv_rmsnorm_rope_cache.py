"""npu_ops.kv_rmsnorm_rope_cache on Ascend: torch_npu.npu_kv_rmsnorm_rope_cache_v2, from its documents, not yet run on an NPU.

CANN's document takes slots from -1 up, and its kernel for cache mode PA_BNSD returns a row of slot -1 and skips its copy. It
takes 16 bits only: fp32 runs the reference. It wants ceil(S / block_size) * B blocks, so tokens are S, not B; where padding
makes them more than slots, they go in several calls.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.ascend.interleave_rope import widen
from npu_ops.reference import kv_rmsnorm_rope_cache as reference


def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.kv_rmsnorm_rope_cache.kv_rmsnorm_rope_cache."""
    rope, latent = k_cache.shape[3], ckv_cache.shape[3]
    if kv.dtype == torch.float32:
        return virtual_npu.in_one_piece(
            reference.kv_rmsnorm_rope_cache, kv, gamma, cos, sin, slot_mapping, k_cache, ckv_cache, epsilon=epsilon
        )
    if kv.shape[0] == 0:
        return kv.new_empty(0, rope), kv.new_empty(0, latent)
    slots = k_cache.shape[0] * k_cache.shape[1]
    inputs = [torch.split(x, slots) for x in (kv.contiguous(), widen(cos), widen(sin), slot_mapping)]
    parts = [
        torch_npu.npu_kv_rmsnorm_rope_cache_v2(
            rows[None, None],
            gamma,
            part_cos.view(1, 1, -1, rope),
            part_sin.view(1, 1, -1, rope),
            index,
            k_cache,
            ckv_cache,
            epsilon=epsilon,
            cache_mode="PA_BNSD",
            is_output_kv=True,
        )
        for rows, part_cos, part_sin, index in zip(*inputs, strict=True)
    ]
    k_rope, c_kv = parts[0] if len(parts) == 1 else (torch.cat(rows, 2) for rows in zip(*parts, strict=True))
    return k_rope.view(-1, rope), c_kv.view(-1, latent)
