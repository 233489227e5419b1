"""Semantics of npu_ops.sparse_flash_attention in plain PyTorch: the rows that a few query rows name are gathered, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# The gathered rows of one slice of query rows, in fp32. glibc hands larger pieces back to the system each time.
SLICE_BYTES = 16 * 1024 * 1024
SPARSE_CAUSAL = 3


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
    latent, rope = key.flatten(0, 2), key_rope.flatten(0, 2)
    owners, limits = row_limits(query.shape[0], actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)

    def read(slots: Tensor) -> tuple[Tensor, Tensor]:
        return take(latent, slots).float(), take(rope, slots).float()

    out, top, total = attend(
        query, query_rope, read, sparse_indices[:, 0], owners, limits, block_table, key.shape[1], scale_value
    )
    return out, top + total.log() if return_softmax_lse else top.new_empty(0)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, on CPUs in two thirds of the time."""
    return rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])


def row_limits(tokens: int, query_lengths: Tensor, key_lengths: Tensor, sparse_mode: int) -> tuple[Tensor, Tensor]:
    """The request of each packed row, and how many of its first keys the row may see, both [tokens]; padding sees none.

    ``query_lengths`` are cumulative without a leading 0, ``key_lengths`` are not cumulative.
    """
    requests = query_lengths.shape[0]
    row = torch.arange(tokens, dtype=query_lengths.dtype, device=query_lengths.device)
    owners = torch.searchsorted(query_lengths, row, right=True)
    padding = owners == requests
    owners = owners.clamp(max=requests - 1)
    limits = key_lengths[owners]
    if sparse_mode == SPARSE_CAUSAL:  # the last row sees all keys, each one before it one less
        limits = limits - query_lengths[owners] + row + 1
    return owners, limits.masked_fill(padding, 0)


def attend(
    query: Tensor,
    query_rope: Tensor,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    indices: Tensor,
    owners: Tensor,
    limits: Tensor,
    block_table: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [T, N, D], and the largest score and the sum of exp(score - largest) of each row and head, [T, N] in fp32.

    ``read`` brings the latent and the rope rows of slots of the cache in fp32. A row without keys: 0, -inf and 1.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    top = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
    total = torch.ones_like(top)
    row_bytes = 4 * indices.shape[1] * (query.shape[2] + query_rope.shape[2])
    step = max(1, SLICE_BYTES // row_bytes)
    for begin in range(0, indices.shape[0], step):
        named = indices[begin : begin + step]
        seen = (named >= 0) & (named < limits[begin : begin + step, None])
        live = seen.any(1).nonzero()[:, 0]
        if not live.numel():
            continue
        # Most contexts are shorter than the list of indices: columns that no row uses are not gathered.
        width = int(seen.any(0).nonzero()[-1]) + 1
        seen, positions, rows = seen[live, :width], named[live, :width].long(), begin + live
        # In the place of an index that is not seen, one that is: what lies at the other may be NaN.
        positions = torch.where(seen, positions, positions.gather(1, seen.int().argmax(1, keepdim=True)))
        slots = block_table[owners[rows, None], positions // block_size].long() * block_size + positions % block_size
        latent, rope = read(slots)
        q, q_rope = query[rows].float(), query_rope[rows].float()
        scores = torch.baddbmm(q_rope @ rope.transpose(1, 2), q, latent.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(~seen[:, None], -math.inf)
        top[rows] = largest = scores.amax(-1)
        weights = scores.sub_(largest[..., None]).exp_()
        total[rows] = sums = weights.sum(-1)
        out[rows] = (weights @ latent).div_(sums[..., None]).to(out.dtype)
    return out, top, total
