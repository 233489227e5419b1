"""npu_ops.swiglu on Ascend: torch_npu.npu_swiglu, written from its documents and not yet run on an NPU."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor


def swiglu(input: Tensor) -> Tensor:
    """See npu_ops.swiglu.swiglu."""
    if input.numel() == 0:
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        return torch.empty(shape, dtype=input.dtype, device=input.device)
    return torch_npu.npu_swiglu(input.contiguous(), dim=-1)  # type: ignore[no-any-return]
