"""Sorting the tokens by expert: one row for each token and chosen expert, the rows of an expert together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch, unit_stride

# Choices that one program looks at together, and elements of a row that one program copies.
CHOICES, COLUMNS = 1024, 1024


def moe_init_routing(
    x: Tensor, expert_idx: Tensor, *, expert_num: int, active_expert_range: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """See npu_ops.moe_init_routing.moe_init_routing; a counting sort, stable and without atomics."""
    first, last = active_expert_range
    x, ids = unit_stride(x), expert_idx.contiguous()
    choices, width = ids.numel(), x.shape[1]
    rows = torch.empty((choices, width), dtype=x.dtype, device=x.device)
    row_idx = torch.full((choices,), -1, dtype=torch.int32, device=x.device)
    counts = torch.empty(last - first, dtype=torch.int64, device=x.device)
    launch(_rank, (last - first,), x, ids, row_idx, counts, choices, first, CHOICES=CHOICES, num_warps=4)
    launch(
        _expand, (choices, triton.cdiv(width, COLUMNS)), x, x, row_idx, rows, x.stride(0), K=ids.shape[1], WIDTH=width,
        COLUMNS=COLUMNS, num_warps=2,
    )  # fmt: skip
    return rows, row_idx, counts


@triton.jit(do_not_specialize=["choices", "first"])
def _rank(
    ids: tl.tensor,
    row_idx: tl.tensor,
    counts: tl.tensor,
    choices: tl.tensor,
    first: tl.tensor,
    CHOICES: tl.constexpr,
) -> None:
    """Rows of one expert's choices: after those of the active experts before it, in order. Grid: (active experts,)."""
    expert = first + tl.program_id(0)
    lane = tl.arange(0, CHOICES)
    before = tl.zeros((CHOICES,), tl.int32)
    for start in range(0, choices, CHOICES):
        chosen = tl.load(ids + start + lane, mask=start + lane < choices, other=-1)
        before += ((chosen >= first) & (chosen < expert)).to(tl.int32)
    begin = tl.sum(before, 0)
    row = begin
    for start in range(0, choices, CHOICES):
        chosen = tl.load(ids + start + lane, mask=start + lane < choices, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(row_idx + start + lane, row + tl.cumsum(mine, 0) - 1, mask=mine > 0)
        row += tl.sum(mine, 0)
    tl.store(counts + tl.program_id(0), (row - begin).to(tl.int64))


@triton.jit
def _expand(
    x: tl.tensor,
    row_idx: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Part of one choice's row, if its expert is active. Grid: (choices, blocks of columns)."""
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(row_idx + choice).to(tl.int64)
    if row < 0:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    part = tl.load(x + choice // K * stride + columns, mask=mask, other=0.0)
    tl.store(rows + row * WIDTH + columns, part, mask=mask)
