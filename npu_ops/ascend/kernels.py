"""Triton kernels of this package: for what torch_npu has no op, in one source for Ascend and CUDA.

tools/triton_ascend_check.py compiles them ahead of time for Ascend910B3 and Ascend910_9382, as far as that goes without CANN,
and for CUDA. Their values are tested in Triton's interpreter, and on a GPU where there is one. No NPU has run them yet.

For Ascend's compiler: a fixed grid that walks over the work, addresses made of a scalar and an arange, masks of the form
``arange < n``. Only Triton is imported here, so that they compile without torch.
"""

# ruff: noqa: N803  (Triton writes constexpr in capitals)
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

# Vector cores of an Ascend910B3. Other chips have a few more; any number of programs shares the work.
PROGRAMS = 40
# Elements moved at once. With double buffering the two caches take 32 KiB in 16 bits, of the 192 KiB of a unified buffer.
TILE = 4096


def gather_pages(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    seq_offset: Tensor | None,
) -> None:
    """npu_ops.gather_kv_cache.gather_kv_cache for at least one request, row and column of the block table."""
    lens = seq_lens.contiguous()
    offset = lens.new_zeros(lens.shape) if seq_offset is None else seq_offset.contiguous()
    _gather_pages[(PROGRAMS,)](
        key_cache, value_cache, block_table, lens, offset, lens.cumsum(0, dtype=lens.dtype), key, value, lens.shape[0],
        block_table.stride(0), BLOCK_SIZE=key_cache.shape[1], KEY_WIDTH=key[0].numel(), VALUE_WIDTH=value[0].numel(), TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests", "stride_table"])  # type: ignore[untyped-decorator]
def _gather_pages(
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    seq_offset: tl.tensor,
    ends: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    requests: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Tokens [seq_offset, seq_offset + seq_lens) of each request, from pages to packed rows of key and value.

    ``ends`` [requests] are the cumulative seq_lens. What a request has in one page is contiguous on both sides. Each program
    takes every so-many-th page of each request, so that long requests are shared out. Grid: (programs,), any number.
    """
    programs = tl.num_programs(0)
    for request in range(0, requests):
        length = tl.load(seq_lens + request)
        begin = tl.load(seq_offset + request)
        # Row of the result that token 0 of the request would have.
        origin = (tl.load(ends + request) - length - begin).to(tl.int64)
        pages = (begin + length + BLOCK_SIZE - 1) // BLOCK_SIZE
        for page in range(begin // BLOCK_SIZE + tl.program_id(0), pages, programs):
            first = tl.maximum(page * BLOCK_SIZE, begin)
            tokens = tl.minimum((page + 1) * BLOCK_SIZE, begin + length) - first
            block = tl.load(block_table + tl.cast(request, tl.int64) * stride_table + page).to(tl.int64)
            source = block * BLOCK_SIZE + first - page * BLOCK_SIZE
            _copy(key_cache + source * KEY_WIDTH, key + (origin + first) * KEY_WIDTH, tokens * KEY_WIDTH, TILE)
            _copy(value_cache + source * VALUE_WIDTH, value + (origin + first) * VALUE_WIDTH, tokens * VALUE_WIDTH, TILE)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source: tl.tensor, target: tl.tensor, count: tl.tensor, TILE: tl.constexpr) -> None:
    """Copy ``count`` elements that follow each other."""
    columns = tl.arange(0, TILE)
    for start in range(0, count, TILE):
        part = tl.load(source + start + columns, mask=columns < count - start, other=0.0)
        tl.store(target + start + columns, part, mask=columns < count - start)
