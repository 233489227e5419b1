"""MLA's new keys (DeepSeek-AI, 2024, "DeepSeek-V2"): norm, rotation and cache write of a token in one program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, unit_stride


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
    kv, cos, sin = unit_stride(kv), unit_stride(cos), unit_stride(sin)
    tokens, rope, latent = kv.shape[0], k_cache.shape[3], ckv_cache.shape[3]
    k_rope, c_kv = kv.new_empty(tokens, rope), kv.new_empty(tokens, latent)
    launch(
        _norm_rope_cache, (tokens,), kv, kv, unit_stride(gamma), cos, sin, unit_stride(slot_mapping), k_cache, ckv_cache,
        k_rope, c_kv, kv.stride(0), cos.stride(0), sin.stride(0), epsilon, LATENT=latent, PAIRS=rope // 2, num_warps=2,
    )  # fmt: skip
    return k_rope, c_kv


@triton.jit
def _norm_rope_cache(
    kv: tl.tensor,
    gamma: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slot_mapping: tl.tensor,
    k_cache: tl.tensor,
    ckv_cache: tl.tensor,
    k_rope: tl.tensor,
    c_kv: tl.tensor,
    stride_kv: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    epsilon: tl.tensor,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Row of kv [tokens, LATENT + 2 * PAIRS] into rows of the results and of the caches, [slots, width]. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    source = kv + token * stride_kv
    column = tl.arange(0, LATENT)
    x = tl.load(source + column).to(tl.float32)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + epsilon) * tl.load(gamma + column).to(tl.float32)
    latent = scaled.to(c_kv.dtype.element_ty)
    tl.store(c_kv + token * LATENT + column, latent)
    tl.store(ckv_cache + slot * LATENT + column, latent, mask=column < tl.where(slot >= 0, LATENT, 0))

    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + token * stride_cos + pair).to(tl.float32)
    s = tl.load(sin + token * stride_sin + pair).to(tl.float32)
    first = tl.load(source + LATENT + 2 * pair).to(tl.float32)
    second = tl.load(source + LATENT + 2 * pair + 1).to(tl.float32)
    left = (first * c - second * s).to(k_rope.dtype.element_ty)
    right = (second * c + first * s).to(k_rope.dtype.element_ty)
    tl.store(k_rope + token * (2 * PAIRS) + pair, left)
    tl.store(k_rope + token * (2 * PAIRS) + PAIRS + pair, right)
    kept = pair < tl.where(slot >= 0, PAIRS, 0)
    tl.store(k_cache + slot * (2 * PAIRS) + pair, left, mask=kept)
    tl.store(k_cache + slot * (2 * PAIRS) + PAIRS + pair, right, mask=kept)
