"""The experts of each token and their weights, from the router's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, row_warps, unit_stride


def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.moe_gating_top_k.moe_gating_top_k."""
    tokens, experts = x.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, k), dtype=torch.int32, device=x.device)
    x, bias = unit_stride(x), None if bias is None else unit_stride(bias)
    size = experts // group_count
    groups_padded, size_padded = triton.next_power_of_2(group_count), triton.next_power_of_2(size)
    launch(
        _choose, (tokens,), x, x, bias, weights, ids, x.stride(0), routed_scaling_factor, eps, K=k, K_GROUP=k_group,
        GROUPS=group_count, SIZE=size, TOP_TWO=group_select_mode == 1, RENORM=renorm == 1, SIGMOID=norm_type == 1,
        K_PADDED=triton.next_power_of_2(k), GROUPS_PADDED=groups_padded, SIZE_PADDED=size_padded,
        num_warps=row_warps(groups_padded * size_padded),
    )  # fmt: skip
    return weights, ids


@triton.jit(do_not_specialize=["scale", "eps"])
def _choose(
    x: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    K_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_TWO: tl.constexpr,
    RENORM: tl.constexpr,
    SIGMOID: tl.constexpr,
    K_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
) -> None:
    """One row, its experts as [GROUPS_PADDED, SIZE_PADDED]: the order of ids is that of the flat tile. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)
    member = tl.arange(0, SIZE_PADDED)
    expert = group[:, None] * SIZE + member[None, :]
    live = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    logits = tl.load(x + row * stride + expert, mask=live, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + expert, mask=live, other=0.0).to(tl.float32)
    # False for a NaN, which would win no comparison, or every one, and could name an expert that is not there.
    choice = tl.where(live & (choice > float("-inf")), choice, float("-inf"))
    if K_GROUP < GROUPS:
        best = tl.max(choice, 1)
        if TOP_TWO:
            second = tl.where(member[None, :] == tl.argmax(choice, 1)[:, None], float("-inf"), choice)
            best += tl.max(second, 1)
        kept = group < 0
        for _ in range(K_GROUP):
            chosen = group == tl.argmax(best, 0)
            kept = kept | chosen
            best = tl.where(chosen, float("-inf"), best)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    flat = tl.reshape(choice, (GROUPS_PADDED * SIZE_PADDED,))
    flat_scores = tl.reshape(scores, (GROUPS_PADDED * SIZE_PADDED,))
    place = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    rank = tl.arange(0, K_PADDED)
    row_weights = tl.zeros((K_PADDED,), tl.float32)
    row_ids = tl.zeros((K_PADDED,), tl.int32)
    for index in range(K):
        found = tl.argmax(flat, 0)
        weight = tl.sum(tl.where(place == found, flat_scores, 0.0), 0)
        row_weights = tl.where(rank == index, weight, row_weights)
        row_ids = tl.where(rank == index, found // SIZE_PADDED * SIZE + found % SIZE_PADDED, row_ids)
        flat = tl.where(place == found, float("-inf"), flat)
    if RENORM:
        row_weights = row_weights / (tl.sum(row_weights, 0) + eps)
    tl.store(weights + row * K + rank, row_weights * scale, mask=rank < K)
    tl.store(ids + row * K + rank, row_ids, mask=rank < K)
