"""Values of torch_npu's ops of a mixture of experts; see values.py.

What CANN's documents leave undefined is NaN here, so that nobody relies on it: rows past those of the active experts, scales
that were not asked for, scores without out_flag.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_ops.reference import grouped_matmul, moe_gating_top_k, moe_init_routing, moe_token_unpermute
from npu_ops.virtual_npu.values import refuse, value

GATING, ROUTING = "npu_moe_gating_top_k", "npu_moe_init_routing_v2"
MATMUL, UNPERMUTE = "npu_grouped_matmul", "npu_moe_token_unpermute"
OPS = (GATING, ROUTING, MATMUL, UNPERMUTE)
SIGMOID = 1


@value(f"npu::{GATING}")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights in the dtype of x, ids, and the scores of all experts in fp32. A sigmoid's weights are divided by their sum."""
    refuse(GATING, **others)
    weights, ids = moe_gating_top_k.moe_gating_top_k(
        x, k, bias=bias, k_group=k_group, group_count=group_count, group_select_mode=group_select_mode,
        renorm=int(norm_type == SIGMOID), norm_type=norm_type, routed_scaling_factor=routed_scaling_factor, eps=eps,
    )  # fmt: skip
    scores = x.float().sigmoid() if norm_type == SIGMOID else x.float().softmax(-1)
    return weights.to(x.dtype), ids, scores if out_flag else torch.full_like(scores, math.nan)


@value(f"npu::{ROUTING}")
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert, the row of each choice or -1, counts of the active experts; no scales."""
    refuse(ROUTING, row_idx_type=row_idx_type, **others)
    modes = {"active_num": active_num in (-1, 0, expert_idx.numel()), "expert_tokens_num_type": expert_tokens_num_type == 1,
             "quant_mode": quant_mode == -1}  # fmt: skip
    if unknown := [name for name, known in modes.items() if not known]:
        raise NotImplementedError(f"{ROUTING}: the virtual NPU does not compute with this {unknown[0]}")
    active = list(active_expert_range) or [0, expert_num]
    rows, row_idx, counts = moe_init_routing.moe_init_routing(x, expert_idx, expert_num=expert_num, active_expert_range=active)
    rows[int(counts.sum()) :] = math.nan
    return rows, row_idx, counts, torch.full((len(row_idx),), math.nan)


@value(f"npu::{MATMUL}")
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: Any = None,
    **others: Any,
) -> list[Tensor]:
    """The form with one x, one 3-D weight and one result; groups along the rows, as sizes (type 1) or their sums (type 0)."""
    refuse(MATMUL, output_dtype=output_dtype, **others)
    if len(x) != 1 or len(weight) != 1 or split_item not in (2, 3) or group_type != 0:
        raise NotImplementedError(f"{MATMUL}: the virtual NPU knows one x, one weight, split_item 2 or 3 and group_type 0")
    sizes = group_list if group_list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1))
    out = grouped_matmul.grouped_matmul(x[0], weight[0], sizes)
    out[int(sizes.sum()) :] = math.nan
    return [out]


@value(f"npu::{UNPERMUTE}")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """The weighted sum of each token's rows; without probs each token has one row, unweighted."""
    refuse(UNPERMUTE, padded_mode=padded_mode, restore_shape=restore_shape)
    weights = torch.ones(len(sorted_indices), 1) if probs is None else probs.float()
    return moe_token_unpermute.moe_token_unpermute(permuted_tokens, sorted_indices, weights)


@value(f"npu::_{UNPERMUTE}")
def npu_moe_token_unpermute_for_autograd(permuted_tokens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """What torch_npu calls in its place above the dispatcher's keys for autograd; nothing is kept for a backward pass."""
    return npu_moe_token_unpermute(permuted_tokens, *args, **kwargs), permuted_tokens.new_empty(0)
