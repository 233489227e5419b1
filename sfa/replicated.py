"""The indexer's keys under decode context parallelism: every rank has all of them, in pages that are shared with sharded rows.

A block of the latent cache stands for ``block_size * dcp`` tokens, of which a rank holds ``block_size``. The same block of the
indexer's cache holds them all, in the order of their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def replicated_table(table: Tensor, dcp: int) -> Tensor:
    """int32 [B, blocks * dcp]: each block of ``block_size * dcp`` rows as ``dcp`` blocks of ``block_size``."""
    return (table[..., None] * dcp + torch.arange(dcp, dtype=table.dtype, device=table.device)).flatten(1)


def slots_of(starts: Tensor, lengths: Tensor, table: Tensor, block_size: int, tokens: int) -> Tensor:
    """int64 [tokens]: where the last rows of each request lie in a cache that holds all of its tokens.

    Args:
        starts: int32 [B + 1], where each request's rows begin; the last element is at most ``tokens``.
        lengths: int32 [B], tokens of each request, the step's included.
        table: int32 [B, blocks].
        block_size: rows to a block.
        tokens: rows of the batch; those past the last request's get -1.
    """
    row = torch.arange(tokens, device=table.device)
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    real = request < len(lengths)
    request = request.clamp(max=len(lengths) - 1)
    position = torch.where(real, lengths[request] - starts[request + 1] + row, 0).long()
    slot = table[request, position // block_size].long() * block_size + position % block_size
    return torch.where(real, slot, -1)
