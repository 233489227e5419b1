"""The lightning indexer: scores of a tile of keys into one buffer, then the best of the tile and of those kept so far.

The buffer depends on the number of rows and the budget alone, so that a prefill of equal chunks asks for one size, and a
running selection makes any context fit. Selection is by radix: a score is an ordered 32-bit number, and four histograms of
8 bits each find the least that is kept. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_fallback.launch import find_tile, launch, tile_bound, unit_stride

# A program scores KEYS keys for ROWS rows, in products COLUMNS wide: the heads of one row or of several.
KEYS, ROWS, COLUMNS = 128, 64, 128
# Keys of a tile. The least keeps merging cheap beside scoring; the most is what one row could ever want.
MIN_TILE, MAX_TILE = 4096, 2**20
# Scores that a selecting program holds at once.
CHUNK = 2048


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
    max_seq_len: int,
    logits_bytes: int = 536870912,
) -> Tensor:
    """See npu_ops.lightning_indexer.lightning_indexer."""
    return top_positions(
        query, key, weights, None, None, actual_seq_lengths_query, actual_seq_lengths_key, block_table, sparse_count,
        max_seq_len, logits_bytes,
    )  # fmt: skip


def buffer_shape(tokens: int, count: int, logits_bytes: int) -> tuple[int, int]:
    """Rows and keys of the buffer of scores: all rows, unless the smallest tile of keys would then be too large."""
    rows = min(tokens, logits_bytes // (4 * max(count, MIN_TILE)))
    return rows, min(MAX_TILE, logits_bytes // (4 * rows) // KEYS * KEYS)


def top_positions(
    query: Tensor, key: Tensor, weights: Tensor, query_scale: Tensor | None, key_scale: Tensor | None, ends: Tensor,
    lens: Tensor, block_table: Tensor, count: int, max_seq_len: int, logits_bytes: int,
) -> Tensor:  # fmt: skip
    """What both forms of the indexer return; scales are None for the form without."""
    tokens, heads, dim = query.shape
    requests = ends.shape[0]
    indices = torch.full((tokens, 1, count), -1, dtype=torch.int32, device=query.device)
    if 0 in (tokens, requests, max_seq_len):
        return indices
    rows, tile = buffer_shape(tokens, count, logits_bytes)
    scores = torch.empty((rows, tile), dtype=torch.float32, device=query.device)
    best = torch.empty((rows, count), dtype=torch.float32, device=query.device)
    query, weights, ends, lens = (unit_stride(x) for x in (query, weights, ends, lens))
    query_scale = None if query_scale is None else unit_stride(query_scale)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    padded = triton.next_power_of_2(heads)
    # Two programs share a multiprocessor, so that one multiplies while the other sums: hence no more than two stages. Without
    # matrix units for fp32, a product has to fit the registers.
    keys, columns, warps = (KEYS, COLUMNS, 4) if query.element_size() < 4 else (32, 64, 8)
    step = min(ROWS, max(1, columns // padded))
    for first_row in range(0, tokens, rows):
        for first_key in range(0, max_seq_len, tile):
            if max_seq_len > count:  # else every visible key is kept, whatever its score
                grid = (triton.cdiv(min(tile, max_seq_len - first_key), keys), tile_bound(tokens, requests, ROWS))
                launch(
                    _score, grid, query, query, key, weights, query_scale, key_scale, scores, starts, ends, lens, block_table,
                    requests, first_row, rows, first_key, query.stride(0), query.stride(1), weights.stride(0),
                    0 if query_scale is None else query_scale.stride(0), block_table.stride(0), BLOCK_SIZE=key.shape[1],
                    HEADS=heads, HEADS_PADDED=padded, DIM=dim, TILE=tile, ROWS=ROWS, KEYS=keys, STEP=step, num_warps=warps,
                    num_stages=2,
                )  # fmt: skip
            launch(
                _select, (min(rows, tokens - first_row),), query, scores, best, indices, ends, lens, requests, first_row,
                first_key, COUNT=count, TILE=tile, CHUNK=CHUNK, num_warps=8,
            )  # fmt: skip
    return indices


@triton.jit(do_not_specialize=["requests", "first_row", "rows", "first_key"])
def _score(
    query: tl.tensor,
    key: tl.tensor,
    weights: tl.tensor,
    query_scale: tl.tensor,
    key_scale: tl.tensor,
    scores: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    lens: tl.tensor,
    block_table: tl.tensor,
    requests: tl.tensor,
    first_row: tl.tensor,
    rows: tl.tensor,
    first_key: tl.tensor,
    stride_row: tl.tensor,
    stride_head: tl.tensor,
    stride_weight: tl.tensor,
    stride_scale: tl.tensor,
    stride_table: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Scores [rows, TILE] from row ``first_row`` and key ``first_key`` on. Grid: (blocks of keys, tiles of rows)."""
    request, first = find_tile(starts, requests, tl.program_id(1), ROWS)
    start = tl.load(starts + request)
    length = tl.load(ends + request) - start
    keys = tl.load(lens + request)
    last = tl.minimum(tl.minimum(first + ROWS, length), first_row + rows - start)
    first = tl.maximum(first, first_row - start)
    column = tl.program_id(0) * KEYS
    if (first >= last) | (first_key + column >= keys - length + last):
        return
    position = first_key + column + tl.arange(0, KEYS)
    held = position < keys
    block = tl.load(block_table + request.to(tl.int64) * stride_table + position // BLOCK_SIZE, mask=held, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    dims = tl.arange(0, DIM)
    # Keys come first, so that the heads of a row lie in few threads when they are summed.
    tile = tl.load(key + slot[:, None] * DIM + dims[None, :], mask=held[:, None], other=0.0)
    pair = tl.arange(0, STEP * HEADS_PADDED)
    head = pair % HEADS_PADDED
    out = scores + column + tl.arange(0, KEYS)[:, None]
    for base in tl.range(first, last, STEP):
        row = base + pair // HEADS_PADDED
        token = (start + row).to(tl.int64)
        live = (row < last) & (head < HEADS)
        queries = tl.load(query + (token * stride_row + head * stride_head)[None, :] + dims[:, None], mask=live[None, :],
                          other=0.0)  # fmt: skip
        weight = tl.load(weights + token * stride_weight + head, mask=live, other=0.0).to(tl.float32)
        if query_scale is not None:
            weight *= tl.load(query_scale + token * stride_scale + head, mask=live, other=0.0).to(tl.float32)
        if query.dtype.element_ty == tl.int8:
            products = tl.dot(tile, queries, out_dtype=tl.int32).to(tl.float32)
        else:
            products = tl.dot(tile, queries, input_precision="ieee")
        terms = tl.reshape(tl.maximum(products, 0.0) * weight[None, :], (KEYS, STEP, HEADS_PADDED))
        total = tl.sum(terms, 2)
        if key_scale is not None:
            total *= tl.load(key_scale + slot, mask=held, other=0.0).to(tl.float32)[:, None]
        own = base + tl.arange(0, STEP)
        place = (start + own - first_row).to(tl.int64)[None, :]
        tl.store(out + place * TILE, total, mask=(own < last)[None, :])


@triton.jit(do_not_specialize=["requests", "first_row", "first_key"])
def _select(
    scores: tl.tensor,
    best: tl.tensor,
    indices: tl.tensor,
    ends: tl.tensor,
    lens: tl.tensor,
    requests: tl.tensor,
    first_row: tl.tensor,
    first_key: tl.tensor,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Merge a row's new scores with the best so far, which lie in order of position. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    token = first_row + row
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + middle) <= token:
            low = middle + 1
        else:
            high = middle
    if low >= requests:  # padding
        return
    limit = (tl.load(lens + low) - tl.load(ends + low) + token + 1).to(tl.int32)
    fresh = tl.minimum(limit - first_key, TILE)
    if fresh <= 0:
        return
    held = tl.minimum(first_key, COUNT)
    scores += row * TILE
    best += row * COUNT
    indices += token * COUNT
    least = tl.full((), 0, tl.uint32)
    room = tl.full((), 2147483647, tl.int32)  # of those equal to the least
    if held + fresh > COUNT:
        room = tl.full((), COUNT, tl.int32)
        for digit in tl.static_range(4):
            counts = _count_digits(best, held, least, 24 - 8 * digit, CHUNK)
            counts += _count_digits(scores, fresh, least, 24 - 8 * digit, CHUNK)
            above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
            hit = (above < room) & (above + counts >= room)
            found = tl.sum(tl.where(hit, tl.arange(0, 256), 0), 0)
            room -= tl.sum(tl.where(hit, above, 0), 0)
            least = (least << 8) | found.to(tl.uint32)
    none = tl.full((), 0, tl.int32)
    taken, equals = _keep(best, indices, held, none, none, none, best, indices, least, room, True, CHUNK)
    _keep(scores, indices, fresh, first_key, taken, equals, best, indices, least, room, False, CHUNK)


@triton.jit
def _ordered(score: tl.tensor) -> tl.tensor:
    """A number that grows with the score; zeros of both signs are one."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _count_digits(
    scores: tl.tensor, length: tl.tensor, prefix: tl.tensor, SHIFT: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """How many scores have each digit of 8 bits at SHIFT, among those whose higher digits are ``prefix``."""
    counts = tl.zeros((256,), tl.int32)
    for first in tl.range(0, length, CHUNK):
        place = first + tl.arange(0, CHUNK)
        live = place < length
        number = _ordered(tl.load(scores + place, mask=live, other=0.0))
        if SHIFT < 24:
            live = live & ((number >> (SHIFT + 8)) == prefix)
        counts += tl.histogram(((number >> SHIFT) & 255).to(tl.int32), 256, mask=live)
    return counts


@triton.jit
def _keep(
    scores: tl.tensor,
    positions: tl.tensor,
    length: tl.tensor,
    first_key: tl.tensor,
    taken: tl.tensor,
    equals: tl.tensor,
    best: tl.tensor,
    indices: tl.tensor,
    least: tl.tensor,
    room: tl.tensor,
    HELD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Append the scores above ``least``, and the first ``room`` equal to it, with their positions; new counts of both.

    ``scores`` may be ``best`` itself: a score never moves up, and each chunk is read before it is written.
    """
    for first in tl.range(0, length, CHUNK):
        place = first + tl.arange(0, CHUNK)
        live = place < length
        score = tl.load(scores + place, mask=live, other=0.0)
        position = tl.load(positions + place, mask=live, other=0) if HELD else first_key + place
        number = _ordered(score)
        equal = (live & (number == least)).to(tl.int32)
        first_equals = (equal > 0) & (equals + tl.cumsum(equal, 0) <= room)
        kept = (live & (number > least)) | first_equals
        target = taken + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.debug_barrier()
        tl.store(best + target, score, mask=kept)
        tl.store(indices + target, position, mask=kept)
        equals += tl.sum(equal, 0)
        taken += tl.sum(kept.to(tl.int32), 0)
    return taken, equals
