"""Semantics of npu_ops.kv_quant_sparse_flash_attention in plain PyTorch: unpack_sparse_kv, then sparse_flash_attention."""

from __future__ import annotations

from torch import Tensor

from npu_ops.reference.pack_sparse_kv import LATENT, unpack_sparse_kv
from npu_ops.reference.sparse_flash_attention import attend, row_limits, take


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
    packed = key_value.flatten(0, 2)
    owners, limits = row_limits(query.shape[0], actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)

    def read(slots: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = unpack_sparse_kv(take(packed, slots), query.dtype)
        return latent.float(), rope.float()

    nope, query_rope = query.tensor_split((LATENT,), -1)
    out, top, total = attend(
        nope, query_rope, read, sparse_indices[:, 0], owners, limits, block_table, key_value.shape[1], scale_value
    )
    return out, top + total.log() if return_softmax_lse else top.new_empty(0)
