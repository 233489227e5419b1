"""Packing rows of the paged cache: the keys and values of every request, one after another."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import copy_rows, find_tile, launch, row_warps, tile_bound, unit_stride

# Tokens of one program.
ROWS = 8


def gather_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
) -> None:
    """See npu_ops.gather_kv_cache.gather_kv_cache; the rows of the result bound the work: no length is awaited."""
    requests = seq_lens.shape[0]
    if requests == 0:
        return
    seq_lens, starts = unit_stride(seq_lens), seq_lens.cumsum(0) - seq_lens
    seq_offset = None if seq_offset is None else unit_stride(seq_offset)
    width, value_width = key.shape[1:].numel(), value.shape[1:].numel()
    padded, value_padded = triton.next_power_of_2(width), triton.next_power_of_2(value_width)
    launch(
        _gather, (tile_bound(key.shape[0], requests, ROWS),), key, key_cache, value_cache, key, value, block_table,
        seq_lens, starts, seq_offset, requests, block_table.stride(0), BLOCK_SIZE=key_cache.shape[1], WIDTH=width,
        VALUE_WIDTH=value_width, WIDTH_PADDED=padded, VALUE_WIDTH_PADDED=value_padded, ROWS=ROWS,
        HAS_OFFSET=seq_offset is not None, num_warps=row_warps(ROWS * padded),
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
def _gather(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    requests: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    VALUE_WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> None:
    """ROWS rows of one request from caches seen as [slots, WIDTH] to [rows, WIDTH]. Grid: (tiles of rows,)."""
    request, first = find_tile(starts, requests, tl.program_id(0), ROWS)
    length = tl.load(seq_lens + request)
    if first >= length:
        return
    index = first + tl.arange(0, ROWS)
    live = index < length
    position = index
    if HAS_OFFSET:
        position += tl.load(offsets + request)
    entries = block_table + request.to(tl.int64) * stride_table + position // BLOCK_SIZE
    slot = tl.load(entries, mask=live, other=0).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    row = tl.load(starts + request).to(tl.int64) + index
    copy_rows(key_cache, key, slot, row, live, WIDTH, WIDTH, WIDTH_PADDED)
    copy_rows(value_cache, value, slot, row, live, VALUE_WIDTH, VALUE_WIDTH, VALUE_WIDTH_PADDED)
