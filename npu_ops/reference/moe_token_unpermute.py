"""Semantics of npu_ops.moe_token_unpermute in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    """See npu_ops.moe_token_unpermute.moe_token_unpermute."""
    total = torch.zeros((probs.shape[0], permuted_tokens.shape[1]), device=probs.device)
    for rows, weights in zip(sorted_indices.view(probs.shape).unbind(1), probs.unbind(1), strict=True):
        (tokens,) = (rows >= 0).nonzero(as_tuple=True)
        total[tokens] += weights[tokens, None] * permuted_tokens[rows[tokens].long()].float()
    return total.to(permuted_tokens.dtype)
