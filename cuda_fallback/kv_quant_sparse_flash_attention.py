"""Attention over the keys that indices name, on packed int8 rows: the kernel of sparse_flash_attention.py in its other form."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_fallback.sparse_flash_attention import LATENT, attend


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
    nope, rope = query.tensor_split((LATENT,), -1)
    # Its three parts in their own types. Rope bytes are bf16.
    parts = (key_value, key_value.view(torch.bfloat16), key_value.view(torch.float32))
    out, lse = attend(
        nope, rope, parts, sparse_indices, scale_value, block_table, actual_seq_lengths_query, actual_seq_lengths_kv,
        sparse_mode, key_value.shape[1],
    )  # fmt: skip
    return out, lse if return_softmax_lse else lse.new_empty(0)
