"""npu_ops.kv_rmsnorm_rope_cache on Ascend: torch_npu.npu_kv_rmsnorm_rope_cache_v2, from its documents, not yet run on an NPU.

Its document says nothing of negative slots; CANN's kernel for cache mode PA_BNSD returns such a row and skips its copy. It
takes 16 bits only: fp32 runs the reference.
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
    k_rope, c_kv = torch_npu.npu_kv_rmsnorm_rope_cache_v2(
        kv.contiguous()[:, None, None],
        gamma,
        widen(cos),
        widen(sin),
        slot_mapping,
        k_cache,
        ckv_cache,
        epsilon=epsilon,
        cache_mode="PA_BNSD",
        is_output_kv=True,
    )
    return k_rope.view(-1, rope), c_kv.view(-1, latent)
