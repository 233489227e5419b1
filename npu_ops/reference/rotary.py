"""Semantics of npu_ops.rotary in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, rotary_mode: str = "half") -> Tensor:
    """See npu_ops.rotary.rotary."""
    half = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    x = input[..., : 2 * half].float()
    if rotary_mode == "half":
        first, second = x[..., :half], x[..., half:]
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(rotated, -1) if rotary_mode == "half" else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((joined.to(input.dtype), input[..., 2 * half :]), -1)
