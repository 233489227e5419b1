"""npu_ops.rotary on Ascend: torch_npu.npu_rotary_mul, written from its documents and not yet run on an NPU.

It takes 4-D tensors of one dtype (here BSND with a batch of one, and 1S1D) and factors as wide as the rotated dims.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, rotary_mode: str = "half") -> Tensor:
    """See npu_ops.rotary.rotary."""
    width = 2 * cos.shape[1]
    if input.numel() == 0:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)
    # fp32 angles lift the input, so that neither they nor the products are rounded to 16 bits before the sum.
    x = input[..., :width].to(cos.dtype).unsqueeze(0)
    r1, r2 = (_widen(part, rotary_mode)[None, :, None] for part in (cos, sin))
    rotated = torch_npu.npu_rotary_mul(x, r1, r2, rotary_mode).squeeze(0).to(input.dtype)
    return rotated if width == input.shape[-1] else torch.cat((rotated, input[..., width:]), -1)


def _widen(part: Tensor, rotary_mode: str) -> Tensor:
    return torch.cat((part, part), -1) if rotary_mode == "half" else part.repeat_interleave(2, -1)
