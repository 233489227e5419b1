"""Semantics of npu_ops.rms_norm in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(input: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """See npu_ops.rms_norm.rms_norm."""
    return _normalise(input.float(), gamma, epsilon).to(input.dtype)


def add_rms_norm(input: Tensor, residual: Tensor, gamma: Tensor, *, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """See npu_ops.rms_norm.add_rms_norm."""
    total = input.float() + residual.float()
    normed = _normalise(total, gamma, epsilon).to(input.dtype)
    # An op never returns one of its arguments or another result: copy where the cast to fp32 would be no copy.
    return normed, total.to(input.dtype)


def _normalise(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
