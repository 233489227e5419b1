"""Semantics of npu_ops.interleave_rope in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See npu_ops.interleave_rope.interleave_rope."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)
