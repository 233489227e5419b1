"""Values of npu_fused_infer_attention_score and its second version, brought to the packed form of npu_ops.reference.

Layouts TND, BSND, BNSD and BSH, paged or not, with grouped heads, sinks and rope parts of their own; sparse modes 0, 3 and 4,
and 1 or 0 with a full mask as far as they hide nothing. Rows that see no key are NaN unless inner_precise asks for them:
CANN's document promises nothing about those rows, so nobody may rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from npu_ops.reference.fused_infer_attention import fused_infer_attention
from npu_ops.virtual_npu.values import refuse, value

UNLIMITED = 2147483647
FIX_EMPTY_ROWS = 2  # a bit of inner_precise
OP = "npu_fused_infer_attention_score"


@dataclass(frozen=True)
class Packed:
    """The tensors of one call with tokens packed; lengths of queries and of packed keys cumulative, of paged ones not."""

    query: Tensor
    key: Tensor
    value: Tensor
    qlens: list[int]
    kvlens: list[int]


@value("npu::npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    softmax_lse_flag: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The first version: other names for the same arguments."""
    return npu_fused_infer_attention_score_v2(
        query, key, value, atten_mask=atten_mask, actual_seq_qlen=actual_seq_lengths, actual_seq_kvlen=actual_seq_lengths_kv,
        num_query_heads=num_heads, softmax_scale=scale, return_softmax_lse=softmax_lse_flag, **kwargs,
    )  # fmt: skip


@value("npu::npu_fused_infer_attention_score_v2")
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v and its LSE, [..., 1] in fp32, or an empty LSE if none was asked for."""
    refuse(OP, **others)
    heads, kv_heads = num_query_heads, num_key_value_heads or num_query_heads
    if query_rope is not None and key_rope is not None:
        query, key = _with_rope(query, query_rope, heads, input_layout), _with_rope(key, key_rope, kv_heads, input_layout)
    packed = _pack(query, key, value, actual_seq_qlen, actual_seq_kvlen, (heads, kv_heads), input_layout, block_table)
    _check_mask(atten_mask, sparse_mode)
    values, width = packed.value, packed.value.shape[-1]
    # The reference has one width for keys and values; columns of zeros add zeros. Padding by none would copy a whole cache.
    if width != packed.key.shape[-1]:
        values = torch.nn.functional.pad(values, (0, packed.key.shape[-1] - width))
    out, lse = fused_infer_attention(
        packed.query,
        packed.key,
        values,
        actual_seq_qlen=packed.qlens,
        actual_seq_kvlen=packed.kvlens,
        query_start_loc=torch.tensor([0, *packed.qlens]),
        seq_lens=torch.tensor(packed.kvlens),
        num_query_heads=heads,
        num_key_value_heads=kv_heads,
        softmax_scale=softmax_scale,
        block_table=block_table,
        block_size=packed.key.shape[1] if block_table is not None else block_size,
        sparse_mode=0 if sparse_mode == 1 else sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        learnable_sink=learnable_sink,
        return_softmax_lse=True,
    )
    out = out[..., :width].contiguous()
    if not inner_precise & FIX_EMPTY_ROWS:
        empty = lse == -math.inf
        out[empty] = math.nan
        lse[empty] = math.nan
    return _unpack(out, lse if return_softmax_lse else None, query, input_layout)


def _check_mask(mask: Tensor | None, sparse_mode: int) -> None:
    if sparse_mode not in (0, 1, 3, 4):
        raise NotImplementedError(f"{OP}: the virtual NPU computes sparse modes 0, 1, 3 and 4, got {sparse_mode}")
    if sparse_mode in (0, 1) and mask is not None and bool(mask.any()):
        raise NotImplementedError(f"{OP}: the virtual NPU computes with the compressed masks of sparse modes 3 and 4 only")


def _with_rope(nope: Tensor, rope: Tensor, heads: int, layout: str) -> Tensor:
    """Head dims of both parts side by side."""
    if layout == "BSH" and nope.dim() == 3:
        return torch.cat([_split(nope, heads), _split(rope, heads)], -1).flatten(-2)
    return torch.cat((nope, rope), -1)


def _pack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    qlens: Sequence[int] | None,
    kvlens: Sequence[int] | None,
    heads: tuple[int, int],
    layout: str,
    block_table: Tensor | None,
) -> Packed:
    paged = block_table is not None
    if layout == "TND":
        assert qlens is not None
        assert kvlens is not None
        if paged:
            key, value = (_paged(x, heads[1]) for x in (key, value))
        return Packed(query, key, value, list(qlens), list(kvlens))
    if layout not in ("BSH", "BSND", "BNSD"):
        raise NotImplementedError(f"{OP}: the virtual NPU computes layouts TND, BSND, BNSD and BSH, got {layout}")
    rows = _tokens_second(query, heads[0], layout)
    batch, length = rows.shape[:2]
    # A single row is a decode, whose length CANN ignores. Rows past a request's length come out as rows without keys.
    own = [length] * batch if qlens is None or length == 1 else list(qlens)
    if own != [length] * batch:
        raise NotImplementedError(f"{OP}: the virtual NPU computes full query rows in layout {layout}, got lengths {own}")
    ends = [length * (i + 1) for i in range(batch)]
    if paged:
        assert kvlens is not None
        return Packed(rows.flatten(0, 1), _paged(key, heads[1]), _paged(value, heads[1]), ends, list(kvlens))
    keys, values = (_tokens_second(x, heads[1], layout) for x in (key, value))
    lens = list(kvlens) if kvlens is not None else [keys.shape[1]] * batch
    flat_keys, flat_values = (torch.cat([x[i, :n] for i, n in enumerate(lens)]) for x in (keys, values))
    return Packed(rows.flatten(0, 1), flat_keys, flat_values, ends, list(accumulate(lens)))


def _split(x: Tensor, heads: int) -> Tensor:
    """[..., heads * dim] as [..., heads, dim]."""
    return x.view(*x.shape[:-1], heads, -1)


def _tokens_second(x: Tensor, heads: int, layout: str) -> Tensor:
    """[batch, tokens, heads, dim]."""
    if layout == "BSH":
        return _split(x, heads)
    return x.transpose(1, 2) if layout == "BNSD" else x


def _paged(cache: Tensor, heads: int) -> Tensor:
    """[blocks, block_size, heads, dim] of CANN's [blocks, block_size, heads * dim] or [blocks, heads, block_size, dim]."""
    if cache.dim() == 3:
        return _split(cache, heads)
    if cache.dim() == 4:
        return cache.transpose(1, 2)
    raise NotImplementedError(f"{OP}: the virtual NPU computes with 3-D and 4-D caches, got {list(cache.shape)}")


def _unpack(out: Tensor, lse: Tensor | None, query: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    none = torch.empty(0)
    if layout == "TND":
        return out, none if lse is None else lse[..., None]
    batch = query.shape[0]
    rows = out.view(batch, -1, *out.shape[1:])  # [batch, tokens, heads, dim]
    logs = none if lse is None else lse.view(batch, -1, lse.shape[1]).transpose(1, 2)[..., None].contiguous()
    if layout == "BSH":
        return rows.flatten(-2), logs
    return (rows.transpose(1, 2).contiguous() if layout == "BNSD" else rows), logs


@value("npu::npu_fusion_attention_v3")
def npu_fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0,
    **others: Any,
) -> tuple[Tensor, ...]:
    """What PyTorch's scaled_dot_product_attention becomes on an NPU: [batch, heads, tokens, dim], forward."""
    op = "npu_fusion_attention_v3"
    refuse(op, pse=pse, padding_mask=padding_mask, prefix=prefix, actual_seq_qlen=actual_seq_qlen,
           actual_seq_kvlen=actual_seq_kvlen, dropout=1.0 - keep_prob, sink=others.get("sink"))  # fmt: skip
    if input_layout != "BNSD" or sparse_mode not in (0, 2, 3):
        got = f"{input_layout}, {sparse_mode}"
        raise NotImplementedError(f"{op}: the virtual NPU computes layout BNSD in sparse modes 0, 2 and 3, got {got}")
    rows, keys = query.shape[2], key.shape[2]
    hidden = atten_mask
    if sparse_mode:  # the mask is a compressed one: causal from the upper left, or from the lower right
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 if sparse_mode == 2 else 1 + keys - rows)
    group = query.shape[1] // key.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (key, value))
    scores = query.float() @ k.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden.bool(), -math.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -math.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v / total).to(query.dtype)
    eight = [x.expand(*x.shape[:-1], 8).contiguous() for x in (top, total)]
    return out, *eight, query.new_empty(0), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
