"""Semantics of npu_ops.lightning_indexer in plain PyTorch, and what the quantised form shares with it."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows and keys of a piece: its products of one head stay in the processor's cache.
ROWS, KEYS = 256, 1024


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
        query, key, weights.float(), None, actual_seq_lengths_query, actual_seq_lengths_key, block_table, sparse_count,
        logits_bytes,
    )  # fmt: skip


def top_positions(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_scale: Tensor | None,
    ends: Tensor,
    lens: Tensor,
    block_table: Tensor,
    count: int,
    logits_bytes: int,
) -> Tensor:
    """The best positions of every row by ``key_scale * sum_h weights[h] * relu(query[h] . key)``; weights are fp32."""
    indices = torch.full((query.shape[0], 1, count), -1, dtype=torch.int32, device=query.device)
    start = 0
    for blocks, end, keys in zip(block_table, ends.tolist(), lens.tolist(), strict=False):
        rows = min(ROWS, max(1, logits_bytes // (4 * max(keys, 1))))
        for first in range(start, end, rows):
            last = min(first + rows, end)
            seen = keys - (end - last)  # by the last row
            limits = torch.arange(first, last, device=query.device)[:, None] + (keys - end + 1)
            if 0 < seen <= count:
                position = torch.arange(seen, dtype=torch.int32, device=query.device)
                indices[first:last, 0, :seen] = torch.where(position < limits, position, -1)
            elif seen > 0:
                scores = _scores(query[first:last], key, weights[first:last], key_scale, blocks, seen)
                indices[first:last, 0] = _top(scores, limits, count)
        start = end
    return indices


def _scores(query: Tensor, key: Tensor, weights: Tensor, key_scale: Tensor | None, blocks: Tensor, count: int) -> Tensor:
    """Scores [R, count] of the first ``count`` keys of one request, head by head."""
    heads = query.transpose(0, 1).float().contiguous()
    scores = torch.zeros(query.shape[0], count, dtype=torch.float32, device=query.device)
    block_size = key.shape[1]
    step = max(KEYS // block_size, 1) * block_size
    product = scores.new_empty(query.shape[0], step)
    for first in range(0, count, step):
        part = scores[:, first : first + step]
        ids = blocks[first // block_size : -(-(first + part.shape[1]) // block_size)].long()
        rows = key[ids].view(-1, key.shape[3])[: part.shape[1]].float()
        for head, weight in zip(heads, weights.unbind(1), strict=True):
            part.addcmul_(torch.mm(head, rows.T, out=product[:, : part.shape[1]]).relu_(), weight[:, None])
        if key_scale is not None:
            part *= key_scale[ids].view(-1)[: part.shape[1]].float()
    return scores


def _top(scores: Tensor, limits: Tensor, count: int) -> Tensor:
    """Positions [R, count] of the ``count`` best of each row below its limit, of equal ones the first, in order."""
    position = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    scores.masked_fill_(position >= limits, float("-inf"))
    best, chosen = scores.topk(count + 1)
    chosen, least = chosen[:, :count].int(), best[:, count - 1 : count]
    tied = (best[:, count:] == least)[:, 0]
    if bool(tied.any()):  # by position among the equal ones, behind the better ones
        some = scores[tied]
        rank = torch.where(some == least[tied], position, scores.shape[1])
        rank = torch.where(some > least[tied], position - scores.shape[1], rank)
        rank = rank.topk(count, largest=False, sorted=False).values
        chosen[tied] = torch.where(rank < 0, rank + scores.shape[1], rank)
    chosen = torch.where(chosen < limits, chosen, scores.shape[1]).sort(1).values
    return torch.where(chosen < scores.shape[1], chosen, -1).int()
