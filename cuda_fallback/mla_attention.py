"""Attention over a paged latent cache (MLA, absorbed form): each key row is read once and serves as its value too.

The same two ideas as in fused_infer_attention.py: a running softmax, and keys divided among programs whose partial results
are merged by LSE. All query heads share the one latent head, so a tile is up to 64 pairs of token and head.
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

# A program that reads fewer keys than this costs more in merging than it saves.
KEYS_PER_SPLIT = 256
MAX_SPLITS = 128
# Partial outputs in fp32 take no more than this beside the model.
PARTIAL_BYTES = 256 * 1024 * 1024


def attend_latent(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    key_rope: Tensor,
    *,
    actual_seq_qlen: Sequence[int],
    actual_seq_kvlen: Sequence[int],
    query_start_loc: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    block_table: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output [T, N, D] and LSE [T, N] of query [T, N, D] and query_rope [T, N, R] over latent [blocks, block_size, 1, D].

    The host lists only choose the shape of the launch: it stays right for any other lengths on the device.
    """
    query, query_rope, block_table = unit_stride(query), unit_stride(query_rope), unit_stride(block_table)
    query_start_loc, seq_lens = unit_stride(query_start_loc), unit_stride(seq_lens)
    tokens, heads, dim = query.shape
    qlens = [b - a for a, b in pairwise((0, *actual_seq_qlen))]
    tile = tile_options(query.dtype, heads * max(1, *qlens))
    rows = max(1, tile["BLOCK_M"] // heads)
    head_tiles = triton.cdiv(heads, tile["BLOCK_M"])
    # Rows past the last request are padding, which the kernel sees as one more request: without keys.
    tiles = tile_bound(tokens, len(qlens) + 1, rows) * head_tiles
    work = [(triton.cdiv(q, rows) * head_tiles, k) for q, k in zip(qlens, actual_seq_kvlen, strict=True) if q]
    slots = multiprocessors(query) * (2 if tile["BLOCK_M"] == 16 else 1)
    chunk, splits = _shares(work, slots, 4 * tokens * heads * dim)
    partial = query.new_empty((splits, tokens, heads, dim), dtype=query.dtype if splits == 1 else torch.float32)
    partial_lse = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    launch(
        _attend_latent, (tiles, splits), query, query, query_rope, latent, key_rope, partial, partial_lse,
        query_start_loc, seq_lens, block_table, tokens, len(qlens), query.stride(0), query.stride(1),
        query_rope.stride(0), query_rope.stride(1), block_table.stride(0), softmax_scale, chunk, CAUSAL=causal,
        HEADS=heads, D=dim, ROPE=query_rope.shape[-1], BLOCK_SIZE=latent.shape[1], **tile,
    )  # fmt: skip
    if splits == 1:
        return partial[0], partial_lse[0]
    out, lse = torch.empty_like(partial[0], dtype=query.dtype), torch.empty_like(partial_lse[0])
    merge(partial_lse.flatten(1), partial.flatten(1, 2), lse.view(-1), out.view(-1, dim))
    return out, lse


def tile_options(dtype: torch.dtype, rows: int) -> dict[str, int]:
    """Tile sizes and launch options for requests of at most ``rows`` pairs of token and head.

    64 rows fill Hopper's matrix instructions; with their queries, three tiles of 32 keys fill a multiprocessor's shared
    memory. Of programs with 16 rows, which only wait for the keys, two share a multiprocessor.
    """
    if dtype == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1}
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    return {"BLOCK_M": tile, "BLOCK_N": 32, "num_warps": 4 if tile == 16 else 8, "num_stages": 4 if tile == 32 else 3}


def _shares(work: Sequence[tuple[int, int]], slots: int, bytes_per_split: int) -> tuple[int, int]:
    """Keys of one program, and how many programs the longest request needs, for (tiles, keys) of each request.

    Equal shares of all work, whatever the lengths: one long request among short ones is spread over the whole GPU.
    """
    longest = max((keys for _, keys in work), default=0)
    most = max(1, min(MAX_SPLITS, PARTIAL_BYTES // max(1, bytes_per_split)))
    fair = triton.cdiv(sum(tiles * keys for tiles, keys in work), slots)
    chunk = triton.cdiv(max(fair, KEYS_PER_SPLIT, triton.cdiv(longest, most)), 64) * 64
    return chunk, max(1, triton.cdiv(longest, chunk))


@triton.jit(do_not_specialize=["tokens", "requests", "chunk"])
def _attend_latent(
    query: tl.tensor,
    query_rope: tl.tensor,
    latent: tl.tensor,
    key_rope: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_rt: tl.tensor,
    stride_rh: tl.tensor,
    stride_table: tl.tensor,
    scale: tl.tensor,
    chunk: tl.tensor,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Rows of one tile (tokens x query heads, or some of one token's heads) over one share of their keys.

    query [tokens, HEADS, D], query_rope [tokens, HEADS, ROPE], latent [rows, D] and key_rope [rows, ROPE] in block order,
    out [splits, tokens, HEADS, D], lse [splits, tokens, HEADS]. Grid: (tiles, splits); tiles of one token's heads are
    neighbours, so that all but the first find the keys in the L2 cache.
    """
    WIDTH: tl.constexpr = HEADS if HEADS < BLOCK_M else BLOCK_M
    TILE: tl.constexpr = BLOCK_M // WIDTH
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    split = tl.program_id(1)

    request, first = find_tile(query_start_loc, requests + 1, tl.program_id(0) // HEAD_TILES, TILE)
    # Rows past the last request are one more request: it has no keys.
    real, clipped = request < requests, tl.minimum(request, requests - 1)
    start = tl.load(query_start_loc + request)
    length = tl.where(real, tl.load(query_start_loc + clipped + 1), tokens) - start
    keys = tl.where(real, tl.load(seq_lens + clipped), 0)
    if first >= length:
        return

    rows = tl.arange(0, BLOCK_M)
    index = first + rows // WIDTH
    head = tl.program_id(0) % HEAD_TILES * BLOCK_M + rows % WIDTH
    live = (rows < TILE * WIDTH) & (index < length) & (head < HEADS)
    token = (start + index).to(tl.int64)
    dims, turns = tl.arange(0, D), tl.arange(0, ROPE)
    query += token[:, None] * stride_qt + head[:, None] * stride_qh + dims[None, :]
    q = tl.load(query, mask=live[:, None], other=0.0)
    query_rope += token[:, None] * stride_rt + head[:, None] * stride_rh + turns[None, :]
    q_rope = tl.load(query_rope, mask=live[:, None], other=0.0)

    # The last key that each row sees: row i of the request sits at key position keys - length + i.
    seen_to = tl.where(CAUSAL, keys - length + index, keys - 1)
    share = tl.cdiv(tl.maximum(chunk, tl.cdiv(keys, tl.num_programs(1))), BLOCK_N) * BLOCK_N
    low = split * share
    high = tl.minimum(tl.max(tl.where(live, seen_to, -1)) + 1, low + share)

    # Running maximum (in units of log 2), sum and output of each row.
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    table = block_table + clipped.to(tl.int64) * stride_table
    blocks = _blocks(table, low, high, BLOCK_SIZE, BLOCK_N)
    for begin in range(low, high, BLOCK_N):
        inside = begin + tl.arange(0, BLOCK_N) < high
        slots = blocks.to(tl.int64) * BLOCK_SIZE + (begin % BLOCK_SIZE + tl.arange(0, BLOCK_N)) % BLOCK_SIZE
        # Rows outside hold whatever was there before, NaN too: they are read as 0.
        k = tl.load(latent + slots[:, None] * D + dims[None, :], mask=inside[:, None], other=0.0)
        k_rope = tl.load(key_rope + slots[:, None] * ROPE + turns[None, :], mask=inside[:, None], other=0.0)
        # The next tile's blocks are looked up while this one is computed: its loads wait for nothing.
        blocks = _blocks(table, begin + BLOCK_N, high, BLOCK_SIZE, BLOCK_N)
        if BLOCK_M < 64:
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        else:
            # Both conditions hold here. A dot in a block of its own is divided among the warps as is best for it alone; else
            # the compiler gives 8 warps 8 x 16 rows, to match the dot below, and the half without rows repeats the other.
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if real:
                scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            if begin < high:
                scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        visible = (begin + tl.arange(0, BLOCK_N)[None, :] <= seen_to[:, None]) & inside[None, :]
        scores = tl.where(visible, scores * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has only scores of -inf; subtracting 0 leaves its weights 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(k.dtype), k, mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    place = (split.to(tl.int64) * tokens + token) * HEADS + head
    tl.store(lse + place, (top + tl.log2(total)) * LN2, mask=live)
    # Merging leaves out a part whose LSE is -inf; alone, it is the result.
    if (low < high) | (tl.num_programs(1) == 1):
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + place[:, None] * D + dims[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _blocks(table: tl.tensor, begin: tl.tensor, high: tl.tensor, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Blocks of the cache in which the BLOCK_N tokens from ``begin``, a multiple of BLOCK_N, lie: one, if all are in one."""
    columns = begin + (0 if BLOCK_SIZE % BLOCK_N == 0 else tl.arange(0, BLOCK_N))
    return tl.load(table + columns // BLOCK_SIZE, mask=columns < high, other=0)
