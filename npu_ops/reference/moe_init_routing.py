"""Semantics of npu_ops.moe_init_routing in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def moe_init_routing(
    x: Tensor, expert_idx: Tensor, *, expert_num: int, active_expert_range: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See npu_ops.moe_init_routing.moe_init_routing."""
    first, last = active_expert_range
    ids = expert_idx.flatten().long()
    active = (ids >= first) & (ids < last)
    counts = torch.bincount(ids[active] - first, minlength=last - first)
    # Choices of inactive experts come last, and are cut off.
    order = ids.masked_fill(~active, expert_num).argsort(stable=True)[: int(active.sum())]
    row_idx = torch.full(ids.shape, -1, dtype=torch.int32, device=ids.device)
    row_idx[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    rows = torch.empty((len(ids), x.shape[1]), dtype=x.dtype, device=x.device)
    rows[: len(order)] = x[order // max(expert_idx.shape[1], 1)]
    return rows, row_idx, counts
