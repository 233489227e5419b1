"""npu_ops.fused_infer_attention on Ascend: torch_npu.npu_fused_infer_attention_score_v2 with input layout TND.

Written from its documents; nothing here has run on an NPU yet. They say of TND: bf16 only, D of 128 (or 192), sparse
mode 0 without a mask, 3 and 4 with the compressed one, query lengths below the key lengths in mode 3. vLLM-Ascend calls
the same kernels outside of these words, so they are no errors here: fp16 and other head dims go to CANN, which knows.
fp32 goes to no CANN op: there npu_ops.reference runs, in plain PyTorch on the NPU.

The absorbed form of MLA takes the same layout: with D of 512 the documents allow 1 to 16 query rows to a request, a number of
heads that is a power of two, and sparse mode 0 without a mask for one row each, 3 with it for more.

What CANN leaves open is set right here from the lengths on the host, so that nothing waits for the device: rows past
the last request, rows that see no key, and sinks for which the document has no room.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.contract import require
from npu_ops.reference import fused_infer_attention as reference

OP = "fused_infer_attention"
UNLIMITED = 2147483647
# The kernel multiplies the cache's dims in int32, and those of one row (N_kv * D) in 16 bits.
MAX_ELEMENTS, MAX_ROW = 2**31 - 1, 65535
MAX_REQUESTS = 4096


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
    if query.dtype == torch.float32:
        return virtual_npu.in_one_piece(
            reference.fused_infer_attention, query, key, value, actual_seq_qlen=actual_seq_qlen,
            actual_seq_kvlen=actual_seq_kvlen, query_start_loc=query_start_loc, seq_lens=seq_lens,
            num_query_heads=num_query_heads, num_key_value_heads=num_key_value_heads, softmax_scale=softmax_scale,
            block_table=block_table, block_size=block_size, sparse_mode=sparse_mode, pre_tokens=pre_tokens,
            next_tokens=next_tokens, learnable_sink=learnable_sink, query_rope=query_rope, key_rope=key_rope,
            return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    qlens = [end - start for start, end in pairwise((0, *actual_seq_qlen))]
    tokens, total = query.shape[0], actual_seq_qlen[-1]
    kvlens = list(actual_seq_kvlen) if block_table is not None else [b - a for a, b in pairwise((0, *actual_seq_kvlen))]
    if total == 0 or max(kvlens) == 0:  # CANN takes no empty tensor
        lse = query.new_full((tokens, num_query_heads), -math.inf, dtype=torch.float32)
        if learnable_sink is not None:
            lse[:total] = learnable_sink.float()
        out = query.new_zeros((*query.shape[:2], value.shape[-1]))
        return out, lse if return_softmax_lse else lse.new_empty(0)
    if query_rope is not None and key_rope is not None and block_table is not None:
        out, lse = _attend_latent(
            query[:total], key, query_rope[:total], key_rope, qlens, kvlens, softmax_scale, block_table, block_size, sparse_mode
        )  # fmt: skip
        _set_rows_without_keys(out, lse, qlens, kvlens, sparse_mode, next_tokens)
        return _pad(out, tokens, 0.0), _pad(lse, tokens, -math.inf) if return_softmax_lse else lse.new_empty(0)
    # CANN's sinks are bf16 with D up to 128, and no document says whether its LSE holds them: the rest is merged here.
    inside = learnable_sink is not None and not return_softmax_lse and _takes_sink(query, value, learnable_sink)
    outside = None if inside else learnable_sink
    if block_table is None:
        key, value = key[: actual_seq_kvlen[-1]], value[: actual_seq_kvlen[-1]]
    else:
        _check_cache(key, block_size, max(qlens))
        key, value, block_table = key.flatten(2), value.flatten(2), block_table[: len(qlens)]
    wants_lse = return_softmax_lse or outside is not None
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        query[:total].contiguous(),
        key,
        value,
        atten_mask=None if sparse_mode == 0 else _mask(query.device),
        actual_seq_qlen=list(actual_seq_qlen),
        actual_seq_kvlen=list(actual_seq_kvlen),
        block_table=block_table,
        learnable_sink=learnable_sink if inside else None,
        num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        softmax_scale=softmax_scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout="TND",
        sparse_mode=sparse_mode,
        block_size=block_size,
        return_softmax_lse=wants_lse,
    )
    lse = lse.view(total, num_query_heads) if wants_lse else lse.new_empty(0)
    _set_rows_without_keys(out, lse, qlens, kvlens, sparse_mode, next_tokens)
    if outside is not None:
        out, lse = _merge_sink(out, lse, outside)
    return _pad(out, tokens, 0.0), _pad(lse, tokens, -math.inf) if return_softmax_lse else lse.new_empty(0)


def _attend_latent(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    qlens: Sequence[int],
    kvlens: Sequence[int],
    scale: float,
    block_table: Tensor,
    block_size: int,
    sparse_mode: int,
) -> tuple[Tensor, Tensor]:
    """The absorbed form over packed rows that all belong to a request; the latent cache is key and value."""
    require(key.numel() <= MAX_ELEMENTS, OP, f"a cache of at most {MAX_ELEMENTS} elements a layer", key.numel(),
            "Lower --num-gpu-blocks-override or --gpu-memory-utilization, or raise the parallel size.")  # fmt: skip
    # Of several rows to a request CANN knows the causal kind alone: rows that all see every key are requests of their own.
    single = sparse_mode == 0 or max(qlens) <= 1
    # CANN takes no request without rows.
    owners = [i for i, rows in enumerate(qlens) for _ in range(rows if single else min(rows, 1))]
    require(len(owners) <= MAX_REQUESTS, OP, f"at most {MAX_REQUESTS} requests, or rows of sparse_mode 0, with a latent cache",
            len(owners), "Lower --max-num-seqs.")  # fmt: skip
    table = block_table[: len(qlens)] if owners == list(range(len(qlens))) else block_table[owners]
    tokens, heads = query.shape[:2]
    padding = (0, 0, 0, (1 << (heads - 1).bit_length()) - heads)  # up to the next power of two
    latent = key.view(-1, 1, *key.shape[1::2])
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        torch.nn.functional.pad(query, padding).contiguous(),
        latent,
        latent,
        query_rope=torch.nn.functional.pad(query_rope, padding).contiguous(),
        key_rope=key_rope.view(-1, 1, *key_rope.shape[1::2]),
        atten_mask=None if single else _mask(query.device),
        actual_seq_qlen=list(accumulate(1 if single else qlens[i] for i in owners)),
        actual_seq_kvlen=[kvlens[i] for i in owners],
        block_table=table,
        num_query_heads=heads + padding[-1],
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="TND",
        sparse_mode=0 if single else 3,
        block_size=block_size,
        return_softmax_lse=True,
    )
    lse = lse.view(tokens, -1)
    return (out[:, :heads].contiguous(), lse[:, :heads].contiguous()) if padding[-1] else (out, lse)


def _check_cache(key: Tensor, block_size: int, longest: int) -> None:
    """Refuse what only this kernel cannot do; other devices can, so the contract of all devices does not say it."""
    require(longest <= 1 or block_size % 128 == 0, OP, "a block size of 128 or 256 for more than one row a request",
            block_size, "Start vLLM with --block-size 128.")  # fmt: skip
    require(key.numel() <= MAX_ELEMENTS, OP, f"a cache of at most {MAX_ELEMENTS} elements a layer", key.numel(),
            "Lower --num-gpu-blocks-override or --gpu-memory-utilization, or raise the parallel size.")  # fmt: skip
    row = key.shape[2] * key.shape[3]
    require(row <= MAX_ROW, OP, f"at most {MAX_ROW} elements to a token's keys", row, "Raise the tensor parallel size.")


@functools.cache
def _mask(device: torch.device) -> Tensor:
    """The compressed mask of modes 3 and 4: ones, which hide a key, above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1).to(device)


def _takes_sink(query: Tensor, value: Tensor, sink: Tensor) -> bool:
    return query.dtype == sink.dtype == torch.bfloat16 and value.shape[-1] <= 128


def _rows_without_keys(
    qlens: Sequence[int], kvlens: Sequence[int], sparse_mode: int, next_tokens: int
) -> Iterator[tuple[int, int]]:
    """Ranges of query rows that stand before the first key, or whose request has none."""
    reach = 0 if sparse_mode == 3 else next_tokens
    start = 0
    for rows, keys in zip(qlens, kvlens, strict=True):
        before = 0 if sparse_mode == 0 else min(max(rows - keys - reach, 0), rows)
        empty = rows if keys == 0 else before
        if empty:
            yield start, start + empty
        start += rows


def _set_rows_without_keys(
    out: Tensor, lse: Tensor, qlens: Sequence[int], kvlens: Sequence[int], sparse_mode: int, next_tokens: int
) -> None:
    """Write the result of rows that CANN leaves open."""
    for start, stop in _rows_without_keys(qlens, kvlens, sparse_mode, next_tokens):
        out[start:stop] = 0
        lse[start:stop] = -math.inf  # of nothing, where no LSE was asked for


def _merge_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add one more logit without a value: the weights shrink, all by the same factor."""
    total = torch.logaddexp(lse, sink.float())
    return (out.float() * torch.exp(lse - total)[..., None]).to(out.dtype), total


def _pad(rows: Tensor, tokens: int, value: float) -> Tensor:
    """Rows past the last request: CANN wants the last cumulative length to equal the rows that it is given."""
    if rows.shape[0] == tokens:
        return rows
    return torch.cat((rows, rows.new_full((tokens - rows.shape[0], *rows.shape[1:]), value)))
