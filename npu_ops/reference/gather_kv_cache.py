"""Semantics of npu_ops.gather_kv_cache in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
) -> None:
    """See npu_ops.gather_kv_cache.gather_kv_cache."""
    block_size = key_cache.shape[1]
    lens = seq_lens.long()
    request = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)
    # A packed row's place within its request is its index less the rows of all requests before.
    position = torch.arange(len(request), device=lens.device) - (lens.cumsum(0) - lens)[request]
    if seq_offset is not None:
        position += seq_offset[request]
    block = block_table[request, position // block_size].long()
    key[: len(request)] = key_cache[block, position % block_size]
    value[: len(request)] = value_cache[block, position % block_size]
