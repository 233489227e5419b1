"""Values and rules of the ops of the lightning indexer; see values.py and rules.py.

What CANN's documents leave open is made unpleasant here, so that nobody relies on it: positions come in descending order, and
rows past the last request hold rubbish.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_ops.reference.lightning_indexer import top_positions
from npu_ops.virtual_npu.rules import FLOATS, rule, scattered, unless
from npu_ops.virtual_npu.rules import values as numbers
from npu_ops.virtual_npu.values import refuse, value

INDEXER, QUANT, SCATTER = "npu_lightning_indexer", "npu_quant_lightning_indexer", "npu_scatter_nd_update_"
INDEXER_DOC, QUANT_DOC, SCATTER_DOC = (f"torch_npu doc of {name}" for name in (INDEXER, QUANT, SCATTER))
BOTH_DOC, BOTH = f"{INDEXER_DOC} and {QUANT}", (INDEXER, QUANT)
UNLIMITED = 2**63 - 1
LARGE_COUNTS = range(3072, 8193, 1024)
RUBBISH = 7


@value(f"npu::{SCATTER}")
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write updates[i] to input[indices[i]]; of an index that comes twice, either may stay."""
    input[tuple(indices.long().unbind(-1))] = updates
    return input


@value(f"npu::{INDEXER}")
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    return_value: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Positions [T, 1, sparse_count] of the causal form over a paged cache, and no values."""
    if return_value:
        raise NotImplementedError(f"{INDEXER}: the virtual NPU does not compute with return_value. Leave it out.")
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    return _select(INDEXER, query, key, weights.float(), None, lengths, **others), query.new_empty(0)


@value(f"npu::{QUANT}")
def npu_quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    """The same of rows in 8 bits, each with a scale to its head (quant mode 0)."""
    refuse(QUANT, query_dtype=query_dtype, key_dtype=key_dtype)
    factors = weights.float() * query_dequant_scale.float()
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    return _select(QUANT, query, key, factors, key_dequant_scale, lengths, **others)


def _select(
    op: str, query: Tensor, key: Tensor, weights: Tensor, scale: Tensor | None, lengths: tuple[Tensor | None, ...], *,
    layout_query: str = "BSND", layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED, next_tokens: int = UNLIMITED,
) -> Tensor:  # fmt: skip
    """What both forms compute, out of order."""
    ends, lens, table = lengths
    if (layout_query, layout_key, sparse_mode) != ("TND", "PA_BSND", 3) or (pre_tokens, next_tokens) != (UNLIMITED,) * 2:
        raise NotImplementedError(f"{op}: the virtual NPU knows TND queries, PA_BSND keys and sparse_mode 3 without a window")
    assert ends is not None and lens is not None and table is not None
    indices = top_positions(query, key, weights, scale, ends, lens, table, sparse_count, 2**29).flip(-1)
    indices[int(ends[-1]) :] = RUBBISH
    return indices


# ---- rules ----------------------------------------------------------------------------------------------------------------


def _described(*tensors: Tensor | None) -> list[str]:
    return [str(x) if x is None else f"{x.dtype} {list(x.shape)}" for x in tensors]


@rule("an input of 1 to 8 dims in fp32, fp16, bf16, bool, int64 or int8, and updates in its dtype", SCATTER_DOC, SCATTER)
def _scatter_types(c: Any) -> object:
    right = c.input.dtype in (*FLOATS, torch.bool, torch.int64, torch.int8) and c.updates.dtype == c.input.dtype
    return unless(right and 1 <= c.input.dim() <= 8, _described(c.input, c.updates))


@rule("int32 or int64 indices [..., a] and updates [..., *input.shape[a:]]", SCATTER_DOC, SCATTER)
def _scatter_shapes(c: Any) -> object:
    right = c.indices.dim() >= 2 and c.indices.dtype in (torch.int32, torch.int64) and c.indices.shape[-1] <= c.input.dim()
    right = right and c.updates.shape == (*c.indices.shape[:-1], *c.input.shape[c.indices.shape[-1] :])
    return unless(right, _described(c.input, c.indices, c.updates))


@rule("indices within the input", SCATTER_DOC, SCATTER)
def _scatter_range(c: Any) -> object:
    rows = numbers(c.indices.flatten(0, -2)) or []
    return unless(all(0 <= x < size for row in rows for x, size in zip(row, c.input.shape, strict=False)),
                  f"{min(rows, default=None)} to {max(rows, default=None)} for {list(c.input.shape)}")  # fmt: skip


@rule("contiguous query, key, weights and scales", BOTH_DOC, *BOTH)
def _contiguous(c: Any) -> object:
    return scattered(c, "query", "key", "weights", "query_dequant_scale", "key_dequant_scale")


@rule("query, key and weights in fp16 or bf16", INDEXER_DOC, INDEXER)
def _types(c: Any) -> object:
    given = (c.query, c.key, c.weights)
    return unless(all(x.dtype in FLOATS[:2] for x in given) and c.query.dtype == c.key.dtype, _described(*given))


@rule("weights [T, N1] to a query [T, N1, D], and a key [blocks, block_size, N2, D]", BOTH_DOC, *BOTH)
def _shapes(c: Any) -> object:
    if (c.layout_query, c.layout_key) != ("TND", "PA_BSND"):
        return None
    right = c.query.dim() == 3 and c.key.dim() == 4 and c.key.shape[3] == c.query.shape[2]
    return unless(right and c.weights.shape == c.query.shape[:2], _described(c.query, c.key, c.weights))


@rule("a layout_query of BSND or TND, and a layout_key of PA_BSND or the same", BOTH_DOC, *BOTH)
def _layouts(c: Any) -> object:
    right = c.layout_query in ("BSND", "TND") and c.layout_key in ("PA_BSND", c.layout_query)
    return unless(right, (c.layout_query, c.layout_key))


@rule("a sparse_count of 1 to 2048, or 3072 to 8192 in steps of 1024", INDEXER_DOC, INDEXER)
def _count(c: Any) -> object:
    return unless(1 <= c.sparse_count <= 2048 or c.sparse_count in LARGE_COUNTS, c.sparse_count)


@rule("a sparse_count of 1 to 2048 for rows in 8 bits", QUANT_DOC, QUANT)
def _quant_count(c: Any) -> object:
    return unless(1 <= c.sparse_count <= 2048, c.sparse_count)


@rule(
    "query and key in int8, with weights and scales in fp16 (A3), or in float8_e4m3fn, with weights in fp16 or bf16 and"
    " scales in fp16 or fp32 (950)", QUANT_DOC, QUANT,
)  # fmt: skip
def _quant_types(c: Any) -> object:
    scales = (c.query_dequant_scale, c.key_dequant_scale)
    floats = c.query.dtype == torch.float8_e4m3fn
    right = c.query.dtype == c.key.dtype and c.query.dtype in (torch.int8, torch.float8_e4m3fn)
    right = right and c.weights.dtype in (FLOATS[:2] if floats else FLOATS[:1])
    right = right and all(x.dtype in ((torch.float16, torch.float32) if floats else FLOATS[:1]) for x in scales)
    return unless(right, _described(c.query, c.key, c.weights, *scales))


@rule("at most 64 heads, scales [T, N1] and [blocks, block_size, N2], and quant modes 0", QUANT_DOC, QUANT)
def _quant_shapes(c: Any) -> object:
    right = c.query.shape[-2] <= 64 and c.query_dequant_scale.shape == c.query.shape[:-1]
    right = right and c.key_dequant_scale.shape == c.key.shape[:-1] and (c.query_quant_mode, c.key_quant_mode) == (0, 0)
    return unless(
        right, [*_described(c.query, c.query_dequant_scale, c.key_dequant_scale), c.query_quant_mode, c.key_quant_mode]
    )


@rule("sparse_mode 0 or 3", BOTH_DOC, *BOTH)
def _mode(c: Any) -> object:
    return unless(c.sparse_mode in (0, 3), c.sparse_mode)


@rule("int32 lengths [B] of TND queries, cumulative, none negative and none falling, up to T", BOTH_DOC, *BOTH)
def _query_lengths(c: Any) -> object:
    ends = c.actual_seq_lengths_query
    if c.layout_query != "TND":
        return None
    if ends is None or ends.dim() != 1 or ends.dtype != torch.int32:
        return _described(ends)
    found = numbers(ends) or [0]
    return unless([0, *found] == sorted([0, *found]) and found[-1] <= c.query.shape[0], found)


@rule("int32 key lengths [B]", BOTH_DOC, *BOTH)
def _key_lengths(c: Any) -> object:
    ends, lens = c.actual_seq_lengths_query, c.actual_seq_lengths_key
    right = lens is not None and lens.dtype == torch.int32 and (ends is None or lens.shape == ends.shape)
    return unless(right or (lens is None and c.block_table is None), _described(ends, lens))


@rule("an int32 block_table [B, blocks of the longest request] of paged keys", BOTH_DOC, *BOTH)
def _table(c: Any) -> object:
    table, lens = c.block_table, c.actual_seq_lengths_key
    if c.layout_key != "PA_BSND":
        return None
    right = table is not None and table.dim() == 2 and table.dtype == torch.int32 and table.shape[0] == len(lens)
    longest = max(numbers(lens) or [0])
    return unless(right and table.shape[1] * c.key.shape[1] >= longest, [*_described(table), f"for {longest} keys"])
