"""npu_ops.sparse_flash_attention on Ascend: torch_npu.npu_sparse_flash_attention, from its documents, not yet run on an NPU.

With a paged cache torch_npu 2.13 allocates CANN's maximum and sum as [block_size, T, N // block_size], which for few heads is
nothing at all. So a call that wants the LSE takes the cache as packed keys of a single request whose indices are slots: layout
TND, sparse mode 0, and what the mode would have hidden is -1. Both forms read the same rows.

CANN's number of heads is a power of two up to 128: heads are padded, and more of them go in several calls. What it gives for
rows without keys is not documented, so they are set here, from the indices and without waiting for the device. fp32 goes to no
CANN op: there npu_ops.reference runs, in plain PyTorch on the NPU.
"""

from __future__ import annotations

import math

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import sparse_flash_attention as reference

MAX_HEADS, ABSORBED = 128, 2


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
    if query.dtype == torch.float32:
        return virtual_npu.in_one_piece(
            reference.sparse_flash_attention, query, key, sparse_indices, scale_value=scale_value, query_rope=query_rope,
            key_rope=key_rope, block_table=block_table, actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_kv=actual_seq_lengths_kv, sparse_mode=sparse_mode, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    tokens, heads = query.shape[:2]
    if 0 in (tokens, key.shape[0]):  # CANN takes no empty tensor
        lse_shape = (tokens, heads) if return_softmax_lse else (0,)
        return query.new_zeros(query.shape), query.new_full(lse_shape, -math.inf, dtype=torch.float32)
    owners, limits = reference.row_limits(tokens, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)
    hidden = (sparse_indices < 0) | (sparse_indices >= limits[:, None, None])
    lengths = {
        "block_table": block_table[: actual_seq_lengths_query.shape[0]].contiguous(),
        "actual_seq_lengths_query": actual_seq_lengths_query,
        "actual_seq_lengths_kv": actual_seq_lengths_kv,
    }
    if return_softmax_lse:
        sparse_indices = slots(sparse_indices[:, 0], owners, block_table, key.shape[1]).masked_fill(hidden[:, 0], -1)[:, None]
        key, key_rope, sparse_mode = key.flatten(0, 1), key_rope.flatten(0, 1), 0
        ends = [torch.tensor([x.shape[0]], dtype=torch.int32, device=x.device) for x in (query, key)]
        lengths = {"actual_seq_lengths_query": ends[0], "actual_seq_lengths_kv": ends[1]}
    outs, lses = [], []
    for part, part_rope in zip(*(torch.split(x, MAX_HEADS, 1) for x in (query, query_rope)), strict=True):
        count = part.shape[1]
        padding = (0, 0, 0, (1 << (count - 1).bit_length()) - count)  # up to the next power of two
        out, top, total = torch_npu.npu_sparse_flash_attention(
            torch.nn.functional.pad(part, padding).contiguous(),
            key,
            key,
            sparse_indices.contiguous(),
            scale_value,
            query_rope=torch.nn.functional.pad(part_rope, padding).contiguous(),
            key_rope=key_rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="TND" if return_softmax_lse else "PA_BSND",
            sparse_mode=sparse_mode,
            attention_mode=ABSORBED,
            return_softmax_lse=return_softmax_lse,
            **lengths,
        )
        outs.append(out[:, :count])
        lses.append((top + total.log())[0, :, :count] if return_softmax_lse else top)
    # Indices ascend: a row whose first one is hidden sees none.
    empty = hidden[:, 0, :1]
    lse = torch.cat(lses, 1).masked_fill(empty, -math.inf) if return_softmax_lse else lses[0]
    return torch.cat(outs, 1).masked_fill(empty[..., None], 0.0), lse


def slots(positions: Tensor, owners: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Rows of the cache, int32, of key positions [T, K] of the requests ``owners`` [T]; any row for a position that is none."""
    columns = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    blocks = block_table[owners].gather(1, columns.long())
    return blocks * block_size + positions % block_size
