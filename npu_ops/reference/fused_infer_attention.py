"""Semantics of npu_ops.fused_infer_attention in plain PyTorch, request by request and in tiles of query rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

UNLIMITED = 2147483647
# Scores of one tile, in elements of fp32: 16 MiB stay in a CPU's cache and make a million keys possible.
TILE_ELEMENTS = 4 * 1024 * 1024


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
    """See npu_ops.fused_infer_attention.fused_infer_attention."""
    out = torch.zeros((*query.shape[:2], value.shape[-1]), dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
    kv_starts = (0, *actual_seq_kvlen)

    def rows(tensor: Tensor, request: int) -> Tensor:
        """Keys or values of one request, packed."""
        if block_table is None:
            return tensor[kv_starts[request] : kv_starts[request + 1]]
        length = actual_seq_kvlen[request]
        blocks = block_table[request, : math.ceil(length / block_size)].long()
        return tensor[blocks].flatten(0, 1)[:length]

    if query_rope is not None:
        query = torch.cat((query, query_rope), -1)
    for request, (start, end) in enumerate(pairwise((0, *actual_seq_qlen))):
        if start == end:
            continue
        keys = rows(key, request)
        if key_rope is not None:
            # In fp32 at once: a request is many tiles over the same keys.
            keys = torch.cat((keys, rows(key_rope, request)), -1).float()
        # Of a latent cache, which is key and value, the request's rows are taken once.
        shared = key_rope is not None and value.data_ptr() == key.data_ptr()
        values = keys[..., : value.shape[-1]] if shared else rows(value, request)
        limits = _visible(end - start, keys.shape[0], sparse_mode, pre_tokens, next_tokens)
        _attend(query[start:end], keys, values, limits, softmax_scale, learnable_sink, out[start:end], lse[start:end])
    return out, lse if return_softmax_lse else lse.new_empty(0)


def _visible(rows: int, keys: int, sparse_mode: int, pre_tokens: int, next_tokens: int) -> tuple[int, int]:
    """Offsets (first, last) such that row i sees the keys ``i + first <= j <= i + last``, both ends clipped by the caller."""
    position = keys - rows
    if sparse_mode == 0:
        return -rows - keys, rows + keys
    if sparse_mode == 3:
        return -rows - keys, position
    return position - pre_tokens, position + next_tokens


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    limits: tuple[int, int],
    scale: float,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill ``out`` and ``lse`` of one request, some query rows at a time, over just the keys those rows can see."""
    rows, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    first, last = limits
    step = max(1, TILE_ELEMENTS // max(1, heads * keys.shape[0]))
    for begin in range(0, rows, step):
        stop = min(begin + step, rows)
        low, high = max(0, begin + first), min(keys.shape[0], stop + last)
        if low >= high:
            if sink is not None:
                lse[begin:stop] = sink.float()
            continue
        # [kv_heads, group * rows, D]: the query heads of one KV head share its keys, which are read once.
        q = query[begin:stop].float().view(stop - begin, kv_heads, -1, dim).permute(1, 2, 0, 3)
        k = keys[low:high].float().permute(1, 2, 0)
        scores = (q.reshape(kv_heads, -1, dim) @ k).view(heads, stop - begin, high - low).mul_(scale)
        row = torch.arange(begin, stop, device=query.device)[:, None]
        column = torch.arange(low, high, device=query.device)
        scores.masked_fill_((column < row + first) | (column > row + last), -math.inf)
        top = scores.amax(-1)
        if sink is not None:
            top = torch.maximum(top, sink.float()[:, None])
        # A row without keys has only scores of -inf; subtracting 0 leaves its weights exp(-inf) = 0.
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = scores.sub_(top[..., None]).exp_()
        total = weights.sum(-1)
        if sink is not None:
            total += torch.exp(sink.float()[:, None] - top)
        v = values[low:high].float().transpose(0, 1)
        mixed = (weights.view(kv_heads, -1, high - low) @ v).view(heads, stop - begin, value_dim)
        mixed /= total.masked_fill(total == 0, 1.0)[..., None]
        out[begin:stop] = mixed.transpose(0, 1).to(out.dtype)
        lse[begin:stop] = (top + total.log()).transpose(0, 1)
