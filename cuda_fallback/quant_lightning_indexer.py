"""The lightning indexer on 8-bit rows: the kernels of lightning_indexer, with scales."""

from __future__ import annotations

from torch import Tensor

from cuda_fallback.lightning_indexer import top_positions


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
    max_seq_len: int,
    logits_bytes: int = 536870912,
) -> Tensor:
    """See npu_ops.quant_lightning_indexer.quant_lightning_indexer."""
    return top_positions(
        query, key, weights, query_dequant_scale, key_dequant_scale, actual_seq_lengths_query, actual_seq_lengths_key,
        block_table, sparse_count, max_seq_len, logits_bytes,
    )  # fmt: skip
