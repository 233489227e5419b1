"""Writing the new tokens' keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import as_rows, copy_rows, launch, row_warps, unit_stride

# Tokens of one program.
ROWS = 4


def scatter_kv_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See npu_ops.scatter_kv_cache.scatter_kv_cache."""
    keys, values = as_rows(key.flatten(1)), as_rows(value.flatten(1))
    tokens, width = keys.shape
    padded, value_padded = triton.next_power_of_2(width), triton.next_power_of_2(values.shape[1])
    launch(
        _scatter, (triton.cdiv(tokens, ROWS),), key_cache, keys, values, key_cache, value_cache,
        unit_stride(slot_mapping), tokens, keys.stride(0), values.stride(0), WIDTH=width, VALUE_WIDTH=values.shape[1],
        WIDTH_PADDED=padded, VALUE_WIDTH_PADDED=value_padded, ROWS=ROWS, num_warps=row_warps(ROWS * padded),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _scatter(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    tokens: tl.tensor,
    stride_key: tl.tensor,
    stride_value: tl.tensor,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    VALUE_WIDTH_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Rows [tokens, WIDTH] of ROWS tokens into caches seen as [slots, WIDTH]. Grid: (blocks of tokens,)."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1)
    copy_rows(key, key_cache, token, slot, slot >= 0, stride_key, WIDTH, WIDTH_PADDED)
    copy_rows(value, value_cache, token, slot, slot >= 0, stride_value, VALUE_WIDTH, VALUE_WIDTH_PADDED)
