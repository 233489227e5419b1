"""npu_ops.moe_token_unpermute on Ascend: torch_npu.npu_moe_token_unpermute.

Written from its documents and not yet run on an NPU.

CANN takes rows that exist, not -1. A choice of another rank's expert names a row of the same token instead, with weight 0, so
that no token meets the NaN of another; a token without any row names the first one, which may be anything, and is set to 0.
The document wants no index twice. That is for the gradient: a sum that reads a row twice has no order to get wrong.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    """See npu_ops.moe_token_unpermute.moe_token_unpermute."""
    tokens, width = probs.shape[0], permuted_tokens.shape[1]
    if tokens == 0:
        return torch.empty((0, width), dtype=permuted_tokens.dtype, device=permuted_tokens.device)
    indices = sorted_indices.view(probs.shape)
    absent = indices < 0
    own = indices.amax(1, keepdim=True)
    rows = torch.where(absent, own.clamp(min=0), indices).flatten()
    out = torch_npu.npu_moe_token_unpermute(permuted_tokens.contiguous(), rows, probs=probs.masked_fill(absent, 0.0))
    return out.masked_fill(own < 0, 0.0)  # type: ignore[no-any-return]
