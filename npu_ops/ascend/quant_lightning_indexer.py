"""npu_ops.quant_lightning_indexer on Ascend: torch_npu.npu_quant_lightning_indexer, from its documents, not yet run on an NPU.

What they leave open is set right as for lightning_indexer. Which 8-bit type the chip takes is for CANN to say.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops.ascend.lightning_indexer import in_order


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
    if query.shape[0] == 0 or key.shape[0] == 0 or max_seq_len == 0:  # CANN takes no empty tensor
        return torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32, device=query.device)
    if weights.dtype != torch.float16:
        weights = weights.to(torch.float16 if query.dtype == torch.int8 else torch.bfloat16)
    indices = torch_npu.npu_quant_lightning_indexer(
        query.contiguous(), key, weights.contiguous(), query_dequant_scale.contiguous(), key_dequant_scale, 0, 0,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_key=actual_seq_lengths_key,
        block_table=block_table[: len(actual_seq_lengths_key)].contiguous(), layout_query="TND", layout_key="PA_BSND",
        sparse_count=sparse_count, sparse_mode=3,
    )  # fmt: skip
    return in_order(indices, actual_seq_lengths_query, actual_seq_lengths_key)
