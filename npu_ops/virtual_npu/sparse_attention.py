"""Values and rules of attention over named keys (SFA), plain and over packed int8 rows, and of the quantisation in tiles.

Rows that see no key are NaN, for CANN's documents promise nothing about them, and so is the LSE's part of such rows.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from npu_ops.reference import kv_quant_sparse_flash_attention as quantised
from npu_ops.reference import sparse_flash_attention as reference
from npu_ops.reference.pack_sparse_kv import in_tiles
from npu_ops.virtual_npu.rules import rule, scattered, unless
from npu_ops.virtual_npu.rules import values as numbers
from npu_ops.virtual_npu.values import refuse, value

SFA = "npu_sparse_flash_attention"
SFA_DOC = "torch_npu doc of npu_sparse_flash_attention"
SHAPES = "torch_npu 2.13, shape function and host code of npu_sparse_flash_attention"
HEADS_DOC = "vllm-ascend's use of npu_sparse_flash_attention"
QSFA, QUANT = "npu_kv_quant_sparse_flash_attention", "npu_dynamic_block_quant"
QSFA_DOC, QUANT_DOC = (f"torch_npu doc of {name}" for name in (QSFA, QUANT))
ABSORBED = 2
LATENT, ROPE, TILE, PACKED = 512, 64, 128, 656
UNLIMITED = 9223372036854775807


@value(f"npu::{SFA}")
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    **checked: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layouts TND and PA_BSND or, for one request, TND: output, and the largest score and the sum in torch_npu's shapes."""
    refuse(SFA, sinks=sinks, window=(pre_tokens, next_tokens) != (UNLIMITED, UNLIMITED))
    assert query_rope is not None
    assert key_rope is not None
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_kv is not None
    latent, rope, heads = key.flatten(0, -2), key_rope.flatten(0, -2), key.shape[1]
    block_size = key.shape[1]
    if layout_kv == "TND":
        if len(actual_seq_lengths_kv) != 1:
            raise NotImplementedError(f"{SFA}: the virtual NPU computes packed keys of one request")
        block_size, block_table = len(latent), torch.zeros(1, 1, dtype=torch.int32)
    assert block_table is not None
    owners, limits = reference.row_limits(len(query), actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)

    def read(slots: Tensor) -> tuple[Tensor, Tensor]:
        return reference.take(latent, slots).float(), reference.take(rope, slots).float()

    out, top, total = reference.attend(
        query, query_rope, read, sparse_indices[:, 0], owners, limits, block_table, block_size, scale_value
    )
    empty = top == -math.inf
    for result in (out, top, total):
        result[empty] = math.nan
    if not return_softmax_lse:
        return out, torch.empty(0), torch.empty(0)
    # With pages torch_npu takes the block size for the number of key heads.
    shape = (heads, len(query), query.shape[1] // heads)
    if layout_kv != "TND":
        return out, torch.full(shape, math.nan), torch.full(shape, math.nan)
    return out, top.view(shape), total.view(shape)


@value(f"npu::{QSFA}")
def npu_kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: Tensor | None = None,
    value_dequant_scale: Tensor | None = None,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    **checked: Any,
) -> Tensor:
    """Layouts TND and PA_BSND over rows of 656 bytes; there is no LSE."""
    refuse(QSFA, key_dequant_scale=key_dequant_scale, value_dequant_scale=value_dequant_scale, key_dtype=key_dtype,
           value_dtype=value_dtype, window=(pre_tokens, next_tokens) != (UNLIMITED, UNLIMITED))  # fmt: skip
    assert block_table is not None
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_kv is not None
    out, lse = quantised.kv_quant_sparse_flash_attention(
        query, key, sparse_indices, scale_value=scale_value, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_kv=actual_seq_lengths_kv,
        sparse_mode=sparse_mode, return_softmax_lse=True,
    )  # fmt: skip
    out[lse == -math.inf] = math.nan
    return out


@value(f"npu::{QUANT}")
def npu_dynamic_block_quant(
    x: Tensor, *, min_scale: float = 0.0, dst_type_max: float = 0.0, **checked: Any
) -> tuple[Tensor, Tensor]:
    """int8 of tiles of 1 x 128, and their scales in fp32."""
    refuse(QUANT, dst_type_max=dst_type_max)
    tiles = in_tiles(x)
    scales = (tiles.abs().amax(-1) / 127.0).clamp(min=min_scale)
    return (tiles / scales[..., None]).round().to(torch.int8).flatten(-2), scales


# By the names that rules.py gives arguments: actual_seq_lengths_kv is actual_seq_kvlen there.
# ---- rules ----------------------------------------------------------------------------------------------------------------


def _described(*tensors: Tensor | None) -> list[str]:
    return [f"{x.dtype} {list(x.shape)}" if x is not None else "None" for x in tensors]


@rule("contiguous tensors, but for lengths and block_table", SFA_DOC, SFA, QSFA)
def _contiguous(c: Any) -> object:
    return scattered(c, "query", "key", "value", "sparse_indices", "query_rope", "key_rope")


@rule("a query [T, N, 512] with a query_rope [T, N, 64] in fp16 or bf16", SFA_DOC, SFA)
def _sparse_query(c: Any) -> object:
    right = c.query_rope is not None and c.query.dim() == 3 and c.query.shape[2] == LATENT
    right = right and c.query_rope.shape == (*c.query.shape[:2], ROPE) and c.query.dtype == c.query_rope.dtype
    return unless(right and c.query.dtype in (torch.float16, torch.bfloat16), _described(c.query, c.query_rope))


@rule("one latent key head of 512 that is the value too, and a key_rope of 64, in the dtype of the query", SFA_DOC, SFA)
def _sparse_keys(c: Any) -> object:
    given = (c.key, c.value, c.key_rope)
    if c.value is None or c.key_rope is None:
        return _described(*given)
    dims = {"PA_BSND": 4, "TND": 3}.get(c.layout_kv)
    right = all(x.dim() == dims and x.shape[-2] == 1 and x.dtype == c.query.dtype for x in given)
    right = right and c.key.shape == c.value.shape and c.key.shape[-1] == LATENT
    return unless(right and c.key_rope.shape == (*c.key.shape[:-1], ROPE), _described(*given))


@rule("int32 sparse_indices [T, 1, K], each row with its -1 at the end", SFA_DOC, SFA, QSFA)
def _sparse_indices(c: Any) -> object:
    x = c.sparse_indices
    if x.dtype != torch.int32 or x.dim() != 3 or x.shape[:2] != (c.query.shape[0], 1):
        return _described(x, c.query)
    rows = numbers(x[:, 0]) or ()
    late = [row for row in rows if any(a < 0 <= b for a, b in pairwise(row))]
    return unless(not late, late[:1])


@rule("int32 lengths on the device, as many of queries, cumulative, as of keys", SFA_DOC, SFA, QSFA)
def _sparse_lengths(c: Any) -> object:
    given = (c.actual_seq_lengths_query, c.actual_seq_kvlen)
    if None in given:
        return _described(*given)
    right = all(x.dim() == 1 and x.dtype == torch.int32 and x.shape == given[0].shape for x in given)
    ends, keys = (numbers(x) or [0] for x in given)
    right = right and all(a <= b for a, b in pairwise((0, *ends))) and ends[-1] <= c.query.shape[0] and min(keys) >= 0
    return unless(right, [*_described(*given), ends, keys])


@rule("an int32 block_table [B, blocks] that holds all keys of each request, with PA_BSND alone", SFA_DOC, SFA, QSFA)
def _sparse_table(c: Any) -> object:
    table, paged = c.block_table, c.layout_kv == "PA_BSND"
    if not paged or table is None:
        return unless(paged == (table is not None), _described(table))
    longest = max(numbers(c.actual_seq_kvlen) or [0])
    right = table.dtype == torch.int32 and table.dim() == 2 and table.shape[0] == c.actual_seq_kvlen.shape[0]
    return unless(right and table.shape[1] * c.key.shape[1] >= longest, f"{_described(table)} for {longest} keys")


@rule("layouts TND with PA_BSND or TND, sparse_mode 0 or 3, attention_mode 2 and a sparse_block_size of 1", SFA_DOC, SFA)
def _sparse_modes(c: Any) -> object:
    given = (c.layout_query, c.layout_kv, c.sparse_mode, c.attention_mode, c.sparse_block_size)
    right = c.layout_query == "TND" and c.layout_kv in ("PA_BSND", "TND") and c.sparse_mode in (0, 3)
    return unless(right and given[3:] == (ABSORBED, 1), given)


@rule("a number of heads that is a power of two, at most 128", HEADS_DOC, SFA, QSFA)
def _sparse_heads(c: Any) -> object:
    return unless(c.query.shape[1] in (1, 2, 4, 8, 16, 32, 64, 128), c.query.shape[1])


@rule("packed keys where the maximum and the sum are wanted, which with pages get the shape of no heads", SHAPES, SFA)
def _sparse_lse(c: Any) -> object:
    return unless(not c.return_softmax_lse or c.layout_kv == "TND", c.layout_kv)


@rule("a query [T, N, 576] in bf16 over int8 rows [blocks, block_size, 1, 656] as key and value", QSFA_DOC, QSFA)
def _packed_tensors(c: Any) -> object:
    right = c.query.dim() == 3 and c.query.shape[2] == LATENT + ROPE and c.query.dtype == torch.bfloat16
    right = right and c.key.dim() == 4 and c.key.shape[2:] == (1, PACKED) and c.key.shape == c.value.shape
    return unless(right and c.key.dtype == c.value.dtype == torch.int8, _described(c.query, c.key, c.value))


@rule("layouts TND and PA_BSND, sparse_mode 0 or 3, attention_mode 2, a sparse_block_size of 1, scales of tiles (2) of 128 in "
      "the rows (1) and 64 rope elements", QSFA_DOC, QSFA)  # fmt: skip
def _packed_modes(c: Any) -> object:
    given = (c.layout_query, c.layout_kv, c.attention_mode, c.sparse_block_size, c.key_quant_mode, c.value_quant_mode,
             c.quant_scale_repo_mode, c.tile_size, c.rope_head_dim)  # fmt: skip
    right = given == ("TND", "PA_BSND", ABSORBED, 1, 2, 2, 1, TILE, ROPE) and c.sparse_mode in (0, 3)
    return unless(right, (*given, c.sparse_mode))


@rule("no empty tensor", f"{SHAPES}", SFA, QSFA)
def _sparse_empty(c: Any) -> object:
    given = (c.query, c.key, c.value, c.sparse_indices)
    return unless(all(x is not None and x.numel() for x in given), _described(*given))


@rule("a 2-D or 3-D x in fp16 or bf16, blocks of 1 x 128, int8 (1) by rounding to the nearest, and a min_scale of at least 0",
      QUANT_DOC, QUANT)  # fmt: skip
def _block_quant(c: Any) -> object:
    given = (c.row_block_size, c.col_block_size, c.dst_type, c.round_mode)
    right = c.x.dim() in (2, 3) and c.x.dtype in (torch.float16, torch.bfloat16) and c.min_scale >= 0
    return unless(right and given == (1, TILE, 1, "rint"), [*_described(c.x), *given, c.min_scale])
