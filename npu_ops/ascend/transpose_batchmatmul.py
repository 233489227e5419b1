"""npu_ops.transpose_batchmatmul on Ascend: torch_npu.npu_transpose_batchmatmul, from its documents, not yet run on an NPU.

With heads in the second dim it takes up to 65,535 elements to a token: wider inputs go in several calls. For fp32 its document
leaves open whether products are rounded to HF32, so there the reference runs.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import transpose_batchmatmul as reference

MAX_ROW = 65535


def transpose_batchmatmul(input: Tensor, weight: Tensor) -> Tensor:
    """See npu_ops.transpose_batchmatmul.transpose_batchmatmul."""
    tokens, heads, inner = input.shape
    if input.dtype == torch.float32:
        return virtual_npu.in_one_piece(reference.transpose_batchmatmul, input, weight)
    if input.numel() == 0:
        return input.new_empty(tokens, heads, weight.shape[2])
    step = max(1, MAX_ROW // inner)
    parts = [
        torch_npu.npu_transpose_batchmatmul(
            input[:, first : first + step].contiguous(),
            weight[first : first + step],
            perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2],
            perm_y=[1, 0, 2],
        )
        for first in range(0, heads, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
