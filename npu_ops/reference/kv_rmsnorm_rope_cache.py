"""Semantics of npu_ops.kv_rmsnorm_rope_cache in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from npu_ops.reference.interleave_rope import interleave_rope
from npu_ops.reference.rms_norm import rms_norm
from npu_ops.reference.scatter_kv_cache import scatter_kv_cache


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
    latent = ckv_cache.shape[3]
    c_kv = rms_norm(kv[:, :latent], gamma, epsilon=epsilon)
    k_rope = interleave_rope(kv[:, None, latent:], cos, sin)
    scatter_kv_cache(k_rope, c_kv[:, None], k_cache, ckv_cache, slot_mapping)
    return k_rope[:, 0], c_kv
