"""Attention of every row over the keys that its indices name, on a paged latent cache, plain or of packed int8 rows.

One program takes up to 64 heads of one row through the keys it names: their latent rows, found by the block table, are key and
value. A running softmax as in fused_infer_attention.py. Rows of few tokens and heads divide their keys among programs, whose
partial results are merged by LSE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.attention_update import merge
from cuda_fallback.launch import launch, multiprocessors, unit_stride

LATENT, ROPE, TILE, CAUSAL = 512, 64, 128, 3
# A program that reads fewer keys than this costs more in merging than it saves.
KEYS_PER_SPLIT = 128


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor,
    key_rope: Tensor,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_mode: int,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.sparse_flash_attention.sparse_flash_attention."""
    out, lse = attend(
        query, query_rope, (key, key_rope, key_rope), sparse_indices, scale_value, block_table, actual_seq_lengths_query,
        actual_seq_lengths_kv, sparse_mode, key.shape[1],
    )  # fmt: skip
    return out, lse if return_softmax_lse else lse.new_empty(0)


def attend(
    query: Tensor,
    query_rope: Tensor,
    cache: tuple[Tensor, Tensor, Tensor],
    indices: Tensor,
    scale: float,
    block_table: Tensor,
    query_lengths: Tensor,
    key_lengths: Tensor,
    sparse_mode: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Output [T, N, 512] and LSE [T, N] over the latent, rope and scale parts of a cache; scales count for int8 alone."""
    query, query_rope, block_table, indices = map(unit_stride, (query, query_rope, block_table, indices[:, 0]))
    tokens, heads, _ = query.shape
    count = indices.shape[1]
    packed = cache[0].dtype == torch.int8
    tile = tile_options(query.dtype, heads, packed)
    head_tiles = triton.cdiv(heads, tile["BLOCK_H"])
    # Programs for the whole GPU, as far as shares do not become small. Of those with 16 heads two share a multiprocessor.
    slots = multiprocessors(query) * (2 if tile["BLOCK_H"] == 16 else 1)
    splits = max(1, min(slots // max(1, tokens * head_tiles), count // KEYS_PER_SPLIT))
    share = triton.cdiv(triton.cdiv(count, splits), tile["BLOCK_N"]) * tile["BLOCK_N"]
    splits = triton.cdiv(count, share)
    partial = query.new_empty((splits, *query.shape), dtype=query.dtype if splits == 1 else torch.float32)
    partial_lse = query.new_empty((splits, tokens, heads), dtype=torch.float32)
    launch(
        _attend, (head_tiles * tokens, splits), query, query, query_rope, *cache, indices, partial, partial_lse, block_table,
        unit_stride(query_lengths), unit_stride(key_lengths), tokens, len(query_lengths), count, share, query.stride(0),
        query.stride(1), query_rope.stride(0), query_rope.stride(1), indices.stride(0), block_table.stride(0), scale,
        IS_CAUSAL=sparse_mode == CAUSAL, PACKED=packed, HEADS=heads, D=LATENT, ROPE=ROPE, TILE=TILE,
        BLOCK_SIZE=block_size, **tile,
    )  # fmt: skip
    if splits == 1:
        return partial[0], partial_lse[0]
    out, lse = torch.empty_like(partial[0], dtype=query.dtype), torch.empty_like(partial_lse[0])
    merge(partial_lse.flatten(1), partial.flatten(1, 2), lse.view(-1), out.view(-1, LATENT))
    return out, lse


def tile_options(dtype: torch.dtype, heads: int, packed: bool) -> dict[str, int]:
    """Tile sizes and launch options. As in mla_attention.py, 64 heads fill Hopper's matrix instructions.

    Packed rows become keys in registers, which leaves room for 16 of them where two programs share a multiprocessor, and none
    at all for 32 heads on 8 warps.
    """
    if dtype == torch.float32:
        return {"BLOCK_H": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 1}
    if heads <= 16:
        return {"BLOCK_H": 16, "BLOCK_N": 16 if packed else 32, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_H": 32 if heads <= 32 and not packed else 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["tokens", "requests", "count", "share"])
def _attend(
    query: tl.tensor,
    query_rope: tl.tensor,
    latent: tl.tensor,
    key_rope: tl.tensor,
    scales: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    block_table: tl.tensor,
    query_lengths: tl.tensor,
    key_lengths: tl.tensor,
    tokens: tl.tensor,
    requests: tl.tensor,
    count: tl.tensor,
    share: tl.tensor,
    stride_qt: tl.tensor,
    stride_qh: tl.tensor,
    stride_rt: tl.tensor,
    stride_rh: tl.tensor,
    stride_indices: tl.tensor,
    stride_table: tl.tensor,
    scale: tl.tensor,
    IS_CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """BLOCK_H heads of one row over one share of its indices.

    Rows of the cache: D of latent and ROPE of key_rope in block order; PACKED ones hold D bytes, ROPE elements of 16 bits and
    D / TILE scales, each seen through a pointer of its own type. out [splits, tokens, HEADS, D], lse [splits, tokens, HEADS].
    Grid: (head tiles of a row side by side, rows; splits): all but the first find the keys in the L2 cache.
    """
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    LOG2E: tl.constexpr = 1.4426950408889634
    LN2: tl.constexpr = 0.6931471805599453
    token = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    head = tl.program_id(0) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    live = head < HEADS
    dims, turns, columns = tl.arange(0, D), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)

    request, limit = _find_limit(query_lengths, key_lengths, requests, token, IS_CAUSAL)
    q = tl.load(query + token * stride_qt + head[:, None] * stride_qh + dims[None, :], mask=live[:, None], other=0.0)
    query_rope += token * stride_rt + head[:, None] * stride_rh + turns[None, :]
    q_rope = tl.load(query_rope, mask=live[:, None], other=0.0)

    # Running maximum (in units of log 2), sum and output of each head.
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, D], tl.float32)
    table = block_table + request.to(tl.int64) * stride_table
    indices += token * stride_indices
    low = tl.program_id(1) * share
    high = _last_seen(indices, low, tl.minimum(count, low + share), limit)
    seen, slots = _look_up(indices, low + columns, high, limit, table, BLOCK_SIZE)
    for begin in range(low, high, BLOCK_N):
        if PACKED:
            k, rope_rows = _unpack(latent, scales, slots, seen, dims, D, ROPE, TILE)
            k = k.to(q.dtype)
        else:
            k = tl.load(latent + slots[:, None] * D + dims[None, :], mask=seen[:, None], other=0.0)
            rope_rows = slots * ROPE
        k_rope = tl.load(key_rope + rope_rows[:, None] + turns[None, :], mask=seen[:, None], other=0.0).to(q.dtype)
        visible = seen
        # The next tile's rows are looked up while this one is computed: its loads wait for nothing.
        seen, slots = _look_up(indices, begin + BLOCK_N + columns, high, limit, table, BLOCK_SIZE)
        if BLOCK_H < 64:
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        else:
            # Both conditions hold here: see mla_attention.py.
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
            if token < tokens:
                scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            if begin < high:
                scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
        scores = tl.where(visible[None, :], scores * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet has only scores of -inf; subtracting 0 leaves its weights 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(k.dtype), k, mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    place = (tl.program_id(1).to(tl.int64) * tokens + token) * HEADS + head
    tl.store(lse + place, (top + tl.log2(total)) * LN2, mask=live)
    # Merging leaves out a part whose LSE is -inf; alone, it is the result.
    if (low < high) | (tl.num_programs(1) == 1):
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + place[:, None] * D + dims[None, :], mixed.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _find_limit(
    query_lengths: tl.tensor, key_lengths: tl.tensor, requests: tl.tensor, token: tl.tensor, IS_CAUSAL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The request of a packed row, and how many of its first keys the row may see: none, past the last request."""
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_lengths + middle) <= token:
            low = middle + 1
        else:
            high = middle
    request = tl.minimum(low, requests - 1)
    limit = tl.load(key_lengths + request)
    if IS_CAUSAL:  # the last row sees all keys, each one before it one less
        limit = limit - tl.load(query_lengths + request) + token.to(tl.int32) + 1
    return request, tl.where(low < requests, limit, 0)


@triton.jit
def _last_seen(indices: tl.tensor, low: tl.tensor, high: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """The place after the last index in [low, high) that is seen: short contexts fill a part of their list."""
    SCAN: tl.constexpr = 1024
    found = low
    for begin in range(low, high, SCAN):
        place = begin + tl.arange(0, SCAN)
        position = tl.load(indices + place, mask=place < high, other=-1)
        found = tl.maximum(found, tl.max(tl.where((position >= 0) & (position < limit), place + 1, 0)))
    return found


@triton.jit
def _look_up(
    indices: tl.tensor, place: tl.tensor, high: tl.tensor, limit: tl.tensor, table: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which of the indices at ``place`` are seen, and the rows of the cache, int64, at which their keys lie.

    What lies at the others may be NaN: with this mask it is read as 0.
    """
    position = tl.load(indices + place, mask=place < high, other=-1)
    seen = (position >= 0) & (position < limit)
    blocks = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0)
    return seen, blocks.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _unpack(
    rows: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    seen: tl.tensor,
    dims: tl.tensor,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Latent rows of packed ones in fp32, and where the rope elements of each lie, in elements of 16 bits."""
    TILES: tl.constexpr = D // TILE
    BYTES: tl.constexpr = D + 2 * ROPE + 4 * TILES
    k = tl.load(rows + slots[:, None] * BYTES + dims[None, :], mask=seen[:, None], other=0)
    places = (slots * (BYTES // 4) + (D + 2 * ROPE) // 4)[:, None] + tl.arange(0, TILES)[None, :]
    steps = tl.load(scales + places, mask=seen[:, None], other=0.0)
    k = tl.reshape(k, (k.shape[0], TILES, TILE)).to(tl.float32) * steps[:, :, None]
    return tl.reshape(k, (k.shape[0], D)), slots * (BYTES // 2) + D // 2
