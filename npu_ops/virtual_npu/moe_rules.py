"""CANN's rules for the ops of a mixture of experts; see rules.py."""

from __future__ import annotations

from typing import Any

import torch

from npu_ops.virtual_npu.rules import FLOATS, rule, unless, values

GATING = "torch_npu doc of npu_moe_gating_top_k"
ROUTING = "torch_npu doc of npu_moe_init_routing_v2"
# The document of torch_npu asks for a sum equal to the rows of x; CANN's own only says that no row past it is updated.
MATMUL = "torch_npu doc of npu_grouped_matmul; CANN ops-transformer, aclnnGroupedMatmulV4"
UNPERMUTE = "torch_npu doc of npu_moe_token_unpermute"
GATE, ROUTE, MULTIPLY = "npu_moe_gating_top_k", "npu_moe_init_routing_v2", "npu_grouped_matmul"
COMBINE = ("npu_moe_token_unpermute", "_npu_moe_token_unpermute")  # the second under autograd


# ---- gating -------------------------------------------------------------------------------------------------------------


@rule("2-D logits in fp16, bf16 or fp32 of at most 2048 experts", GATING, GATE)
def _logits(c: Any) -> object:
    right = c.x.dim() == 2 and c.x.dtype in FLOATS and c.x.shape[1] <= 2048
    return unless(right, f"{c.x.dtype} {list(c.x.shape)}")


@rule("a bias [experts] in the dtype of the logits", GATING, GATE)
def _bias(c: Any) -> object:
    right = c.bias is None or (c.bias.shape == c.x.shape[1:] and c.bias.dtype == c.x.dtype)
    return unless(right, c.bias if c.bias is None else f"{c.bias.dtype} {list(c.bias.shape)}")


@rule("groups of equal size above 2 that fit 2048 experts when padded to multiples of 32", GATING, GATE)
def _groups(c: Any) -> object:
    experts, count = c.x.shape[1], c.group_count
    size = experts // count if count > 0 and experts % count == 0 else 0
    return unless(size > 2 and -(-size // 32) * 32 * count <= 2048, f"{count} groups of {experts} experts")


@rule("1 <= k_group <= group_count and 1 <= k <= experts / group_count * k_group", GATING, GATE)
def _choice(c: Any) -> object:
    right = 1 <= c.k_group <= c.group_count and 1 <= c.k <= c.x.shape[1] // c.group_count * c.k_group
    return unless(right, f"k {c.k}, k_group {c.k_group}, group_count {c.group_count}")


@rule("renorm 0, norm_type 0 or 1, group_select_mode 0 or 1", GATING, GATE)
def _gating_modes(c: Any) -> object:
    right = c.renorm == 0 and c.norm_type in (0, 1) and c.group_select_mode in (0, 1)
    return unless(right, (c.renorm, c.norm_type, c.group_select_mode))


# ---- sorting by expert --------------------------------------------------------------------------------------------------


@rule("tokens [T, H] in fp16, bf16, fp32 or int8 and int32 ids [T, K]", ROUTING, ROUTE)
def _tokens(c: Any) -> object:
    ids = c.expert_idx
    right = c.x.dim() == ids.dim() == 2 and c.x.shape[0] == ids.shape[0] and c.x.dtype in (*FLOATS, torch.int8)
    return unless(right and ids.dtype == torch.int32, [f"{t.dtype} {list(t.shape)}" for t in (c.x, ids)])


@rule("ids below expert_num, which is at most 10240", ROUTING, ROUTE)
def _expert_ids(c: Any) -> object:
    ids = c.expert_idx.flatten()
    found = values(ids)
    right = 0 < c.expert_num <= 10240 and (not found or 0 <= min(found) <= max(found) < c.expert_num)
    return unless(right, f"{c.expert_num} experts" + (f", ids {min(found)} to {max(found)}" if found else ""))


@rule("an active_expert_range [first, last) within the experts", ROUTING, ROUTE)
def _active_range(c: Any) -> object:
    active = c.active_expert_range
    return unless(not active or (len(active) == 2 and 0 <= active[0] < active[1] <= c.expert_num), active)


@rule("drop_pad_mode 0, expert_tokens_num_type 1 or 2 with its flag, quant_mode -1 or 1, row_idx_type 0 or 1", ROUTING, ROUTE)
def _routing_modes(c: Any) -> object:
    right = c.drop_pad_mode == 0 and c.expert_tokens_num_type in (1, 2) and c.expert_tokens_num_flag
    right = right and c.quant_mode in (-1, 1) and c.row_idx_type in (0, 1) and c.active_num >= -1
    return unless(right, (c.drop_pad_mode, c.expert_tokens_num_type, c.expert_tokens_num_flag, c.quant_mode, c.row_idx_type))


# ---- products of groups -------------------------------------------------------------------------------------------------


def _single(c: Any) -> bool:
    """One x, one weight and one result, grouped along the rows: the form that has the following rules."""
    return len(c.x) == len(c.weight) == 1 and c.group_type == 0 and c.split_item in (2, 3)


@rule("split_item 2 or 3 with group_type 0, and 0 or 1 with -1", MATMUL, MULTIPLY)
def _split(c: Any) -> object:
    return unless((c.group_type, c.split_item) in ((0, 2), (0, 3), (-1, 0), (-1, 1)), (c.group_type, c.split_item))


@rule("rows [R, K] and a weight [G, K, N] in one dtype: fp16, bf16 or fp32", MATMUL, MULTIPLY)
def _products(c: Any) -> object:
    if not _single(c):
        return None
    x, weight = c.x[0], c.weight[0]
    right = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1]
    right = right and x.dtype == weight.dtype and x.dtype in FLOATS
    return unless(right, [f"{t.dtype} {list(t.shape)}" for t in (x, weight)])


@rule("contiguous rows, and matrices that are contiguous or transposed", MATMUL, MULTIPLY)
def _product_layouts(c: Any) -> object:
    right = all(x.is_contiguous() for x in c.x)
    right = right and all(w.is_contiguous() or w.transpose(-1, -2).is_contiguous() for w in c.weight)
    return unless(right, [t.stride() for t in (*c.x, *c.weight)])


@rule("innermost dims below 65536", MATMUL, MULTIPLY)
def _inner(c: Any) -> object:
    inner = [x.shape[-1] for x in c.x] + [w.shape[-1 if w.is_contiguous() else -2] for w in c.weight]
    return unless(max(inner) < 65536, inner)


@rule("an int64 group_list [G] of at most 1024 groups", MATMUL, MULTIPLY)
def _group_list(c: Any) -> object:
    groups = c.group_list
    right = not _single(c) or (groups is not None and groups.dtype == torch.int64 and groups.shape == c.weight[0].shape[:1])
    return unless(right and (groups is None or len(groups) <= 1024), groups if groups is None else
                  f"{groups.dtype} {list(groups.shape)}")  # fmt: skip


@rule("sizes that are not negative (more than one), or cumulative ones that do not fall, up to the rows of x", MATMUL, MULTIPLY)
def _group_sizes(c: Any) -> object:
    numbers = values(c.group_list) if _single(c) and c.group_list is not None else None
    if numbers is None:
        return None
    rows = c.x[0].shape[0]
    if c.group_list_type == 1:
        return unless(len(numbers) > 1 and min(numbers) >= 0 and sum(numbers) <= rows, f"{numbers} of {rows}")
    return unless(c.group_list_type == 0 and [0, *numbers] == sorted([0, *numbers]) and numbers[-1] <= rows,
                  f"{numbers} of {rows}, type {c.group_list_type}")  # fmt: skip


# ---- combination --------------------------------------------------------------------------------------------------------


@rule("rows [T * K, H] in fp16, bf16 or fp32 and one int32 index to each", UNPERMUTE, *COMBINE)
def _combined(c: Any) -> object:
    rows, indices = c.permuted_tokens, c.sorted_indices
    choices = len(indices) if c.probs is None else c.probs.numel()
    right = rows.dim() == 2 and len(rows) == choices and rows.dtype in FLOATS
    right = right and indices.dtype == torch.int32 and indices.shape == (choices,)
    return unless(right, [f"{t.dtype} {list(t.shape)}" for t in (rows, indices)])


@rule("probs [T, K] in fp16, bf16 or fp32 with K up to 512", UNPERMUTE, *COMBINE)
def _probs(c: Any) -> object:
    p = c.probs
    right = p is None or (p.dim() == 2 and p.dtype in FLOATS and p.shape[1] <= 512)
    return unless(right, p if p is None else f"{p.dtype} {list(p.shape)}")


@rule("padded_mode False and no restore_shape", UNPERMUTE, *COMBINE)
def _padded(c: Any) -> object:
    return unless(not c.padded_mode and c.restore_shape is None, (c.padded_mode, c.restore_shape))


@rule("indices of rows that are there", UNPERMUTE, *COMBINE)
def _combined_range(c: Any) -> object:
    found, rows = values(c.sorted_indices), c.permuted_tokens.shape[0]
    return unless(not found or 0 <= min(found) <= max(found) < rows, found and f"{min(found)} to {max(found)} of {rows}")


@rule("distinct indices; a repeated one of weight 0, which a sum cannot tell, passes", UNPERMUTE, *COMBINE)
def _combined_distinct(c: Any) -> object:
    weights = None if c.probs is None else values(c.probs.flatten())
    found = values(c.sorted_indices)
    if found is None:
        return None
    heavy = [row for row, weight in zip(found, weights or [1.0] * len(found), strict=True) if weight]
    return unless(len(set(heavy)) == len(heavy), [row for row in set(heavy) if heavy.count(row) > 1])
