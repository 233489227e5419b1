"""MLA's new keys: the latent row normalised, its rope row rotated, both written into the paged cache (DeepSeek-AI, 2024).

Ascend op: ``torch_npu.npu_kv_rmsnorm_rope_cache_v2`` with cache mode PA_BNSD.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_ops.contract import ELEMENTWISE, OpCase, OpContract, register, require
from npu_ops.interleave_rope import ROPE, random_angles, validate_angles
from npu_ops.reference import kv_rmsnorm_rope_cache as reference
from npu_ops.scatter_kv_cache import validate_caches

OP = "kv_rmsnorm_rope_cache"
# CANN normalises exactly so many dims, and wants blocks of 32 bytes of slots in 16 bits.
LATENT = 512
SLOTS = 16


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
    """``rms_norm(kv[:, :512], gamma)`` and ``interleave_rope(kv[:, 512:])``, returned and copied to slot ``slot_mapping[t]``.

    Args:
        kv: [T, 576] bf16, fp16 or fp32; any strides.
        gamma: [512], the dtype of ``kv``.
        cos: [T, 32], the dtype of ``kv``; any strides.
        sin: likewise.
        slot_mapping: int64 [T]; -1 marks a row that is returned but not written; all others are distinct and below
            blocks * block_size. Offsets are right past 2^31 elements.
        k_cache: [blocks, block_size, 1, 64], the dtype of ``kv``; contiguous; written in place with rope rows. block_size is a
            multiple of 16.
        ckv_cache: [blocks, block_size, 1, 512], likewise, with latent rows.
        epsilon: added to the mean square, before the root.

    Returns:
        Rope rows [T, 64] in the order of interleave_rope, and latent rows [T, 512], in the dtype of ``kv``; computed in fp32
        and rounded once.

    Raises:
        ContractError: if a shape or dtype does not fit, or a cache is not contiguous. The slots themselves are device data
            and are not checked.
    """
    require(kv.dim() == 2 and kv.shape[1] == LATENT + ROPE and kv.dtype in ELEMENTWISE, OP,
            f"a kv [T, {LATENT + ROPE}] in bf16, fp16 or fp32", f"{tuple(kv.shape)} in {kv.dtype}",
            "Pass the latent row and the rope row of each token side by side.")  # fmt: skip
    require(gamma.shape == (LATENT,) and gamma.dtype == kv.dtype, OP, f"a gamma [{LATENT}] in {kv.dtype}",
            f"{tuple(gamma.shape)} in {gamma.dtype}", "Pass the weight of the layer's latent norm.")  # fmt: skip
    validate_angles(OP, cos, sin, kv.shape[0], kv.dtype)
    validate_caches(OP, k_cache, ckv_cache)
    for cache, name, width in ((k_cache, "k_cache", ROPE), (ckv_cache, "ckv_cache", LATENT)):
        require(cache.shape[2:] == (1, width) and cache.dtype == kv.dtype, OP,
                f"a {name} [blocks, block_size, 1, {width}] in {kv.dtype}", f"{tuple(cache.shape)} in {cache.dtype}",
                "View the layer's two cache regions in blocks.")  # fmt: skip
    require(k_cache.shape[1] % SLOTS == 0, OP, f"a block_size that is a multiple of {SLOTS}", f"{k_cache.shape[1]}",
            "Allocate the cache in blocks that attention takes.")  # fmt: skip
    require(slot_mapping.shape == kv.shape[:1] and slot_mapping.dtype == torch.int64, OP,
            f"an int64 slot_mapping [{kv.shape[0]}]", f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}",
            "Pass one slot to a token, -1 for a row that is not kept.")  # fmt: skip
    return _contract.op(  # type: ignore[no-any-return]
        kv, gamma, cos, sin, slot_mapping, k_cache, ckv_cache, epsilon=epsilon
    )


# T and block size.
_SHAPES = {"none": (0, 128), "one": (1, 16), "prefill": (130, 128), "odd": (37, 16)}


def _cases(device: str, dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """Slices of a fused projection, slots in random order; every fifth row is not kept."""
    generator = torch.Generator().manual_seed(seed)
    for name, (tokens, block_size) in _SHAPES.items():

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        blocks = tokens // block_size + 2
        caches = [normal(blocks, block_size, 1, width).to(device) for width in (ROPE, LATENT)]
        kv = normal(tokens, 96 + LATENT + ROPE)[:, 96:]
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[4::5] = -1
        angles = random_angles(tokens, dtype, generator, 1.0 if name != "odd" else 0.8)
        rows = kv.clone(memory_format=torch.contiguous_format) if not tokens else kv  # opcheck cannot copy an empty view
        arguments = (rows, normal(LATENT), *angles, slots)
        yield OpCase(name, (*(x.to(device) for x in arguments), *caches), {"epsilon": 1e-6})
        if name == "odd":
            unkept = torch.full((tokens,), -1, dtype=torch.int64)
            fresh = (cache.clone() for cache in caches)
            yield OpCase("unkept", (*(x.to(device) for x in (*arguments[:-1], unkept)), *fresh), {"epsilon": 1e-5})


def _fake(kv: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.empty(kv.shape[0], width, dtype=kv.dtype, device=kv.device) for width in (ROPE, LATENT)
    )


_contract = register(
    OpContract(
        name=OP,
        stem=OP,
        schema="(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor(a!) k_cache,"
        " Tensor(b!) ckv_cache, *, float epsilon=1e-05) -> (Tensor, Tensor)",
        reference=reference.kv_rmsnorm_rope_cache,
        fake=_fake,
        cases=_cases,
        tolerance=ELEMENTWISE,
    )
)
