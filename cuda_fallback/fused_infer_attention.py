"""Attention over packed tokens with a paged or contiguous KV, for prefill, decode and anything between.

One kernel streams the keys past a tile of query rows and keeps a running softmax (Dao, 2023, "FlashAttention-2"). Where
there are too few tiles to fill the GPU, each tile's keys are divided among several programs and their partial results
are merged by LSE (Dao, Haziza, Massa and Sizov, 2023, "Flash-Decoding for long-context inference").
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.attention_update import merge
from cuda_fallback.launch import find_tile, launch, multiprocessors, tile_bound, unit_stride
from cuda_fallback.mla_attention import attend_latent

UNLIMITED = 2147483647
# No limit to the left or right of a row's position. Positions are below it, so that adding the two stays in int32.
EVERYTHING = 2**30
# A program that reads fewer keys than this costs more in merging than it saves.
KEYS_PER_SPLIT = 256
MAX_SPLITS = 128


def fused_infer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    block_table: Tensor | None = None,
    block_size: int = 0,
    sparse_mode: int = 0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    learnable_sink: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.fused_infer_attention.fused_infer_attention; the host lists only choose the shape of the launch."""
    if query_rope is not None and key_rope is not None and block_table is not None:
        out, lse = attend_latent(
            query, query_rope, key, key_rope, actual_seq_qlen=actual_seq_qlen, actual_seq_kvlen=actual_seq_kvlen,
            query_start_loc=query_start_loc, seq_lens=seq_lens, softmax_scale=softmax_scale, block_table=block_table,
            causal=sparse_mode == 3,
        )  # fmt: skip
        return out, lse if return_softmax_lse else lse.new_empty(0)
    query, query_start_loc, seq_lens = unit_stride(query), unit_stride(query_start_loc), unit_stride(seq_lens)
    block_table = None if block_table is None else unit_stride(block_table)
    sinks = None if learnable_sink is None else unit_stride(learnable_sink)
    tokens, heads, dim = query.shape
    value_dim = value.shape[-1]
    group, requests = heads // num_key_value_heads, seq_lens.shape[0]
    longest_query = max(b - a for a, b in pairwise((0, *actual_seq_qlen)))
    longest_keys = max(actual_seq_kvlen) if block_size else max(b - a for a, b in pairwise((0, *actual_seq_kvlen)))
    tile = tile_options(query.dtype, dim, value_dim, group, longest_query)
    # Rows past the last request are padding, which the kernel sees as one more request: without keys.
    tiles = tile_bound(tokens, requests + 1, tile["BLOCK_M"] // group)
    splits = _splits(multiprocessors(query), tiles * num_key_value_heads, longest_keys)
    partial = query.new_empty((splits, tokens, heads, value_dim), dtype=query.dtype if splits == 1 else torch.float32)
    partial_lse = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    before, after = _visible(sparse_mode, pre_tokens, next_tokens)
    launch(
        _attend, (tiles, num_key_value_heads, splits), query, query, key, value, partial, partial_lse,
        query_start_loc, seq_lens, None if block_size else seq_lens.cumsum(0) - seq_lens, block_table, sinks,
        tokens, requests, query.stride(0), query.stride(1), 0 if block_table is None else block_table.stride(0),
        softmax_scale, before, after, HEADS=heads, KV_HEADS=num_key_value_heads, D=dim, DP=triton.next_power_of_2(dim),
        DV=value_dim, DVP=triton.next_power_of_2(value_dim), BLOCK_SIZE=block_size, HAS_SINK=sinks is not None, **tile,
    )  # fmt: skip
    out, lse = partial[0], partial_lse[0]
    if splits > 1:
        out, lse = torch.empty_like(out, dtype=query.dtype), torch.empty_like(lse)
        merge(partial_lse.flatten(1), partial.flatten(1, 2), lse.view(-1), out.view(-1, value_dim))
    return out, lse if return_softmax_lse else lse.new_empty(0)


def tile_options(dtype: torch.dtype, dim: int, value_dim: int, group: int, longest_query: int) -> dict[str, int]:
    """Tile sizes and launch options for heads of ``dim``, values of ``value_dim``, ``group`` query heads to a KV head.

    A tile holds at least the query heads of one token, and 16 rows, the least that tensor cores take. fp32 runs without
    them and holds its operands in registers: larger tiles would spill.
    """
    if dtype == torch.float32:
        most, keys, stages = max(16, triton.next_power_of_2(group)), 16, 1
    else:
        most, keys, stages = (64, 32, 2) if value_dim > 128 else (128, 64, 3 if dim <= 128 else 2)
    rows = min(most, max(16, triton.next_power_of_2(group * max(1, longest_query))))
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 4 if rows <= 32 else 8, "num_stages": stages}


def _splits(programs: int, tiles: int, longest_keys: int) -> int:
    """Among how many programs to divide a tile's keys: two to a multiprocessor, if each has keys enough."""
    return max(1, min(2 * programs // max(1, tiles), longest_keys // KEYS_PER_SPLIT, MAX_SPLITS))


def _visible(sparse_mode: int, pre_tokens: int, next_tokens: int) -> tuple[int, int]:
    """How many keys before and after its own position a row sees."""
    if sparse_mode == 4:
        return min(pre_tokens, EVERYTHING), min(next_tokens, EVERYTHING)
    return EVERYTHING, 0 if sparse_mode == 3 else EVERYTHING


@triton.jit(do_not_specialize=["tokens", "requests", "before", "after"])
def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    key_start_loc: tl.tensor,
    block_table: tl.tensor,
    sinks: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_table: tl.tensor,
    scale: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Rows of one tile (tokens x the query heads of one KV head) over one share of their keys.

    query [tokens, HEADS, D], key [rows, KV_HEADS, D] and value [rows, KV_HEADS, DV] in packed or block order (BLOCK_SIZE 0:
    packed), out [splits, tokens, HEADS, DV], lse [splits, tokens, HEADS]. Grid: (tiles, KV heads, splits).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE: tl.constexpr = BLOCK_M // GROUP
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    request, first = find_tile(query_start_loc, requests + 1, tl.program_id(0), TILE)
    # Rows past the last request are one more request: it has no keys, and no sink.
    real = request < requests
    clipped = tl.minimum(request, requests - 1)
    start = tl.load(query_start_loc + request)
    length = tl.where(real, tl.load(query_start_loc + clipped + 1), tokens) - start
    keys = tl.where(real, tl.load(seq_lens + clipped), 0)
    if first >= length:
        return

    rows = tl.arange(0, BLOCK_M)
    index = first + rows // GROUP
    live = (rows < TILE * GROUP) & (index < length)
    head = kv_head * GROUP + rows % GROUP
    token = (start + index).to(tl.int64)
    dims = tl.arange(0, DP)
    query_rows = query + token[:, None] * stride_qt + head[:, None] * stride_qh
    q = tl.load(query_rows + dims[None, :], mask=live[:, None] & (dims < D)[None, :], other=0.0)

    # Row i of the request sits at key position keys - length + i. Only keys that some row of the tile sees are read.
    position = keys - length + index
    last = tl.minimum(first + TILE, length) - 1
    low = tl.maximum(keys - length + first - before, 0)
    high = tl.minimum(keys - length + last + after + 1, keys)
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), tl.num_programs(2)), BLOCK_N) * BLOCK_N
    low += split * share
    high = tl.minimum(high, low + share)

    # Running maximum (in units of log 2), sum and output of each row. The sink is a key that one split has seen before.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINK:
        counted = tl.where(real & (split == 0), length, 0)
        top = tl.load(sinks + head, mask=live & (index < counted), other=float("-inf")).to(tl.float32) * LOG2E
    total = tl.where(top > float("-inf"), 1.0, 0.0)
    mixed = tl.zeros([BLOCK_M, DVP], tl.float32)
    value_dims = tl.arange(0, DVP)
    for begin in range(low, high, BLOCK_N):
        columns = begin + tl.arange(0, BLOCK_N)
        inside = columns < high
        slots = _slots(key_start_loc, block_table, stride_table, clipped, columns, inside, BLOCK_SIZE)
        places = (slots * KV_HEADS + kv_head)[:, None]
        # Rows outside hold whatever was there before, NaN too: K and V are both read as 0.
        k = tl.load(key + places * D + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        seen = (columns[None, :] >= position[:, None] - before) & (columns[None, :] <= position[:, None] + after)
        scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has only scores of -inf; subtracting 0 leaves its weights 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(value + places * DV + value_dims[None, :], mask=inside[:, None] & (value_dims < DV)[None, :], other=0.0)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (split.to(tl.int64) * tokens + token) * HEADS + head
    row_mask = live[:, None] & (value_dims < DV)[None, :]
    tl.store(out + place[:, None] * DV + value_dims[None, :], mixed.to(out.dtype.element_ty), mask=row_mask)
    tl.store(lse + place, (top + tl.log2(total)) * LN2, mask=live)


@triton.jit
def _slots(
    key_start_loc: tl.tensor,
    block_table: tl.tensor,
    stride_table: tl.tensor,
    request: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Rows (int64) of the key and value tensors at which the tokens ``columns`` of one request lie."""
    if BLOCK_SIZE == 0:
        slots = tl.load(key_start_loc + request) + columns
    else:
        entries = block_table + request.to(tl.int64) * stride_table + columns // BLOCK_SIZE
        slots = tl.load(entries, mask=inside, other=0).to(tl.int64) * BLOCK_SIZE + columns % BLOCK_SIZE
    return slots
