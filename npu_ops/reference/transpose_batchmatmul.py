"""Semantics of npu_ops.transpose_batchmatmul in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def transpose_batchmatmul(input: Tensor, weight: Tensor) -> Tensor:
    """See npu_ops.transpose_batchmatmul.transpose_batchmatmul."""
    return torch.bmm(input.transpose(0, 1).float(), weight.float()).transpose(0, 1).to(input.dtype).contiguous()
