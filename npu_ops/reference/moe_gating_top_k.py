"""Semantics of npu_ops.moe_gating_top_k in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if k_group < group_count:
        groups = choice.view(x.shape[0], group_count, x.shape[1] // group_count)
        best = groups.topk(1 + group_select_mode, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _first(best, k_group), True)
        choice = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = _first(choice, k)
    weights = scores.gather(1, ids)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * routed_scaling_factor, ids.int()


def _first(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` best of each row, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
