"""Semantics of npu_ops.attention_update in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See npu_ops.attention_update.attention_update."""
    parts = torch.stack(list(lse))
    empty = parts.isinf()
    parts = parts.masked_fill(empty, -math.inf)
    total = parts.logsumexp(0)
    # Where all partials are empty the difference is -inf - -inf = NaN; the mask turns those weights into 0.
    weights = (parts - total).exp().masked_fill(empty, 0.0)
    out = torch.zeros(local_out[0].shape, dtype=torch.float32, device=total.device)
    for part, weight, skip in zip(local_out, weights, empty, strict=True):
        # Masked before the product: 0 * NaN would be NaN.
        out += part.float().masked_fill(skip[..., None], 0.0) * weight[..., None]
    return out.to(local_out[0].dtype), total
