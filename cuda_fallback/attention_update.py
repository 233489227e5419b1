"""Merging partial attention by LSE: the online softmax of FlashAttention (Dao et al., 2022) over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import launch

# Output elements of one program: few enough that the merge of a decode step still spreads over the GPU.
ELEMENTS = 1024


def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See npu_ops.attention_update.attention_update."""
    # Stacking also makes the parts contiguous and gives them one dtype, the widest among them.
    parts, part_lse = torch.stack(list(local_out)), torch.stack(list(lse))
    out = torch.empty(parts.shape[1:], dtype=local_out[0].dtype, device=parts.device)
    out_lse = torch.empty(part_lse.shape[1:], dtype=torch.float32, device=parts.device)
    merge(part_lse.flatten(1), parts.flatten(1, 2), out_lse.view(-1), out.flatten(0, 1))
    return out, out_lse


def merge(lse: Tensor, parts: Tensor, out_lse: Tensor, out: Tensor) -> None:
    """Merge the LSEs [n, R] and outputs [n, R, D] of n parts into ``out_lse`` [R] and ``out`` [R, D], all contiguous.

    A part whose LSE is -inf or +inf is left out, whatever its output; a row without parts gets output 0 and LSE -inf.
    """
    count, rows, dim = parts.shape
    padded = triton.next_power_of_2(dim)
    block = max(1, ELEMENTS // padded)
    launch(
        _merge, (triton.cdiv(rows, block),), out, lse, parts, out_lse, out, count, rows, D=dim, DP=padded, BLOCK=block
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "rows"])
def _merge(
    lse: tl.tensor,
    parts: tl.tensor,
    out_lse: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK rows of every part. Grid: (blocks of rows,)."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = row < rows
    dims = tl.arange(0, DP)
    places = row[:, None] * D + dims[None, :]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, DP], tl.float32)
    start = row * 0
    for _ in range(count):
        part = tl.load(lse + start + row, mask=live, other=float("-inf"))
        empty = (part == float("-inf")) | (part == float("inf"))
        part = tl.where(empty, float("-inf"), part)
        new_top = tl.maximum(top, part)
        # As long as all parts are empty the maximum is -inf; subtracting 0 leaves their weights 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - base)
        weight = tl.exp(part - base)
        # An empty part may hold NaN, and 0 * NaN would be NaN: it is not read.
        mask = (live & (part != float("-inf")))[:, None] & (dims < D)[None, :]
        values = tl.load(parts + start[:, None] * D + places, mask=mask, other=0.0).to(tl.float32)
        mixed = mixed * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        top = new_top
        start += rows
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + places, mixed.to(out.dtype.element_ty), mask=live[:, None] & (dims < D)[None, :])
    tl.store(out_lse + row, top + tl.log(total), mask=live)
