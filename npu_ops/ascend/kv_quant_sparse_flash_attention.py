"""npu_ops.kv_quant_sparse_flash_attention on Ascend: torch_npu.npu_kv_quant_sparse_flash_attention, from its documents.

It has no LSE. A call that wants one, as ranks with parts of a context do in decoding, unpacks the named rows to bf16, some
query rows at a time, and attends to them with torch_npu.npu_sparse_flash_attention: right, though slower. Heads are padded,
rows without keys set and fp32 served as in sparse_flash_attention.py. Nothing here has run on an NPU yet.
"""

from __future__ import annotations

import math

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.ascend.sparse_flash_attention import ABSORBED, MAX_HEADS, slots, sparse_flash_attention
from npu_ops.reference import kv_quant_sparse_flash_attention as reference
from npu_ops.reference.pack_sparse_kv import LATENT, ROPE, TILE, unpack_sparse_kv
from npu_ops.reference.sparse_flash_attention import row_limits, take

PER_TILE, WITH_DATA = 2, 1
# Unpacked rows of one call with LSE.
UNPACKED_BYTES = 256 * 1024 * 1024


def kv_quant_sparse_flash_attention(
    query: Tensor,
    key_value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    block_table: Tensor,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_mode: int,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """See npu_ops.kv_quant_sparse_flash_attention.kv_quant_sparse_flash_attention."""
    if query.dtype == torch.float32:
        return virtual_npu.in_one_piece(
            reference.kv_quant_sparse_flash_attention, query, key_value, sparse_indices, scale_value=scale_value,
            block_table=block_table, actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_kv, sparse_mode=sparse_mode, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    tokens, heads = query.shape[:2]
    if 0 in (tokens, key_value.shape[0]):  # CANN takes no empty tensor
        lse_shape = (tokens, heads) if return_softmax_lse else (0,)
        return query.new_zeros((tokens, heads, LATENT)), query.new_full(lse_shape, -math.inf, dtype=torch.float32)
    owners, limits = row_limits(tokens, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)
    hidden = (sparse_indices < 0) | (sparse_indices >= limits[:, None, None])
    if return_softmax_lse:
        named = slots(sparse_indices[:, 0], owners, block_table, key_value.shape[1])
        return _attend_unpacked(query, key_value.flatten(0, 2), named, hidden[:, 0], scale_value)
    outs = []
    for part in torch.split(query, MAX_HEADS, 1):
        count = part.shape[1]
        padding = (0, 0, 0, (1 << (count - 1).bit_length()) - count)  # up to the next power of two
        out = torch_npu.npu_kv_quant_sparse_flash_attention(
            torch.nn.functional.pad(part, padding).contiguous(),
            key_value,
            key_value,
            sparse_indices.contiguous(),
            scale_value,
            key_quant_mode=PER_TILE,
            value_quant_mode=PER_TILE,
            block_table=block_table[: actual_seq_lengths_query.shape[0]].contiguous(),
            actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_kv,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=sparse_mode,
            attention_mode=ABSORBED,
            quant_scale_repo_mode=WITH_DATA,
            tile_size=TILE,
            rope_head_dim=ROPE,
        )
        outs.append(out[:, :count])
    # Indices ascend: a row whose first one is hidden sees none.
    out = torch.cat(outs, 1).masked_fill(hidden[:, :, :1], 0.0)
    return out, query.new_empty(0, dtype=torch.float32)


def _attend_unpacked(query: Tensor, rows: Tensor, named: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Each query row as a request of its own, whose keys are the rows [T, K] that it names in one block, unpacked."""
    count = named.shape[1]
    step = max(1, UNPACKED_BYTES // (count * (LATENT + ROPE) * query.element_size()))
    # Where no row is named any row is read, and its index says that it is none.
    named = named.clamp(0, rows.shape[0] - 1)
    index = torch.arange(count, dtype=torch.int32, device=query.device).masked_fill(hidden, -1)[:, None]
    parts = []
    for part, part_named, part_index in zip(*(torch.split(x, step) for x in (query, named, index)), strict=True):
        latent, rope = unpack_sparse_kv(take(rows, part_named)[:, :, None], query.dtype)
        each = torch.arange(part.shape[0] + 1, dtype=torch.int32, device=query.device)
        nope, query_rope = part.tensor_split((LATENT,), -1)
        parts.append(
            sparse_flash_attention(
                nope,
                latent,
                part_index,
                scale_value=scale,
                query_rope=query_rope,
                key_rope=rope,
                block_table=each[:-1, None],
                actual_seq_lengths_query=each[1:],
                actual_seq_lengths_kv=torch.full_like(each[1:], count),
                sparse_mode=0,
                return_softmax_lse=True,
            )
        )
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return out, lse
