"""npu_ops.hadamard_rotation on Ascend: torch_npu.npu_transpose_batchmatmul, from its documents, not yet run on an NPU.

Factors of 1/8 are exact in every type; what is left of 1 / sqrt(128) follows. fp32, of which the document leaves open whether
it is rounded to HF32, runs the reference.
"""

from __future__ import annotations

import functools

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import hadamard_rotation as reference


def hadamard_rotation(x: Tensor) -> Tensor:
    """See npu_ops.hadamard_rotation.hadamard_rotation."""
    if x.dtype == torch.float32:
        return virtual_npu.in_one_piece(reference.hadamard_rotation, x)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, 1, x.shape[-1]).contiguous()
    matrix = _matrix(x.shape[-1], x.dtype, x.device)
    out: Tensor = torch_npu.npu_transpose_batchmatmul(rows, matrix, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    return out.mul(0.5**0.5).view(x.shape)


@functools.cache
def _matrix(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H / 8 as [1, width, width]."""
    return (reference.sylvester(width, device) / 8).to(dtype)[None]
