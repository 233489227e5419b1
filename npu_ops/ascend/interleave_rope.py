"""npu_ops.interleave_rope on Ascend: torch_npu.npu_interleave_rope, written from its documents and not yet run on an NPU.

It takes contiguous 4-D tensors BNSD in 16 bits, a batch of T here, and factors of full width. fp32 runs the reference.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_ops import virtual_npu
from npu_ops.reference import interleave_rope as reference


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See npu_ops.interleave_rope.interleave_rope."""
    if x.dtype == torch.float32:
        return virtual_npu.in_one_piece(reference.interleave_rope, x, cos, sin)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotated: Tensor = torch_npu.npu_interleave_rope(x.unsqueeze(2).contiguous(), widen(cos), widen(sin))
    return rotated.squeeze(2)


def widen(part: Tensor) -> Tensor:
    """[T, 1, 1, 64] of [T, 32]: the same angles for both halves of the result."""
    return torch.cat((part, part), -1)[:, None, None]
