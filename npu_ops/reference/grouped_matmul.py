"""Semantics of npu_ops.grouped_matmul in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_matmul(x: Tensor, weight: Tensor, group_list: Tensor) -> Tensor:
    """See npu_ops.grouped_matmul.grouped_matmul."""
    out = torch.empty((x.shape[0], weight.shape[2]), dtype=x.dtype, device=x.device)
    start = 0
    for matrix, size in zip(weight, group_list.tolist(), strict=True):
        if size:
            end = start + size
            out[start:end] = (x[start:end].float() @ matrix.float()).to(x.dtype)
            start = end
    return out
