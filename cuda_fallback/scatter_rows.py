"""Writing new rows of any type into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import as_rows, copy_rows, launch, row_warps, unit_stride

# Tokens of one program.
ROWS = 4


def scatter_rows(rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """See npu_ops.scatter_rows.scatter_rows."""
    if rows.dtype == torch.float8_e4m3fn:  # a copy of bytes
        rows, cache = rows.view(torch.int8), cache.view(torch.int8)
    rows = as_rows(rows)
    tokens, width = rows.shape
    padded = triton.next_power_of_2(width)
    launch(
        _scatter, (triton.cdiv(tokens, ROWS),), cache, rows, cache, unit_stride(slot_mapping), tokens, rows.stride(0),
        WIDTH=width, WIDTH_PADDED=padded, ROWS=ROWS, num_warps=row_warps(ROWS * padded),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _scatter(
    rows: tl.tensor,
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    tokens: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Rows [tokens, WIDTH] of ROWS tokens into a cache seen as [slots, WIDTH]. Grid: (blocks of tokens,)."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    copy_rows(rows, cache, token, slot, slot >= 0, stride, WIDTH, WIDTH_PADDED)
