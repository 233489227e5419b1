"""npu_ops.lightning_indexer on Ascend: torch_npu.npu_lightning_indexer, written from its documents and not yet run on an NPU.

They promise no order of the positions and say nothing of rows past the last request or rows without keys: what comes back is
sorted, and everything that a row may not see is -1, here. Which of equal scores wins is CANN's choice. fp32 runs the reference.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import lightning_indexer as reference

PAST = 2**31 - 1  # behind every position


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor,
    sparse_count: int,
    max_seq_len: int,
    logits_bytes: int = 536870912,
) -> Tensor:
    """See npu_ops.lightning_indexer.lightning_indexer."""
    if query.dtype == torch.float32:
        return virtual_npu.in_one_piece(
            reference.lightning_indexer, query, key, weights, actual_seq_lengths_query=actual_seq_lengths_query,
            actual_seq_lengths_key=actual_seq_lengths_key, block_table=block_table, sparse_count=sparse_count,
            max_seq_len=max_seq_len, logits_bytes=logits_bytes,
        )  # fmt: skip
    if query.shape[0] == 0 or key.shape[0] == 0 or max_seq_len == 0:  # CANN takes no empty tensor
        return torch.full((query.shape[0], 1, sparse_count), -1, dtype=torch.int32, device=query.device)
    indices, _ = torch_npu.npu_lightning_indexer(
        query.contiguous(), key, weights.to(query.dtype).contiguous(), actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_key=actual_seq_lengths_key, block_table=block_table[: len(actual_seq_lengths_key)].contiguous(),
        layout_query="TND", layout_key="PA_BSND", sparse_count=sparse_count, sparse_mode=3,
    )  # fmt: skip
    return in_order(indices, actual_seq_lengths_query, actual_seq_lengths_key)


def in_order(indices: Tensor, ends: Tensor, lens: Tensor) -> Tensor:
    """Positions [T, 1, K] in ascending order, with -1 last and in the place of all that a row may not see."""
    row = torch.arange(indices.shape[0], dtype=torch.int32, device=indices.device)
    request = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    limit = torch.where(row < ends[-1], lens[request] - ends[request] + row + 1, 0)[:, None, None]
    kept = torch.where((indices >= 0) & (indices < limit), indices, PAST).sort(-1).values
    return torch.where(kept < PAST, kept, -1)
