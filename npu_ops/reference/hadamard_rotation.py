"""Semantics of npu_ops.hadamard_rotation in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_rotation(x: Tensor) -> Tensor:
    """See npu_ops.hadamard_rotation.hadamard_rotation."""
    width = x.shape[-1]
    return torch.matmul(x.float(), sylvester(width, x.device)).mul(width**-0.5).to(x.dtype)


def sylvester(width: int, device: torch.device) -> Tensor:
    """H [width, width] in fp32: the sign at (i, j) is the parity of the ones in i & j."""
    index = torch.arange(width, device=device)
    bits = index[:, None] & index
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    return 1.0 - 2.0 * (bits & 1)
