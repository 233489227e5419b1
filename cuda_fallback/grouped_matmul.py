"""One matrix product for each group of rows, the groups packed: the projections of all experts of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import find_tile, launch, tile_bound, unit_stride


def grouped_matmul(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    """See npu_ops.grouped_matmul.grouped_matmul; the rows of ``x`` bound the work: no size is awaited."""
    x, sizes = unit_stride(x), unit_stride(group_list)
    rows, (groups, inner, columns) = x.shape[0], weight.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32
    # Few rows to a group are one short tile each; more would multiply mostly padding.
    row_tile = min(32 if wide else 128, max(16, triton.next_power_of_2(triton.cdiv(rows, groups))))
    column_tile, inner_tile = (64, 32) if wide else (128, 64)
    launch(
        _multiply, (tile_bound(rows, groups, row_tile), triton.cdiv(columns, column_tile)), x, x, weight, out, sizes,
        sizes.cumsum(0) - sizes, groups, x.stride(0), *weight.stride(), INNER=inner, COLUMNS=columns, ROW_TILE=row_tile,
        COLUMN_TILE=column_tile, INNER_TILE=inner_tile, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["groups"])
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    sizes: tl.tensor,
    starts: tl.tensor,
    groups: tl.tensor,
    stride_x: tl.tensor,
    stride_group: tl.tensor,
    stride_inner: tl.tensor,
    stride_column: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    INNER_TILE: tl.constexpr,
) -> None:
    """ROW_TILE rows of one group times COLUMN_TILE columns. Grid: (tiles of rows, blocks of columns)."""
    group, first = find_tile(starts, groups, tl.program_id(0), ROW_TILE)
    size = tl.load(sizes + group)
    if first >= size:
        return
    # Where the tile begins is counted in 64 bits; within it 32 are enough.
    first_row = (tl.load(starts + group) + first).to(tl.int64)
    first_column = tl.program_id(1).to(tl.int64) * COLUMN_TILE
    row, column, inner = tl.arange(0, ROW_TILE), tl.arange(0, COLUMN_TILE), tl.arange(0, INNER_TILE)
    live = row < size - first
    inside = column < COLUMNS - first_column
    x_part = x + first_row * stride_x + row[:, None] * stride_x + inner[None, :]
    matrix = weight + group.to(tl.int64) * stride_group + first_column * stride_column
    w_part = matrix + inner[:, None] * stride_inner + column[None, :] * stride_column
    total = tl.zeros((ROW_TILE, COLUMN_TILE), tl.float32)
    for start in range(0, INNER, INNER_TILE):
        left = INNER - start
        a = tl.load(x_part, mask=live[:, None] & (inner < left)[None, :], other=0.0)
        b = tl.load(w_part, mask=(inner < left)[:, None] & inside[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_part += INNER_TILE
        w_part += INNER_TILE * stride_inner
    out_part = out + first_row * COLUMNS + first_column + row[:, None] * COLUMNS + column[None, :]
    tl.store(out_part, total.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
